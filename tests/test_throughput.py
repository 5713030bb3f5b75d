"""Many requests at once: the figures of the reference decoder, a throughput by the clock, and what is kept."""

from __future__ import annotations

import copy
import dataclasses
import json
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from lilicorr import throughput
from lilicorr.chat import ChatError
from lilicorr.config import EngineConfig
from lilicorr.engine.engine import Engine
from lilicorr.evaluate import AUTOREGRESSIVE, Prompt
from lilicorr.target import Target
from lilicorr.throughput import first_turns, measure_throughput
from test_evaluate import CONFIG, ask, chat_target, draft_model, render, run

__all__ = ["chat_target"]  # a fixture

WORDS = ("one", "two", "three", "four", "five", "six", "seven")
PROMPTS = [dataclasses.replace(ask(word, f"say {word}"), category="ab"[i % 2]) for i, word in enumerate(WORDS)]
SETS = {"speed_1k": PROMPTS, "other": [ask("o", "one")]}
TOGETHER = dataclasses.replace(CONFIG, max_new_tokens=16, concurrencies=(1, 3, 8))


def measure(target: Target, results: dict[str, Any], config: Any = TOGETHER, **changes: Any) -> dict[str, Any]:
    models = {"dflash": draft_model(target, "argmax"), "lilicorr": draft_model(target)}
    arguments = dict(sets=SETS, config=config, render=render, results=results, save=lambda _: None) | changes
    return measure_throughput(target, models, **arguments)


def test_every_concurrency_has_the_reference_decoders_acceptance(chat_target: Target) -> None:
    chat_target.lm_head[70:72] *= 8  # answers of so few tokens that an untrained drafter is right now and then
    greedy = run(chat_target, SETS, config=TOGETHER)
    before = copy.deepcopy(greedy)
    results = measure(chat_target, greedy)
    assert greedy == before  # the results that came in are as they were
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    for system, by_set in results["systems"].items():
        assert "by_concurrency" not in by_set["other"]
        cell = by_set["speed_1k"]
        assert list(cell["by_concurrency"]) == ["1", "3", "8"]
        for concurrency, parts in cell["by_concurrency"].items():
            assert list(parts) == ["a", "b"]
            for category, values in parts.items():
                alone = cell["by_category"][category]
                count = alone["num_prompts"]
                assert (values["num_prompts"], values["matches_autoregressive"]) == (count, count), system
                assert (values["tau"], values["tau_ci95"][0] > 0) == (alone["tau"], True), (system, category)
                assert values["rows"] == min(int(concurrency), count)
                plain = results["systems"][AUTOREGRESSIVE]["speed_1k"]["by_concurrency"][concurrency][category]
                assert values["speedup"] == values["tokens_per_s"] / plain["tokens_per_s"] > 0
    ours = results["systems"]["lilicorr"]["speed_1k"]
    assert ours["by_category"]["a"]["tau"] > 1 and ours["by_concurrency"]["8"]["a"]["num_tokens"] > 4
    assert results["systems"][AUTOREGRESSIVE]["speed_1k"]["by_concurrency"]["3"]["a"]["speedup"] == 1.0


def test_a_category_is_timed_whole_and_so_many_rows_run_at_once(
    chat_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = run(chat_target, SETS, config=TOGETHER)
    clock, generate, made, engines = [0.0], Engine.generate, [], []

    class Counted(Engine):
        def __init__(self, target: Target, draft_model: Any, config: EngineConfig) -> None:
            assert not any(engine() for engine in engines)  # one at a time: each takes the memory there is
            engines.append(weakref.ref(self))
            made.append((config.max_running, config.prefix_cache))
            super().__init__(target, draft_model, dataclasses.replace(config, num_pages=2))

        def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
            clock[0] += 4.0
            return generate(self, prompts, params)

    monkeypatch.setattr(throughput, "Engine", Counted)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    results = measure(chat_target, greedy)
    assert made == [(count, False) for count in TOGETHER.concurrencies for _ in range(3)]
    for by_set in results["systems"].values():
        for parts in by_set["speed_1k"]["by_concurrency"].values():
            for values in parts.values():
                assert values["tokens_per_s"] == values["num_tokens"] / 4.0
                assert values["rows"] <= 2  # two pages hold no more
    assert results["systems"]["lilicorr"]["speed_1k"]["by_concurrency"]["8"]["a"]["rows"] == 2


def test_a_killed_sweep_goes_on_where_it_was(chat_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, saved, done = run(chat_target, SETS, config=TOGETHER), [], []
    original = throughput.decode_together

    def counted(target: Target, models: Any, load: Any, config: Any) -> Any:
        done.append(load.concurrency)
        if len(done) == 3:
            raise KeyboardInterrupt
        return original(target, models, load, config)

    monkeypatch.setattr(throughput, "decode_together", counted)
    with pytest.raises(KeyboardInterrupt):
        measure(chat_target, greedy, save=lambda results: saved.append(copy.deepcopy(results)))
    assert done == [1, 3, 8] and len(saved) == 2
    results = measure(chat_target, saved[-1])
    assert done == [1, 3, 8, 8]
    kept = saved[-1]["systems"]["lilicorr"]["speed_1k"]["by_concurrency"]["3"]
    assert results["systems"]["lilicorr"]["speed_1k"]["by_concurrency"]["3"] == kept
    assert measure(chat_target, results, dataclasses.replace(TOGETHER, concurrencies=())) == results
    again = run(chat_target, SETS, config=TOGETHER, previous=results)
    assert again == results  # what was measured at once stays with a set that is kept
    changed = run(chat_target, SETS, config=dataclasses.replace(TOGETHER, max_new_tokens=4), previous=results)
    assert "by_concurrency" not in changed["systems"]["lilicorr"]["speed_1k"]  # and goes with one that is not


def test_first_turns_of_what_can_be_asked(chat_target: Target) -> None:
    def choosy(messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["content"] == "no":
            raise ChatError("no")
        return render(messages)

    system = Prompt("s", [{"role": "system", "content": "brief"}, *ask("", "one", "two").messages], "b")
    prompts = [*PROMPTS[:2], ask("long", "x" * 600), ask("odd", "no"), system]
    found = first_turns(chat_target, prompts, CONFIG, choosy)
    assert found == {
        "a": [render(PROMPTS[0].messages)],
        "b": [render(PROMPTS[1].messages), render(system.messages[:2])],
    }
