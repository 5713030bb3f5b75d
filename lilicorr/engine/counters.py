"""What the engine has done since it was made, and how long the host was at each stage of its steps.

Place in the flow: `engine` adds to its `Counters` in every step; a replica's snapshot, benches and tests read them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

STAGES = ("admit", "prefill", "decode", "publish")  # of `engine.Engine.step`

Returned = TypeVar("Returned")


@dataclass
class Counters:
    """What the engine has done; nothing here ever falls.

    On a GPU `prefill` and `decode` are started, not waited for: that wait is in `publish`.
    """

    num_steps: int = 0
    num_tokens: int = 0  # committed
    num_blocks: int = 0  # verified, prefills not counted
    num_block_tokens: int = 0  # what they added to answers, see `decode.Decoded`
    num_drafted: int = 0  # drafts put to the test
    num_prompt_tokens: int = 0  # positions prefilled, after a preemption again
    accepted_at: list[int] = field(default_factory=list)  # [S] blocks whose slot was accepted (and not cut)
    stage_seconds: list[float] = field(default_factory=lambda: len(STAGES) * [0.0])  # of STAGES, the host's time

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per verified block."""
        return self.num_block_tokens / max(1, self.num_blocks)


def timed(stage: str) -> Callable[[Callable[..., Returned]], Callable[..., Returned]]:
    """A method of the engine whose time is that of one of STAGES."""
    place = STAGES.index(stage)

    def decorate(method: Callable[..., Returned]) -> Callable[..., Returned]:
        @functools.wraps(method)
        def run(engine: Any, *args: Any, **kwargs: Any) -> Returned:
            began = time.perf_counter()
            try:
                return method(engine, *args, **kwargs)
            finally:
                engine.counters.stage_seconds[place] += time.perf_counter() - began

        return run

    return decorate
