"""Evaluation by the engine: the figures of the reference decoder, but for what the engine does not tell."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from lilicorr.decode import SamplingParams
from lilicorr.evaluate import EngineSystem
from lilicorr.target import Target
from test_evaluate import CONFIG, ask, chat_target, run

__all__ = ["chat_target"]  # a fixture


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_gives_the_figures_of_the_reference(chat_target: Target, temperature: float):
    config = dataclasses.replace(CONFIG, max_new_tokens=16, temperature=temperature)
    chat_target.lm_head[70:72] *= 8  # answers of so few tokens that an untrained drafter is right now and then
    sets = {"held_out": [ask("0", "say", "and more"), ask("1", "say so")]}
    expected = run(chat_target, sets, config=config)["systems"]
    found = run(chat_target, sets, config=config, make_system=EngineSystem)["systems"]
    for system, by_set in expected.items():
        wanted, got = by_set["held_out"], found[system]["held_out"]
        assert got.keys() == wanted.keys() and got["tokens_per_s"] > 0
        for name, value in wanted.items():
            if name.startswith(("oracle", "top1")):
                assert got[name] is None
            elif name == "by_length":
                taus = [{length: part["tau"] for length, part in cell[name].items()} for cell in (wanted, got)]
                assert taus[0] == taus[1] and taus[0]
            elif not name.startswith(("tokens_per_s", "speedup")):
                assert got[name] == value, (system, name)
    assert temperature == 0 or expected["lilicorr"]["held_out"]["tau"] > 1.0


def test_an_answer_takes_no_longer_than_its_last_block(chat_target: Target, monkeypatch: pytest.MonkeyPatch):
    system = EngineSystem(chat_target, None)
    system.engine._steps_behind = 1  # as on a GPU: a step is begun that the answer does not need
    step, steps = system.engine.step, []

    def counted():
        steps.append(step())
        return steps[-1]

    monkeypatch.setattr(system.engine, "step", counted)
    monkeypatch.setattr("lilicorr.evaluate.time", SimpleNamespace(perf_counter=lambda: float(len(steps))))
    answer = system.answer([65, 66], SamplingParams(3))
    last = next(number for number, chunks in enumerate(steps, start=1) if chunks and chunks[-1].last)
    assert answer.seconds == last < len(steps) and not system.engine.busy


def test_a_broken_target_ends_an_evaluation_by_the_engine(chat_target: Target):
    system = EngineSystem(chat_target, None)
    chat_target.lm_head[5] = float("nan")
    with pytest.raises(RuntimeError, match="not finite at position 2"):
        system.answer([65, 66], SamplingParams(3))
