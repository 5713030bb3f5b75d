"""The queue from which the workers of a regeneration take their shards.

Place in the flow: `pipelines/regenerate.py` starts it as a Ray actor beside the pool of generators. It knows numbers
only: what a shard is, and whether it is done, stands in `pipelines/shards.py`.

A worker that has nothing to do while others still have shards makes the oldest of theirs once more, so that neither
a lost node nor a hanging engine nor a slow one holds up the end. `claim` lets one of several have the shard's files.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

CLAIM_S = 300.0  # to write a shard's files in; later the claim's worker is taken for lost


class ShardQueue:
    """The shards nobody has taken, and who holds the others, by number; on Ray an actor of its own."""

    def __init__(self, number: int) -> None:
        self.waiting = deque(range(number))
        self.held: dict[int, set[int]] = {}  # unfinished shard -> its workers, in the order of their first taking
        self.claims: dict[int, tuple[int, float]] = {}  # shard -> the worker that writes its files, since when

    def start(self, worker: int) -> None:
        """A worker begins, or begins again: what it alone held before is lost and comes first."""
        self.claims = {number: claim for number, claim in self.claims.items() if claim[0] != worker}
        for workers in self.held.values():
            workers.discard(worker)
        lost = [number for number, workers in self.held.items() if not workers]
        for number in lost:
            del self.held[number]
        self.waiting.extendleft(sorted(lost, reverse=True))

    def take(self, worker: int) -> tuple[int, frozenset[int]] | None:
        """The next shard, which the worker holds from now on, and the other workers that are at it.

        None where nobody waits and the worker still holds a shard of its own, or where all are finished.
        """
        if self.waiting:
            number = self.waiting.popleft()
        elif self.held and not any(worker in workers for workers in self.held.values()):
            number = min(self.held, key=lambda number: (number in self.claims, len(self.held[number])))
        else:
            return None
        others = frozenset(self.held.setdefault(number, set()))
        self.held[number].add(worker)
        return number, others

    def claim(self, worker: int, number: int) -> bool:
        """Whether the worker may write the files of a shard it has made; if not, another one did or does.

        A worker that may not does not hold the shard any longer.
        """
        if number not in self.held:
            return False
        now = time.monotonic()
        first, since = self.claims.get(number, (worker, now))
        if first != worker and now - since < CLAIM_S:
            self.held[number].discard(worker)
            return False
        self.claims[number] = worker, now
        return True

    def finish(self, number: int) -> None:
        """A shard is committed, whoever else is at it."""
        self.held.pop(number, None)
        self.claims.pop(number, None)


class RemoteQueue:
    """A `ShardQueue` that lives in an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def start(self, worker: int) -> None:
        """See ShardQueue."""
        self._call("start", worker)

    def take(self, worker: int) -> tuple[int, frozenset[int]] | None:
        """See ShardQueue."""
        return self._call("take", worker)

    def claim(self, worker: int, number: int) -> bool:
        """See ShardQueue."""
        return self._call("claim", worker, number)

    def finish(self, number: int) -> None:
        """See ShardQueue."""
        self._call("finish", number)

    def _call(self, name: str, *arguments: int) -> Any:
        import ray

        return ray.get(getattr(self.actor, name).remote(*arguments))
