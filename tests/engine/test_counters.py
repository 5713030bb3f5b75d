"""What the engine counts of its own time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from toys import random_prompts, requests_of, run_all, toy_engine, toy_target

from lilicorr.decode import SamplingParams
from lilicorr.engine import counters
from lilicorr.engine.counters import STAGES, Counters, timed


class Engine:
    """Two stages of two and three seconds, the second of which fails."""

    def __init__(self) -> None:
        self.counters, self.now = Counters(), 0.0

    @timed("prefill")
    def prefill(self, factor: float) -> str:
        self.now += 2 * factor
        return "done"

    @timed("publish")
    def publish(self) -> None:
        self.now += 3
        raise RuntimeError("it failed")


def test_a_stage_has_the_time_of_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    monkeypatch.setattr(counters, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    assert engine.prefill(1) == engine.prefill(factor=0.5) == "done"
    with pytest.raises(RuntimeError, match="it failed"):
        engine.publish()
    assert dict(zip(STAGES, engine.counters.stage_seconds)) == {"admit": 0, "prefill": 3, "decode": 0, "publish": 3}


def test_a_step_is_at_every_stage_and_never_at_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one whenever it is read."""
    engine = toy_engine(toy_target(), None)
    ticks = iter(range(1_000_000))
    monkeypatch.setattr(counters, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    run_all(engine, requests_of(random_prompts(3), lambda i: SamplingParams(5)))
    assert min(engine.counters.stage_seconds) > 0
    assert engine.counters.stage_seconds[0] == engine.counters.num_steps
    assert 2 * sum(engine.counters.stage_seconds) == next(ticks)  # every reading began a stage or ended it
