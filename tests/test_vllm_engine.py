"""The vLLM engine asks for greedy tokens and checks what it gets; with vLLM installed, it agrees with transformers."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fake_generator import conversation
from lilicorr import stdlib
from lilicorr.config import PipelineConfig, RegenerateConfig, TargetConfig
from lilicorr.generator import (
    Completion,
    DialogueSettings,
    TransformersGenerator,
    TurnRecord,
    regenerate_conversations,
)
from lilicorr.prompts import Conversation
from lilicorr.target import Target, load_target
from lilicorr.tiny import tiny_target_folder
from pipelines.vllm_engine import VLLMGenerator, eos_ids, make_vllm


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    target = TargetConfig(source=str(tiny_target_folder(tmp_path / "target")))
    return PipelineConfig(target=target, regenerate=RegenerateConfig(batch_size=4, max_model_len=100))


class FakeEngine:
    """The few methods of vLLM's engine that are used; every request ends at its second step, as `ending` says."""

    ending: tuple[list[int], str] = ([65, 258], "stop")

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        self.model_config = SimpleNamespace(max_model_len=arguments.max_model_len)
        self.requests: dict[str, Any] = {}
        self.steps = 0

    def add_request(self, request_id: str, prompt: dict[str, list[int]], sampling: SimpleNamespace) -> None:
        self.requests[request_id] = (prompt["prompt_token_ids"], sampling)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[SimpleNamespace]:
        self.steps += 1
        if self.steps % 2:
            return [SimpleNamespace(request_id=name, finished=False, outputs=[]) for name in self.requests]
        name = next(iter(self.requests))
        del self.requests[name]
        token_ids, reason = self.ending
        answer = SimpleNamespace(token_ids=token_ids, finish_reason=reason)
        return [SimpleNamespace(request_id=name, finished=True, outputs=[answer])]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    class Engine(FakeEngine):
        pass

    vllm, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.EngineArgs = vllm.SamplingParams = lambda **values: SimpleNamespace(**values)
    vllm.LLMEngine = SimpleNamespace(from_engine_args=Engine)
    sampling.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return Engine


def test_requests_are_greedy_and_stop_where_the_target_stops(
    config: PipelineConfig, fake_vllm: type[FakeEngine]
) -> None:
    generator = VLLMGenerator(config)
    assert (generator.max_model_len, generator.max_in_flight) == (100, 4)
    arguments = generator._engine.arguments
    assert arguments.enable_prefix_caching and arguments.max_num_seqs == 4 and arguments.dtype == "float32"
    generator.submit(3, [1] * 90, 50)
    generator.submit(4, [1] * 9, 50)
    sampling = [sampling for _, sampling in generator._engine.requests.values()]
    assert [s.max_tokens for s in sampling] == [10, 50]
    assert all(s.temperature == 0.0 and s.stop_token_ids == [258] and not s.detokenize for s in sampling)
    assert generator.poll() == [(3, Completion([65, 258], "stop"))]
    assert generator.poll() == [(4, Completion([65, 258], "stop"))]
    assert generator.poll() == []


@pytest.mark.parametrize(
    ("ending", "message"),
    [(([65], "abort"), "'abort'"), (([65], "stop"), "without a stop token"), (([], "stop"), "token")],
)
def test_an_ending_we_do_not_know_is_an_error(
    config: PipelineConfig, fake_vllm: type[FakeEngine], ending: tuple[list[int], str], message: str
) -> None:
    fake_vllm.ending = ending
    generator = VLLMGenerator(config)
    generator.submit(0, [1], 5)
    with pytest.raises(RuntimeError, match=message):
        generator.poll()


def test_stop_ids_are_those_of_the_loaded_target(config: PipelineConfig) -> None:
    folder = Path(config.target.source)
    assert eos_ids(str(folder), None) == list(load_target(config.target).eos_ids) == [258]
    (folder / "generation_config.json").unlink()
    assert eos_ids(str(folder), None) == list(load_target(config.target).eos_ids) == [258]
    text = (folder / "config.json").read_text()
    assert '"eos_token_id": 258' in text
    (folder / "config.json").write_text(text.replace('"eos_token_id": 258', '"eos_token_id": null'))
    with pytest.raises(ValueError, match="names an eos_token_id"):
        eos_ids(str(folder), None)


