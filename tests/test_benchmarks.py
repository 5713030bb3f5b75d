"""Evaluation sets: one schema fixture per loader, the prompt forms, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fake_wheels import json_lines, put_benchmark_wheels
from lilicorr import wheels
from lilicorr.benchmarks import (
    BENCHMARKS,
    FROM_STARTER,
    FROM_STDIN,
    PASS_THE_TESTS,
    STEP_BY_STEP,
    benchmark_facts,
    load_benchmark,
)

PLACEHOLDER = "Full benchmark data should be fetched from the source, see the card."

# name -> (a row of the public file, its id, what the model is sent)
SCHEMAS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "humaneval": (
        {"task_id": "HumanEval/7", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "", "test": ""},
        "HumanEval/7",
        (f"{PASS_THE_TESTS}\n```python\ndef f(x):\n\n```",),
    ),
    "mt_bench": ({"question_id": 81, "category": "math", "turns": ["One?", "Two?"]}, "81", ("One?", "Two?")),
    "gsm8k_100": (
        {"id": "gsm8k-test-0013", "prompt": "P", "expected": "18"},
        "gsm8k-test-0013",
        (f"P\n{STEP_BY_STEP}",),
    ),
    "gsm8k": ({"question": "Q", "answer": "5 #### 5"}, "gsm8k-0", (f"Q\n{STEP_BY_STEP}",)),
    "math500": (
        {"problem": "P", "solution": "S", "answer": "1", "subject": "Algebra", "level": 2, "unique_id": "test/1.json"},
        "test/1.json",
        (f"P\n{STEP_BY_STEP}",),
    ),
    "aime25": ({"problem": "P", "answer": "70", "id": "0"}, "0", (f"P\n{STEP_BY_STEP}",)),
    "mbpp": ({"task_id": 2, "prompt": "Write f.", "code": "", "test_list": ["assert f()"]}, "2", ("Write f.",)),
    "livecodebench": (
        {"question_id": "abc", "question_content": "Add.", "starter_code": "class S:", "platform": "leetcode"},
        "abc",
        (f"Add.\n\n{FROM_STARTER}\n```python\nclass S:\n```",),
    ),
    "alpaca_eval": (
        {"instruction": "Say hi.", "output": "hi", "generator": "g", "dataset": "d"},
        "alpaca_eval-0",
        ("Say hi.",),
    ),
    "speed_bench": (
        {"question_id": "f" * 32, "category": "qa", "turns": ["A", "B"], "multiturn": True},
        "f" * 32,
        ("A", "B"),
    ),
}


SCHEMAS |= {f"speed_{length}": SCHEMAS["speed_bench"] for length in ("1k", "2k", "8k", "16k", "32k")}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """The rows as the kind of file that the name asks for."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows), indent=1), encoding="utf-8")
    else:
        data = json_lines(*rows)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_every_set_has_a_schema_here() -> None:
    assert set(SCHEMAS) == set(BENCHMARKS) - {"aime25_25"}  # a member of a larger file: test_packaged_sets


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_file_of_each_schema(name: str, suffix: str, tmp_path: Path) -> None:
    row, row_id, turns = SCHEMAS[name]
    prompts = load_benchmark(name, write(tmp_path / f"file{suffix}", row))
    assert [(prompt.id, prompt.turns) for prompt in prompts] == [(row_id, turns)]


def test_the_other_spellings(tmp_path: Path) -> None:
    stdin = {**SCHEMAS["livecodebench"][0], "starter_code": ""}
    assert load_benchmark("livecodebench", write(tmp_path / "a.jsonl", stdin))[0].turns == (f"Add.\n\n{FROM_STDIN}",)
    prepared = {"question_id": "1", "messages": [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]}
    assert load_benchmark("speed_bench", write(tmp_path / "b.jsonl", prepared))[0].turns == ("A", "B")
    other = {"question": "Q", "answer": "70"}
    assert load_benchmark("aime25", write(tmp_path / "c.jsonl", other))[0].turns == (f"Q\n{STEP_BY_STEP}",)


@pytest.mark.parametrize("name", ["speed_bench", "speed_32k"])
def test_a_placeholder_is_refused(name: str, tmp_path: Path) -> None:
    rows = [SCHEMAS[name][0], {"question_id": "x7", "category": "qa", "turns": [PLACEHOLDER]}]
    with pytest.raises(ValueError, match=r"row 1 \(x7\): this row has a placeholder"):
        load_benchmark(name, write(tmp_path / "qualitative.parquet", *rows))


