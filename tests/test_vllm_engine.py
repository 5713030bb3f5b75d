"""The vLLM engine asks for greedy tokens and checks what it gets; with vLLM installed, it agrees with transformers."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fake_generator import conversations
from lilicorr.config import PipelineConfig, RegenerateConfig, TargetConfig
from lilicorr.generator import Completion, DialogueSettings, TransformersGenerator, regenerate_conversations
from lilicorr.target import load_target
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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_and_transformers_give_the_same_answers() -> None:
    config = PipelineConfig(target=TargetConfig(), regenerate=RegenerateConfig(batch_size=4, max_model_len=400))
    settings = DialogueSettings({"enable_thinking": False}, 24)
    target = load_target(config.target)
    asked = conversations(8)
    engines = (make_vllm(config), (target.tokenizer, TransformersGenerator(target, 4, 400)))
    first, second = (
        {r.conversation.cid: r for r in regenerate_conversations(asked, tokenizer, generator, settings)}
        for tokenizer, generator in engines
    )
    assert first == second
