"""The vLLM engine of regeneration: tokens in, tokens out, greedy, continuously batched.

Place in the flow: `pipelines/regenerate.py` makes one `VLLMGenerator` per actor, on a GPU in production; the
CPU build of vLLM works as well, without compilation. Requests are stepped here rather than through
`LLM.generate`, so that a finished turn is followed by the next one while others still run; the conversation's
earlier turns are found in the prefix cache.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from lilicorr.config import PipelineConfig
from lilicorr.generator import Completion
from lilicorr.target import eos_ids_of, resolve_target


class VLLMGenerator:
    """See `lilicorr.generator.Generator`."""

    name = "vllm"

    def __init__(self, config: PipelineConfig) -> None:
        has_gpu = torch.cuda.is_available()
        # The engine lives in this process: when the actor ends, no child of it keeps the GPU's memory.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, read by the CPU build only
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        target, settings = config.target, config.regenerate
        name = resolve_target(target)
        self._stop_ids = eos_ids(name, target.revision)
        arguments: dict[str, Any] = {
            "model": name,
            "revision": target.revision,
            "tokenizer_revision": target.revision,
            "dtype": target.dtype,
            "max_num_seqs": settings.batch_size,
            "enable_prefix_caching": True,
            "enforce_eager": not has_gpu,
            "disable_log_stats": True,
        }
        if settings.max_model_len is not None:
            arguments["max_model_len"] = settings.max_model_len
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._sampling, self._final = SamplingParams, RequestOutputKind.FINAL_ONLY
        self.max_model_len = self._engine.model_config.max_model_len
        self.max_in_flight = settings.batch_size

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Queue a prompt; stop ids are the target's own, whatever the tokenizer calls its end of sequence."""
        room = self.max_model_len - len(prompt_ids)
        sampling = self._sampling(
            temperature=0.0,
            max_tokens=min(max_new_tokens, room),
            stop_token_ids=self._stop_ids,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._final,
        )
        self._engine.add_request(str(key), {"prompt_token_ids": prompt_ids}, sampling)

    def poll(self) -> list[tuple[int, Completion]]:
        """Step the engine until a request is finished."""
        while self._engine.has_unfinished_requests():
            finished = [output for output in self._engine.step() if output.finished]
            if finished:
                return [(int(output.request_id), self._completion(output)) for output in finished]
        return []

    def _completion(self, output: Any) -> Completion:
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        if answer.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended request {output.request_id} with {answer.finish_reason!r}")
        if answer.finish_reason == "stop" and (not ids or ids[-1] not in self._stop_ids):
            raise RuntimeError(f"vLLM stopped without a stop token: ...{ids[-4:]}, stop ids {self._stop_ids}")
        return Completion(ids, answer.finish_reason)


def eos_ids(name: str, revision: str | None) -> list[int]:
    """The ids that end an answer, as in `Target.eos_ids`, without loading the weights.

    Raises ValueError where neither config names one: answers would never stop.
    """
    model = AutoConfig.from_pretrained(name, revision=revision)
    try:
        generation = GenerationConfig.from_pretrained(name, revision=revision)
    except OSError:  # the file is optional
        generation = GenerationConfig.from_model_config(model)
    ids = eos_ids_of(generation, model)
    if not ids:
        raise ValueError(f"neither config of {name} names an eos_token_id: answers would never stop")
    return list(ids)


def make_vllm(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, VLLMGenerator]:
    """The target's tokenizer and a vLLM engine of it."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(config.target), revision=config.target.revision)
    return tokenizer, VLLMGenerator(config)
