"""How far a regeneration run is, from its plan and its manifests alone. No Ray, no torch.

Place in the flow: `pipelines/regenerate.py` logs a `Tally` while shards are made (`Progress`), prints it for `--status`
and keeps the last one as `summary.json`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pipelines.shards import Plan, Run, read_manifest
from pipelines.stage import duration

logger = logging.getLogger(__name__)

PROGRESS_S = 30.0
STALL_S = 1800.0  # without a finished shard, of which a GPU makes one in minutes


class Tally:
    """Accounting and length statistics of a run from its manifests alone, each of which is read once."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self._unread = list(plan.shards)
        self._totals, self._dead, self._cut = (Counter[str]() for _ in range(3))
        self._lengths: Counter[int] = Counter()
        self._sources: dict[str, Counter[str]] = {}

    def summary(self) -> dict[str, Any]:
        """The numbers of all manifests that are there by now, right or wrong."""
        self._unread = [shard for shard in self._unread if not self._add(read_manifest(self.folder, shard))]
        return {
            "planned": self.plan.num_rows,
            "duplicate": self.plan.num_duplicates,
            "dead": self._dead.total(),
            **{name: self._totals[name] for name in ("ok", "turns", "skipped_turns", "completion_tokens")},
            "dead_by_error": dict(sorted(self._dead.items())),
            "cut": dict(sorted(self._cut.items())),
            "sources": {
                name: {**source, "length_rate": round(source["length"] / source["turns"], 4)}
                for name, source in sorted(self._sources.items())
            },
            "answer_tokens_p50": percentile(self._lengths, 0.50),
            "answer_tokens_p99": percentile(self._lengths, 0.99),
            "shards": len(self.plan.shards),
            "shards_done": len(self.plan.shards) - len(self._unread),
        }

    def complete(self) -> dict[str, Any]:
        """The summary of a run whose shards are all done; asserts `ok + dead + duplicate == planned`."""
        numbers = self.summary()
        accounted = numbers["ok"] + numbers["dead"] + numbers["duplicate"]
        assert accounted == numbers["planned"], f"{accounted} of {numbers['planned']} conversations accounted for"
        return numbers

    def _add(self, manifest: dict[str, Any] | None) -> bool:
        """Add the numbers of a manifest; false where there is none."""
        if manifest is None:
            return False
        for name in ("ok", "turns", "skipped_turns", "completion_tokens"):
            self._totals[name] += manifest[name]
        self._dead.update(manifest["dead"])
        self._cut.update(manifest["cut"])
        self._lengths.update(manifest["answer_lengths"])
        for name, source in manifest["sources"].items():
            self._sources.setdefault(name, Counter()).update(source)
        return True


def percentile(counts: Counter[int], share: float) -> int | None:
    """The smallest value that `share` of the counted values do not exceed, None of no values."""
    left = math.ceil(share * counts.total())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return None


def describe(numbers: dict[str, Any]) -> list[str]:
    """A summary in lines of text."""
    errors = "".join(f", {name} {number}" for name, number in numbers["dead_by_error"].items())
    cuts = ", ".join(f"{name} {number}" for name, number in numbers["cut"].items())
    open_shards = "" if numbers["shards_done"] == numbers["shards"] else " (more shards are open)"
    lines = [
        f"shards {numbers['shards_done']}/{numbers['shards']}",
        f"conversations: {numbers['ok']} ok + {numbers['dead']} dead{errors} + {numbers['duplicate']} duplicate "
        f"of {numbers['planned']} planned{open_shards}",
        f"answers: {numbers['turns']} turns, {numbers['completion_tokens']} tokens, length p50 "
        f"{numbers['answer_tokens_p50']} p99 {numbers['answer_tokens_p99']}; {numbers['skipped_turns']} turns skipped"
        + (f" (conversations cut by {cuts})" if cuts else ""),
    ]
    for name, source in numbers["sources"].items():
        rate = f"{source['length']} at the length limit ({100 * source['length_rate']:.1f} %)"
        lines.append(f"  {name}: {source['turns']} turns, {source['tokens']} tokens, {rate}")
    return lines


class Progress:
    """Logs a line every PROGRESS_S seconds while shards are made, from their manifests."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.tally = Tally(run.folder, plan)
        self.start = time.monotonic()
        self.before = self.tally.summary()
        self.newest = self.before["shards_done"], 0.0  # shards, and when the last of them was finished
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._log, daemon=True, name="regeneration progress")

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _log(self) -> None:
        while not self._stopped.wait(PROGRESS_S):
            now, seconds = self.tally.summary(), time.monotonic() - self.start
            logger.info("%s", self.line(now, seconds))
            if trouble := self.trouble(now["shards_done"], seconds):
                logger.warning("%s", trouble)

    def trouble(self, shards_done: int, seconds: float) -> str | None:
        """What to say after `seconds` of a run in which no shard was finished for long, None while they are."""
        if shards_done != self.newest[0]:
            self.newest = shards_done, seconds
        idle = seconds - self.newest[1]
        return f"no shard was finished for {duration(idle)}: an engine may hang" if idle >= STALL_S else None

    def line(self, now: dict[str, Any], seconds: float) -> str:
        """Where the run stands after `seconds`; the time left follows from tokens per second, not from shards."""
        speed = (now["completion_tokens"] - self.before["completion_tokens"]) / seconds
        finished = now["ok"] + now["dead"]
        left = now["planned"] - now["duplicate"] - finished
        eta = "unknown"
        if speed > 0:
            eta = duration(left * now["completion_tokens"] / finished / speed)
        turns_at_limit = sum(source["length"] for source in now["sources"].values())
        return (
            f"shards {now['shards_done']}/{now['shards']}, {finished} conversations ({now['dead']} dead), "
            f"{speed:.0f} tokens/s, answers p50 {now['answer_tokens_p50']} p99 {now['answer_tokens_p99']} tokens, "
            f"{turns_at_limit} of {now['turns']} at the length limit, time left {eta}"
        )