def test_categories_go_with_the_prompts(tmp_path: Path) -> None:
    row = {"question_id": "1", "turns": ["A"]}
    rows = [row | {"category": "low_entropy"}, row | {"category": "QA"}, row | {"category": None}]
    prompts = load_benchmark("speed_8k", write(tmp_path / "a.jsonl", *rows))
    assert [prompt.category for prompt in prompts] == ["low_entropy", "qa", ""]
    other = {"question": "Q", "category": "sums"}
    assert load_benchmark("gsm8k", write(tmp_path / "b.jsonl", other))[0].category == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json_lines({"text": "Q"}), r"row 0 \(gsm8k-0\): no column 'question'; there are: text"),
        (json_lines({"question": "Q"}, {"question": None}), r"row 1 .*a turn must be a text, got None"),
        (json_lines({"question": " \n"}), r"a turn must be a text, got ' \\n'"),
        (json_lines({"question": "Q"}) + b'{"question": "R', r"line 2: broken JSON at character 13"),
        (b'[{"question": "Q"}, {"ques', r"broken JSON at character 21 of 26"),
        (json_lines([1, 2]), r"row 0: a row must be an object"),
        (gzip.compress(json_lines({"question": "Q"}), mtime=0)[:-9], r"ended before the end"),
        (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20, r"invalid block type"),
        (b'{"question": "Q", "n": ' + b"9" * 5000 + b"}", "line 1: .*4300"),
        (b"PAR1 and no more", "no complete Parquet file"),
        (b"", r"no rows"),
    ],
)
def test_a_file_that_does_not_fit(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_benchmark("gsm8k", path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b'{"rows": []}', b'{"cases": {"a": 1}}', b"[1]"])
def test_an_object_without_its_rows_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "aime.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must be an object with a list 'cases', got") as error:
        load_benchmark("aime25_25", path)
    assert str(path) in str(error.value)


def test_turns_that_are_no_list_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question_id": 1, "category": "math", "turns": None})
    with pytest.raises(ValueError, match=r"row 0 .*its turns are no list"):
        load_benchmark("mt_bench", path)


def test_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown benchmark 'gsm9k'; known: humaneval, mt_bench"):
        load_benchmark("gsm9k")
    with pytest.raises(ValueError, match="no package has 'gsm8k'.*humaneval, mt_bench, gsm8k_100, aime25_25"):
        load_benchmark("gsm8k")
    with pytest.raises(FileNotFoundError):
        load_benchmark("gsm8k", tmp_path / "absent.jsonl")


def test_the_sample_is_a_fixed_shuffle(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", *({"question": str(number)} for number in range(20)))
    whole = load_benchmark("gsm8k", path)
    few = load_benchmark("gsm8k", path, max_prompts=5)
    assert [prompt.id for prompt in whole] == [f"gsm8k-{number}" for number in range(20)]
    assert [prompt.id for prompt in few] == ["gsm8k-19", "gsm8k-5", "gsm8k-14", "gsm8k-4", "gsm8k-9"]
    assert load_benchmark("gsm8k", path, max_prompts=3) == few[:3]
    assert load_benchmark("gsm8k", path, max_prompts=20) == whole


def test_packaged_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILICORR_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"is missing; get it with: python pipelines/fetch.py benchmarks"):
        load_benchmark("humaneval")
    put_benchmark_wheels(monkeypatch, tmp_path / "packages")
    assert load_benchmark("humaneval")[0].id == "HumanEval/0"
    assert load_benchmark("mt_bench")[0].turns == ("Write.", "Rewrite.")
    assert load_benchmark("gsm8k_100")[0].turns == (f"How many?\n{STEP_BY_STEP}",)
    assert [(p.id, p.turns) for p in load_benchmark("aime25_25")] == [("aime2025-01", (f"Find $b$.\n{STEP_BY_STEP}",))]
    facts = benchmark_facts("mt_bench")
    assert (facts["prompts"], facts["turns"], facts["licence"]) == (1, 2, "Apache-2.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prompts", "turns", "sha256"),
    [
        ("humaneval", 164, 164, "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"),
        ("mt_bench", 80, 160, "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7"),
        ("gsm8k_100", 100, 100, "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973"),
        ("aime25_25", 25, 25, "b99902f1d74eeda0aaa9fd21cc75dc335e5f0e88b5cbf46dec946d06e5fa9c3b"),
    ],
)
def test_the_real_packages(name: str, prompts: int, turns: int, sha256: str) -> None:
    wheels.download(wheels.GROUPS["benchmarks"])
    facts = benchmark_facts(name)
    assert (facts["prompts"], facts["turns"], facts["sha256"]) == (prompts, turns, sha256)
    assert len({prompt.id for prompt in load_benchmark(name)}) == prompts
