"""`serve_app.peers`: one replica answers for all, also for those that have gone, and for those it cannot reach."""

from __future__ import annotations

import asyncio
import time

import pytest
from operated import report

from serve_app import peers
from serve_app.metrics import Report
from serve_app.peers import MAX_GONE, STALE_S, Peers


class Network:
    """Replicas that can ask each other."""

    def __init__(self, names: str) -> None:
        self.counts = dict.fromkeys(names, 0)
        self.peers = {name: Peers(lambda name=name: self.look(name), self.ask) for name in names}
        self.asked = set(names)  # whom Serve lists as running
        self.broken = False

    def look(self, name: str) -> Report:
        return report(name, num_tokens=self.counts[name])

    async def ask(self, own: Report) -> list[dict[str, Report]]:
        if self.broken:
            raise RuntimeError("nobody is there")
        return [self.peers[name].exchange(own) for name in sorted(self.asked)]

    def seen(self, name: str) -> dict[str, tuple[int, bool]]:
        """Tokens of every replica, and whether it is up, as one replica tells it."""
        gathered = asyncio.run(self.peers[name].gather())
        return {found.replica: (found.snapshot.num_tokens, up) for found, up in gathered}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset = 0.0
        really, really_unix = time.monotonic, time.time
        monkeypatch.setattr(peers.time, "monotonic", lambda: really() + self.offset)
        monkeypatch.setattr(peers.time, "time", lambda: really_unix() + self.offset)


def test_any_replica_answers_for_all() -> None:
    network = Network("abc")
    network.counts |= {"a": 1, "b": 2, "c": 3}
    assert network.seen("a") == network.seen("c") == {"a": (1, True), "b": (2, True), "c": (3, True)}
    network.counts["b"] = 20
    assert network.seen("c")["b"] == (20, True)


def test_alone_it_answers_for_itself() -> None:
    gathered = asyncio.run(Peers(lambda: report("a")).gather())
    assert [(found.replica, up) for found, up in gathered] == [("a", True)]


def test_what_has_gone_stays_in_the_sum_even_for_a_replica_that_never_met_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, network = Clock(monkeypatch), Network("abc")
    network.asked = {"a", "b"}
    network.counts |= {"a": 1, "b": 2}
    network.seen("a")
    network.counts["b"] = 5  # while it drains: it is asked no more, and still tells
    network.asked = {"a"}
    network.seen("b")
    clock.offset += STALE_S + 1
    assert network.seen("a") == {"a": (1, True), "b": (5, False)}
    network.asked = {"a", "c"}
    assert network.seen("c") == {"a": (1, True), "b": (5, False), "c": (0, True)}


def test_a_failure_is_counted_and_what_is_known_still_stands() -> None:
    network = Network("ab")
    network.seen("a")
    network.broken = True
    assert network.seen("a") == {"a": (0, True), "b": (0, True)}
    gathered = asyncio.run(network.peers["a"].gather())
    assert next(found for found, _ in gathered if found.replica == "a").num_gather_failures == 2


def test_an_older_report_does_not_replace_a_newer_one() -> None:
    own = Peers(lambda: report("a"))
    own.exchange(report("b", at=time.time(), num_tokens=5))
    own.exchange(report("b", at=time.time() - 5, num_tokens=4))
    gathered = asyncio.run(own.gather())
    assert [found.snapshot.num_tokens for found, _ in gathered if found.replica == "b"] == [5]


def test_only_so_many_that_have_gone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = Clock(monkeypatch), Peers(lambda: report("own", at=peers.time.time()))
    began = time.time()
    for index in range(MAX_GONE + 3):
        own.exchange(report(f"{index:02d}", at=began + index / 1000))
    clock.offset += STALE_S + 1
    gathered = asyncio.run(own.gather())
    assert [found.replica for found, _ in gathered] == [f"{index:02d}" for index in range(3, MAX_GONE + 3)] + ["own"]


def test_exchanging_tells_the_others_from_time_to_time_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PERIOD_S", 0.01)
    told: list[float] = []

    async def ask(own: Report) -> list[dict[str, Report]]:
        told.append(own.at)
        return []

    async def live() -> int:
        async with Peers(lambda: report("a"), ask).exchanging():
            while len(told) < 3:
                await asyncio.sleep(0.001)
            count = len(told)
        return count

    count = asyncio.run(asyncio.wait_for(live(), 20))
    assert len(told) > count
