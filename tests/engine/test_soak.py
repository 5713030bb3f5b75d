"""A long run at temperature 1 with four requests at all times keeps nothing of them.

The public servers' failures of this kind came after some ten thousand sampled steps. `make test-slow` runs 12,000.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toys import random_prompts, toy_draft_model, toy_engine, toy_target

from lilicorr.decode import SamplingParams
from lilicorr.engine.engine import Engine
from lilicorr.engine.request import Request
from lilicorr.target import Target

STREAMS, NUM_PAGES = 4, 9
MIB = 1 << 20


def endless_requests() -> Iterator[Request]:
    """Answers of 20 to 119 tokens, half of whose prompts share a beginning with another."""
    prompts, number = random_prompts(50, longest=150, vocab=20), 0
    while True:
        params = SamplingParams(20 + number % 100, temperature=1.0, seed=number)
        yield Request(str(number), prompts[number % 50], params)
        number += 1


def counts_of(engine: Engine) -> list[int]:
    """Every counter of engine and scheduler."""
    values = list(vars(engine.counters).values()) + [
        engine.scheduler.num_preemptions,
        engine.scheduler.num_cached_tokens,
    ]
    return [count for value in values for count in (value if isinstance(value, list) else [value])]


def held() -> tuple[int, int, int]:
    """Tensors, lists and dicts; bytes of this process in memory; bytes allocated on the device."""
    gc.collect()
    objects = sum(type(thing) in (torch.Tensor, list, dict) for thing in gc.get_objects())
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return objects, resident, torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(
    ("num_steps", "head"),
    [(600, "argmax"), *(pytest.param(12_000, head, marks=pytest.mark.slow) for head in ("lilicorr", None))],
)
@pytest.mark.timeout(1800)
def test_a_long_run_keeps_nothing(num_steps: int, head: str | None) -> None:
    """In a process of its own: what this one holds comes and goes with other tests."""
    code = f"import test_soak; test_soak.long_run({num_steps}, {head!r})"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def long_run(num_steps: int, head: str | None) -> None:
    """The run, and what has to hold in it."""
    torch.set_num_threads(1)
    target = toy_target(vocab=20, head_dim=32)
    if torch.cuda.is_available():
        target = Target(target.model.to("cuda"), None, target.layer_ids, target.mask_token_id)
    draft_model = toy_draft_model(target, head, num_candidates=4) if head else None
    engine = toy_engine(target, draft_model, steps_behind=1, num_pages=NUM_PAGES)
    requests, last, marks = endless_requests(), counts_of(engine), []
    while engine.counters.num_steps < num_steps:
        while len(engine._requests) < STREAMS:
            engine.submit(next(requests))
        engine.step()
        now = counts_of(engine)
        assert all(new >= old for new, old in zip(now, last, strict=True)), engine.counters.num_steps
        last = now
        assert engine.pool.num_free + engine.pool.num_used <= NUM_PAGES
        if engine.counters.num_steps in (num_steps // 2, num_steps):
            marks.append(held())
    while engine.busy:
        engine.step()
    (objects, resident, allocated), (objects_after, resident_after, allocated_after) = marks
    assert abs(objects_after - objects) < 100 and allocated_after == allocated, marks
    assert resident_after - resident < 16 * MIB, marks
    assert engine.pool.num_free == NUM_PAGES and engine.pool.num_used == 0 and engine.scheduler.running == []
    assert engine.counters.num_tokens > 2 * num_steps and engine.scheduler.num_preemptions > 0
    assert sum(engine.counters.accepted_at) > 0 or head is None
