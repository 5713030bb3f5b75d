"""`serve_app.peers`: one replica answers for all, also for those that have gone, and for those it cannot reach."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from operated import report

from serve_app import peers
from serve_app.metrics import Report, exposition
from serve_app.peers import MAX_GONE, STALE_S, Peers, Plain


class Network:
    """Replicas that can ask each other."""

    def __init__(self, names: str) -> None:
        self.counts = dict.fromkeys(names, 0)
        self.peers = {name: Peers(lambda name=name: self.look(name), self.ask) for name in names}
        self.asked = set(names)  # whom Serve lists as running
        self.broken = False
        self.dead: set[str] = set()

    def look(self, name: str) -> Report:
        return report(name, num_tokens=self.counts[name])

    async def ask(self, own: Plain) -> list[dict[str, Plain] | BaseException]:
        if self.broken:
            raise RuntimeError("nobody is there")
        return [self.answer(name, own) for name in sorted(self.asked)]

    def answer(self, name: str, own: Plain) -> dict[str, Plain] | BaseException:
        """As it travels: nothing but JSON's kinds of values arrives."""
        if name in self.dead:
            return RuntimeError(f"{name} is dead")
        return json.loads(json.dumps(self.peers[name].exchange(json.loads(json.dumps(own)))))

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
    network.seen("a")
    gathered = asyncio.run(network.peers["a"].gather())  # says how many there had been when it began
    assert next(found for found, _ in gathered if found.replica == "a").num_gather_failures == 2


def test_one_dead_replica_does_not_silence_the_others() -> None:
    network = Network("abc")
    network.seen("a")
    network.counts |= {"a": 1, "c": 3}
    network.dead = {"b"}
    assert network.seen("a") == {"a": (1, True), "b": (0, True), "c": (3, True)}
    gathered = asyncio.run(network.peers["a"].gather())
    assert next(found for found, _ in gathered if found.replica == "a").num_gather_failures == 1


def test_what_a_replica_shows_of_itself_the_others_know_too() -> None:
    """Else its counters would fall with its death."""
    network = Network("ab")
    asking = network.peers["a"]._ask

    async def ask(own: Plain) -> list[dict[str, Plain] | BaseException]:
        answers = await asking(own)
        network.counts["a"] += 1  # it goes on decoding while it waits, and also answers itself
        return [*answers, network.peers["a"].exchange(report("c").plain())]

    network.peers["a"]._ask = ask
    for _ in range(2):
        (shown, _) = network.seen("a")["a"]
        assert shown == network.peers["b"].exchange(report("c").plain())["a"]["snapshot"]["num_tokens"]


def test_replicas_of_two_versions_understand_each_other() -> None:
    own = Peers(lambda: report("a"))
    newer, older, other = report("newer").plain(), report("older").plain(), report("other").plain()
    newer["snapshot"]["num_wonders"] = 3
    newer["histograms"]["lilicorr:wonders"] = newer["histograms"]["lilicorr:step_seconds"]
    newer["more"] = 1
    del older["snapshot"]["num_tokens"], older["histograms"]["lilicorr:step_seconds"], older["num_gather_failures"]
    for plain in (newer, older, other, {"replica": "b"}, None):
        assert "a" in own.exchange(plain)
    gathered = dict((found.replica, found) for found, _ in asyncio.run(own.gather()))
    assert gathered.keys() == {"a", "newer", "older", "other"}
    assert (gathered["newer"].snapshot.num_tokens, gathered["older"].snapshot.num_tokens) == (100, 0)
    text = exposition("m", [(found, True) for found in gathered.values()]).decode()
    assert text.count("lilicorr:step_seconds_sum{") == 3 and "wonders" not in text
    assert gathered["a"].num_gather_failures == 2


def test_an_older_report_does_not_replace_a_newer_one() -> None:
    own = Peers(lambda: report("a"))
    own.exchange(report("b", at=time.time(), num_tokens=5).plain())
    own.exchange(report("b", at=time.time() - 5, num_tokens=4).plain())
    gathered = asyncio.run(own.gather())
    assert [found.snapshot.num_tokens for found, _ in gathered if found.replica == "b"] == [5]


def test_a_clock_that_is_set_back_hides_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    network, alone, really = Network("ab"), Peers(lambda: report("c", num_tokens=network.counts["a"])), time.time
    network.seen("b")
    asyncio.run(alone.gather())
    monkeypatch.setattr(peers.time, "time", lambda: really() - 3600)
    for count in (1, 2):
        network.counts = dict.fromkeys("ab", count)
        assert network.seen("a") == {"a": (count, True), "b": (count, True)}
        ((found, up),) = asyncio.run(alone.gather())
        assert (found.snapshot.num_tokens, up) == (count, True)


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_a_replica_whose_node_has_another_time_is_up_while_it_tells(
    monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    clock, own = Clock(monkeypatch), Peers(lambda: report("a"))

    def is_up() -> bool:
        return dict((found.replica, up) for found, up in asyncio.run(own.gather()))["b"]

    for _ in range(2):
        own.exchange(report("b", at=peers.time.time() + skew).plain())
        assert is_up()
        clock.offset += STALE_S + 1
        assert not is_up()


def test_only_so_many_that_have_gone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = Clock(monkeypatch), Peers(lambda: report("own", at=peers.time.time()))
    began = time.time()
    for index in range(MAX_GONE + 3):
        own.exchange(report(f"{index:02d}", at=began + index / 1000).plain())
    clock.offset += STALE_S + 1
    gathered = asyncio.run(own.gather())
    assert [found.replica for found, _ in gathered] == [f"{index:02d}" for index in range(3, MAX_GONE + 3)] + ["own"]


def test_exchanging_tells_the_others_from_time_to_time_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PERIOD_S", 0.01)
    told: list[float] = []

    async def ask(own: Plain) -> list[dict[str, Plain]]:
        told.append(own["at"])
        return []

    async def live() -> int:
        async with Peers(lambda: report("a"), ask).exchanging():
            while len(told) < 3:
                await asyncio.sleep(0.001)
            count = len(told)
        return count

    count = asyncio.run(asyncio.wait_for(live(), 20))
    assert len(told) > count
