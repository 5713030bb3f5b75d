"""pipelines/evaluate.py: what it sets up around the measuring; tests/test_evaluate.py has the rest."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lilicorr.config import PipelineConfig, TrainConfig
from pipelines import evaluate


def test_measuring_has_a_thread_on_every_core_and_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(*_: Any) -> dict[str, Any]:
        seen.append(torch.get_num_threads())
        raise ValueError("a set is missing")

    monkeypatch.setattr(evaluate, "measure_systems", measure)
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
    try:
        with pytest.raises(ValueError, match="a set is missing"):
            evaluate.measure(PipelineConfig())
        assert seen == [len(os.sched_getaffinity(0))]
        assert torch.get_num_threads() == len(os.sched_getaffinity(0)) + 1
    finally:
        torch.set_num_threads(before)


def test_gpus_of_the_profile_decide_where_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "measure", lambda _: {"where": "here"})
    monkeypatch.setattr(evaluate, "measure_on_cluster", lambda _, num_gpus: {"where": num_gpus})
    found = [evaluate.run(PipelineConfig(train=TrainConfig(gpus_per_worker=gpus)))["where"] for gpus in (0.0, 0.5)]
    assert found == ["here", 0.5]
