"""The queue from which the workers of a regeneration take their shards.

Place in the flow: `pipelines/regenerate.py` starts it as a Ray actor beside the pool of generators. It knows numbers
only: what a shard is, and whether it is done, stands in `pipelines/shards.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Any


class ShardQueue:
    """The shards nobody has taken, and who holds the others, by number; on Ray an actor of its own."""

    def __init__(self, number: int) -> None:
        self.waiting = deque(range(number))
        self.held: dict[int, set[int]] = {}

    def start(self, worker: int) -> None:
        """A worker begins, or begins again: what it held before is lost and comes first."""
        self.waiting.extendleft(sorted(self.held.pop(worker, ()), reverse=True))
        self.held[worker] = set()

    def take(self, worker: int) -> int | None:
        """The next shard, which the worker holds from now on; None where there is none."""
        if not self.waiting:
            return None
        number = self.waiting.popleft()
        self.held[worker].add(number)
        return number

    def finish(self, worker: int, number: int) -> None:
        """A shard that the worker holds is committed."""
        self.held[worker].discard(number)


class RemoteQueue:
    """A `ShardQueue` that lives in an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def start(self, worker: int) -> None:
        """See ShardQueue."""
        self._call("start", worker)

    def take(self, worker: int) -> int | None:
        """See ShardQueue."""
        return self._call("take", worker)

    def finish(self, worker: int, number: int) -> None:
        """See ShardQueue."""
        self._call("finish", worker, number)

    def _call(self, name: str, *arguments: int) -> Any:
        import ray

        return ray.get(getattr(self.actor, name).remote(*arguments))
