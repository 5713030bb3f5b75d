"""The kernels' bench at its toy size: it measures every kernel, and refuses to time one that is wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from benches import kernels
from benches.timing import summary


def test_every_kernel_is_checked_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = tmp_path / "results" / "kernels.jsonl"
    monkeypatch.setattr(kernels, "DRY_CONCURRENCIES", (1,))
    monkeypatch.setattr(kernels, "DRY_REPEATS", 1)
    monkeypatch.setattr(sys, "argv", ["kernels", "--dry", "--output", str(output)])
    kernels.main()
    rows = [json.loads(text) for text in output.read_text(encoding="utf-8").splitlines()]
    files = {path.stem for path in (Path(kernels.__file__).parents[1] / "lilicorr" / "kernels").glob("*.py")}
    measured = {row["kernel"].partition(",")[0] for row in rows}
    assert measured == files - {"__init__", "language", "nodes"} | {"build_nodes"}
    assert all(row["median_us"] > 0 and row["bytes"] > 0 and row["provenance"]["versions"] for row in rows)
    kinds = {"triton"} if torch.cuda.is_available() else {"reference", "interpreted"}
    assert {row["version"] for row in rows} == kinds


def test_a_wrong_kernel_is_not_timed():
    right = torch.arange(4.0)
    case = kernels.Case("toy", lambda: (right, right.long()), lambda: (right, right.long()), 1)
    kernels.check(case)
    for wrong in ((right + 1, right.long()), (right, right.long() + 1)):
        with pytest.raises(AssertionError, match="toy"):
            kernels.check(dataclasses.replace(case, run=lambda wrong=wrong: wrong))


def test_summary_of_times():
    found = summary([float(value) for value in range(10, 0, -1)])
    assert found == {"median_us": 5.5, "p10_us": 2.0, "p90_us": 9.0, "repeats": 10}
