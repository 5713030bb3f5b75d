"""Acceptance length and throughput of every system with many requests at once: the paper's sweep of concurrencies.

Place in the flow: `pipelines/evaluate.py` calls `measure_throughput` behind the greedy pass of `evaluate.run_sets`,
which decodes one request at a time; `tables` prints what it adds to the results. A system is decoded by an engine
of as many rows as requests run at once, made for it and let go again, one category of a set after the other: all its
prompts are handed in, and a request that ends makes room for the next. The throughput is that of the whole category,
prefill included, as a client sees it.

Paper: section 4.3.1, Appendix F (Tables 2, 13, 14).
"""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lilicorr.acceptance import Sums, concurrent_figures, resamples, stack_sums
from lilicorr.chat import ChatError
from lilicorr.config import EngineConfig, EvaluateConfig
from lilicorr.decode import Decoded, SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.engine import Engine
from lilicorr.engine.pages import num_pages_for
from lilicorr.evaluate import AUTOREGRESSIVE, WARM_UP_TOKENS, Prompt, Render
from lilicorr.target import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """Prompts to decode so many at once."""

    parts: dict[str, list[list[int]]]  # prompt ids by category
    params: SamplingParams
    concurrency: int

    @property
    def longest(self) -> int:
        """Positions of the longest prompt and its answer."""
        return max(len(ids) for part in self.parts.values() for ids in part) + self.params.max_new_tokens


def measure_throughput(
    target: Target,
    draft_models: dict[str, DraftModel],
    sets: dict[str, Sequence[Prompt]],
    config: EvaluateConfig,
    render: Render,
    results: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The results of `run_sets` on these sets and draft models, with `by_concurrency` in every cell of the
    `concurrent_sets`: {concurrency: {category: figures of `acceptance.concurrent_figures`, speedup, rows,
    matches_autoregressive}}; `save` is called after each concurrency with all so far.

    The first turn of each conversation is decoded; what the greedy pass cannot ask is left out here too. A
    concurrency that the results hold is kept: a set whose prompts, weights, code or settings changed was
    measured anew and has none. Raises RuntimeError for a target whose logits are not finite.
    """
    results = copy.deepcopy(results)
    params = SamplingParams(config.max_new_tokens, config.temperature, seed=config.seed, stop_ids=target.eos_ids)
    for name in (name for name in config.concurrent_sets if name in sets):
        cells = {system: by_set[name] for system, by_set in results["systems"].items()}
        parts: dict[str, list[list[int]]] = {}
        for concurrency in config.concurrencies:
            if all(str(concurrency) in cell.get("by_concurrency", {}) for cell in cells.values()):
                logger.info("%s, %d at once: done before, kept", name, concurrency)
                continue
            parts = parts or first_turns(target, sets[name], config, render)
            found = decode_together(target, draft_models, Load(parts, params, concurrency), config)
            for system, cell in cells.items():
                cell.setdefault("by_concurrency", {})[str(concurrency)] = found[system]
            save(results)
    return results


def first_turns(
    target: Target, prompts: Sequence[Prompt], config: EvaluateConfig, render: Render
) -> dict[str, list[list[int]]]:
    """The ids of every conversation up to its first user turn, by category, of those that can be asked."""
    parts: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        first = next(index for index, message in enumerate(prompt.messages) if message["role"] == "user")
        try:
            prompt_ids = render(prompt.messages[: first + 1])
        except ChatError:
            continue
        if len(prompt_ids) + config.max_new_tokens <= target.max_length:
            parts.setdefault(prompt.category, []).append(prompt_ids)
    return parts


def decode_together(
    target: Target, draft_models: dict[str, DraftModel], load: Load, config: EvaluateConfig
) -> dict[str, dict[str, dict[str, Any]]]:
    """The figures of autoregression and every draft model, by category."""
    counts = {name: resamples(len(part), config.bootstrap_samples, config.seed) for name, part in load.parts.items()}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    expected: dict[str, list[Decoded]] = {}
    for system, draft_model in {AUTOREGRESSIVE: None, **draft_models}.items():
        found[system] = {}
        for category, (answers, seconds, rows) in answer_parts(target, draft_model, load).items():
            values = concurrent_figures(decoded_sums(answers), seconds, counts[category])
            plain = expected.setdefault(category, answers)  # autoregression comes first
            slow = found[AUTOREGRESSIVE].get(category, values)["tokens_per_s"]
            matches = sum(one.token_ids == other.token_ids for one, other in zip(answers, plain, strict=True))
            values |= {"speedup": values["tokens_per_s"] / slow, "rows": rows, "matches_autoregressive": matches}
            found[system][category] = values
        speeds = ", ".join(f"{values['tokens_per_s']:.0f}" for values in found[system].values())
        logger.info("%s, %d at once: %s tokens/s", system, load.concurrency, speeds)
    return found


def answer_parts(
    target: Target, draft_model: DraftModel | None, load: Load
) -> dict[str, tuple[list[Decoded], float, int]]:
    """By category: the answers of one system, the seconds they took, and the most requests that could run at once.

    That is the concurrency, or less where there are fewer prompts or the pages hold fewer requests of the longest kind.
    """
    make_room(target)
    engine_config = EngineConfig(max_running=load.concurrency, max_model_len=load.longest, prefix_cache=False)
    engine = Engine(target, draft_model, engine_config)
    held = engine.pool.num_pages // num_pages_for(load.longest + engine.scheduler.num_tokens)
    engine.warm_up()
    short = replace(load.params, max_new_tokens=min(WARM_UP_TOKENS, load.params.max_new_tokens))
    engine.generate(next(iter(load.parts.values()))[: load.concurrency], short)  # the first calls are slower
    found = {}
    for category, prompts in load.parts.items():
        began = time.perf_counter()
        answers = engine.generate(prompts, load.params)
        seconds = time.perf_counter() - began
        found[category] = (answers, seconds, min(load.concurrency, len(prompts), max(1, held)))
    return found


def make_room(target: Target) -> None:
    """Give back what the engine before this one held: an engine takes as many pages as it finds room for."""
    gc.collect()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


def decoded_sums(answers: Sequence[Decoded]) -> Sums:
    """What every answer adds to tau and throughput, [P]."""
    sums = [
        {
            "tokens": np.array(len(answer.token_ids)),
            "blocks": np.array(answer.num_blocks),
            "block_tokens": np.array(answer.num_block_tokens),
        }
        for answer in answers
    ]
    return stack_sums(sums)
