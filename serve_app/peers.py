"""What every replica knows of all replicas, so that any of them can answer for all.

Place in the flow: a request to /metrics or /ui/state reaches one replica, whichever the proxy picks. It asks the others
(`DeploymentHandle.broadcast`) for their reports, gives its own, and answers with all of them. Between requests the
replicas exchange reports every `PERIOD_S`, also one that drains, which is asked no more but still asks. So when
a replica has gone its last report is known to the others: its counters stay, and sums over replicas never fall because
one was taken away. The last `MAX_GONE` that have gone are kept. Reports travel as plain values, so replicas of two
versions understand each other during an update.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from serve_app.metrics import Report

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
STALE_S = 3 * PERIOD_S  # without news for so long a replica has gone
ASK_TIMEOUT_S = 3.0
MAX_GONE = 32

Plain = dict[str, Any]  # a report as it travels, see `Report.plain`
Ask = Callable[[Plain], Awaitable[Sequence[dict[str, Plain] | BaseException]]]


class Peers:
    """The reports of all replicas, on one event loop.

    `own` makes this replica's; `ask` hands it to the others and returns what each knows or why it said nothing, None
    where there are none.
    """

    def __init__(self, own: Callable[[], Report], ask: Ask | None = None) -> None:
        self._own = own
        self._ask = ask
        self._name: str | None = None  # this replica's, once it has looked
        self._last_at = 0.0  # when it last looked, by its own account
        self._told: Report | None = None  # its newest report that the others have
        self._reports: dict[str, Report] = {}  # the others'
        self._heard: dict[str, float] = {}  # when a newer report came in (monotonic)
        self._num_failures = 0

    def exchange(self, plain: Plain) -> dict[str, Plain]:
        """Another replica gives its report, and gets all that are known here."""
        own = self._look()
        self._read(plain, from_itself=True)
        return {report.replica: report.plain() for report in (*self._reports.values(), own)}

    async def gather(self) -> list[tuple[Report, bool]]:
        """All reports, as fresh as they can be had, and whether each replica is up.

        This replica's is the one that it gave to the others: if it died now they would still tell as much.
        """
        own = self._look()
        if self._ask is not None:
            await self._tell(own)
        if self._told is None or own.at > self._told.at:
            self._told = own
        self._forget()
        told = [(self._told, True), *((report, self._is_up(name)) for name, report in self._reports.items())]
        return sorted(told, key=lambda one: one[0].replica)

    async def _tell(self, own: Report) -> None:
        """Give a report to the others, and learn what they know."""
        assert self._ask is not None
        try:
            answers = await asyncio.wait_for(self._ask(own.plain()), ASK_TIMEOUT_S)
        except Exception as error:
            answers = [error]
        for answer in answers:
            if isinstance(answer, BaseException):  # a replica that has just died: what is known of it still counts
                self._miss(answer)
            else:
                for plain in answer.values():
                    self._read(plain)

    def _miss(self, error: BaseException) -> None:
        self._num_failures += 1
        logger.warning("could not ask another replica: %s: %s", type(error).__name__, error)

    @contextlib.asynccontextmanager
    async def exchanging(self) -> AsyncIterator[None]:
        """Exchange reports every `PERIOD_S`, and once more at the end."""

        async def forever() -> None:
            while True:
                await self.gather()
                await asyncio.sleep(PERIOD_S)

        task = asyncio.create_task(forever())
        try:
            yield
        finally:
            task.cancel()
            await self.gather()

    def _look(self) -> Report:
        """This replica's report of now, later than any before even where the clock was set back: the newest counts."""
        own = self._own()
        self._last_at = max(own.at, math.nextafter(self._last_at, math.inf))
        self._name = own.replica
        return replace(own, at=self._last_at, num_gather_failures=self._num_failures)

    def _read(self, plain: Plain, from_itself: bool = False) -> None:
        """Keep a report if it is news; that of whoever tells it is a sign of life, whatever that node's clock says."""
        try:
            report = Report.read(plain)
        except ValueError as error:
            self._miss(error)
            return
        known = self._reports.get(report.replica)
        if report.replica != self._name and (known is None or report.at > known.at):
            self._reports[report.replica] = report
            # what others tell of a replica that had gone before this one began may come late, and is no sign of life
            if from_itself or time.time() - report.at < STALE_S:
                self._heard[report.replica] = time.monotonic()

    def _is_up(self, name: str) -> bool:
        return time.monotonic() - self._heard.get(name, float("-inf")) < STALE_S

    def _forget(self) -> None:
        gone = sorted((name for name in self._reports if not self._is_up(name)), key=lambda n: self._reports[n].at)
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._reports[name]
            self._heard.pop(name, None)