NUM_CONVERSATIONS, MAX_NEW_TOKENS = 32, 64
TIE = 1e-4  # two fp32 logits that two orders of adding up may put the other way round


def one_and_two_turns(source: str) -> list[Conversation]:
    """32 conversations for a target, every other one of two turns."""
    if source == "embedded":
        heads = stdlib.prompts(stdlib.stdlib_root(), held_out=True)
        texts = [stdlib.prompt_messages(head)[0]["content"] for head in heads[:: len(heads) // (2 * NUM_CONVERSATIONS)]]
    else:
        texts = [text.format(i) for i in range(NUM_CONVERSATIONS) for text in ("What is {} and two?", "Is {} even?")]
    return [conversation(*texts[2 * i : 2 * i + 1 + i % 2]) for i in range(NUM_CONVERSATIONS)]


def first_difference(pairs: list[tuple[TurnRecord, TurnRecord]]) -> tuple[list[int], set[int]] | None:
    """What both engines had seen when they first chose different tokens, and those tokens."""
    for ours, theirs in pairs:
        assert ours.prompt_ids == theirs.prompt_ids
        for place, tokens in enumerate(zip(ours.completion_ids, theirs.completion_ids)):
            if tokens[0] != tokens[1]:
                return [*ours.prompt_ids, *ours.completion_ids[:place]], set(tokens)
        assert ours == theirs, "one answer goes on where the other ends"
    return None


def logit_gap(target: Target, prefix: list[int], tokens: set[int]) -> float:
    """How far the target's own two best logits behind `prefix` are apart, which must be those of `tokens`."""
    best = target.logits(target.forward(torch.tensor([prefix])).hidden[0, -1]).topk(2)
    assert set(best.indices.tolist()) == tokens, f"{tokens} are not the two best, {best.indices.tolist()}"
    return float(best.values[0] - best.values[1])


def test_the_first_difference_is_found_and_judged_by_the_targets_logits(tiny_target: Target) -> None:
    prompt = [1, 2, 3]
    logits = tiny_target.logits(tiny_target.forward(torch.tensor([[*prompt, 5]])).hidden[0, -1])
    best, second, third = logits.topk(3).indices.tolist()
    ours = TurnRecord(0, [], prompt, [5, best, 9], "length")
    assert first_difference([(ours, ours)]) is None
    found = first_difference([(ours, replace(ours, completion_ids=[5, second, 8]))])
    assert found == ([*prompt, 5], {best, second})
    assert logit_gap(tiny_target, *found) == float(logits[best] - logits[second]) > TIE
    with pytest.raises(AssertionError, match="are not the two best"):
        logit_gap(tiny_target, [*prompt, 5], {best, third})
    with pytest.raises(AssertionError, match="goes on where the other ends"):
        first_difference([(ours, replace(ours, completion_ids=[5, best]))])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm")
@pytest.mark.parametrize("source", ["embedded", "smollm2"])
def test_vllm_and_transformers_differ_only_where_two_logits_tie(source: str) -> None:
    settings = RegenerateConfig(batch_size=16, max_model_len=512)
    config = PipelineConfig(target=TargetConfig(source=source), regenerate=settings)
    dialogue = DialogueSettings({"enable_thinking": False}, MAX_NEW_TOKENS)
    target = load_target(config.target)
    asked = one_and_two_turns(source)
    engines = (make_vllm(config), (target.tokenizer, TransformersGenerator(target, 16, 512)))
    first, second = (
        {r.conversation.cid: r for r in regenerate_conversations(asked, tokenizer, generator, dialogue)}
        for tokenizer, generator in engines
    )
    assert first.keys() == second.keys() and len(first) == NUM_CONVERSATIONS
    assert any(len(result.turns) == 2 for result in second.values())
    differences = [first_difference(list(zip(first[cid].turns, second[cid].turns))) for cid in first]
    for cid, difference in zip(first, differences):
        assert difference is not None or first[cid] == second[cid]
    gaps = [logit_gap(target, *difference) for difference in differences if difference is not None]
    turns = sum(len(result.turns) for result in second.values())
    equal = NUM_CONVERSATIONS - len(gaps)
    print(f"\n{source}: {equal} of {NUM_CONVERSATIONS} conversations identical ({turns} turns), gaps elsewhere {gaps}")
    assert all(gap <= TIE for gap in gaps)
