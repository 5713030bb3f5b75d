"""The decoding thread: what its snapshot counts, and that it sleeps while there is nothing to decode. No HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import NUM_SLOTS, EchoEngine, chat_tokenizer, wait_until

from lilicorr.chat import render_prompt
from lilicorr.decode import SamplingParams
from lilicorr.engine.pages import PagePool
from lilicorr.engine.request import Request, TokenChunk
from serve_app.replica import Replica, ReplicaDeadError, Snapshot, Ticket


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine(pace_s=0.005)


@pytest.fixture
def replica(engine: EchoEngine) -> Iterator[Replica]:
    replica = Replica(engine, max_requests=8, stall_s=60.0)
    yield replica
    replica.close()


def echo(request_id: str, text: str, max_new_tokens: int = 1000) -> Request:
    prompt_ids = render_prompt(chat_tokenizer(), [{"role": "user", "content": text}], {})
    return Request(request_id, prompt_ids, SamplingParams(max_new_tokens, stop_ids=(258,)))


async def read(ticket: Ticket) -> dict[int, list[int]]:
    """The tokens of every request of a ticket, which is closed."""
    answers: dict[int, list[int]] = {}
    async for index, chunk in ticket:
        answers.setdefault(index, []).extend(chunk.token_ids)
    ticket.close()
    return answers


def test_requests_of_a_ticket_are_told_apart(replica: Replica) -> None:
    async def run() -> dict[int, list[int]]:
        return await read(replica.submit([echo("a", "first one"), echo("b", "2nd"), echo("c", "three", 2)]))

    assert asyncio.run(run()) == {0: [*b"first one", 258], 1: [*b"2nd", 258], 2: [*b"th"]}
    assert replica.num_requests == 0


def test_snapshot_counts_what_was_decoded_and_how_it_ended(replica: Replica) -> None:
    async def run() -> None:
        await read(replica.submit([echo("a", "hello there"), echo("b", "cut short", 3), echo("c", "BOOM")]))
        stopped = replica.submit([echo("d", "stopped by a string " * 9), echo("e", "left alone " * 90)])
        async for index, _ in stopped:
            if index == 0:
                stopped.stop("d")
                break
        stopped.close()

    assert replica.snapshot().num_finished == {}
    asyncio.run(run())
    wait_until(lambda: "abort" in replica.snapshot().num_finished)
    snapshot = replica.snapshot()
    assert snapshot.num_finished == {"stop": 2, "length": 1, "error": 1, "abort": 1}
    assert (snapshot.running, snapshot.waiting, snapshot.waiting_tokens) == (0, 0, 0)
    assert snapshot.total_pages == snapshot.free_pages == 10
    assert snapshot.num_drafted == NUM_SLOTS * snapshot.num_drafts == NUM_SLOTS * snapshot.num_blocks
    assert snapshot.num_accepted == sum(snapshot.accepted_at) and len(snapshot.accepted_at) == NUM_SLOTS
    assert 1 < snapshot.tau <= 4


def test_who_has_an_answer_finds_it_counted(replica: Replica, engine: EchoEngine) -> None:
    class SlowPool(PagePool):
        """While a snapshot is taken, its reader would have time to see the one before."""

        @property
        def num_used(self) -> int:
            time.sleep(0.02)
            return super().num_used

    async def run() -> None:
        for number in range(1, 4):
            await read(replica.submit([echo(f"stop{number}", "hello there")]))
            await read(replica.submit([echo(f"error{number}", "LATE")]))
            snapshot = replica.snapshot()
            assert snapshot.num_finished == {"stop": number, "error": number}
            assert snapshot.num_tokens == engine.counters.num_tokens == 12 * number
            assert snapshot.running == 0

    engine.pool = SlowPool(10)
    asyncio.run(run())


def test_an_answer_that_is_made_goes_out_even_if_the_thread_dies_in_counting(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = replica._look

    def dies() -> Snapshot:
        if replica._finished:
            raise RuntimeError("a bug")
        return look()

    monkeypatch.setattr(replica, "_look", dies)
    answers = []

    async def run() -> None:
        answers.append(await read(replica.submit([echo("a", "hello there")])))

    asyncio.run(run())
    assert answers == [{0: [*b"hello there", 258]}]
    with pytest.raises(ReplicaDeadError, match="the decoding thread"):
        wait_until(lambda: replica.check() is not None)


def test_snapshot_shows_who_runs_and_who_waits(replica: Replica, engine: EchoEngine) -> None:
    async def run() -> None:
        requests = [echo(name, "slow " * 4000, 30_000) for name in "abcd"]
        ticket = replica.submit(requests)
        async for _ in ticket:
            await asyncio.to_thread(wait_until, two_and_two)
            assert replica.snapshot().waiting_tokens == sum(len(request.prompt_ids) for request in requests[2:])
            break
        ticket.close()

    def two_and_two() -> bool:
        snapshot = replica.snapshot()
        return (snapshot.running, snapshot.waiting) == (engine.max_running, 2)

    asyncio.run(run())
    wait_until(lambda: replica.snapshot().running == replica.snapshot().waiting == 0)


def test_a_prompt_of_several_answers_waits_once(engine: EchoEngine, replica: Replica) -> None:
    engine.max_running = 0
    one, other = echo("a", "of many answers"), echo("b", "of one")

    async def run() -> None:
        ticket = replica.submit([one, replace(one, id="a2"), replace(one, id="a3"), other])
        await asyncio.to_thread(wait_until, lambda: replica.snapshot().waiting == 4)
        assert replica.snapshot().waiting_tokens == len(one.prompt_ids) + len(other.prompt_ids)
        ticket.close()

    asyncio.run(run())


class SteppedEngine(EchoEngine):
    """Its steps end when they are allowed to, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self.num_begun = 0

    def step(self) -> list[TokenChunk]:
        self.num_begun += 1
        assert self.allowed.acquire(timeout=60)
        return super().step()


def test_no_step_begins_for_a_request_that_was_left() -> None:
    engine = SteppedEngine()
    replica = Replica(engine, max_requests=8, stall_s=60.0)

    async def run() -> None:
        ticket = replica.submit([echo("a", "long " * 400)])
        engine.allowed.release()
        await asyncio.to_thread(wait_until, lambda: engine.num_begun == 2)
        ticket.close()

    asyncio.run(run())
    engine.allowed.release(1000)
    wait_until(lambda: replica.snapshot().num_finished == {"abort": 1} and not engine.busy)
    assert engine.num_begun == engine.counters.num_steps == 2  # the one that was under way was the last
    replica.close()


def test_serve_is_told_what_the_replica_holds_and_that_its_thread_has_died(
    replica: Replica, engine: EchoEngine
) -> None:
    from serve_app.app import Endpoint

    bare = Endpoint.func_or_class.__mro__[1]  # without what Serve wraps around it
    endpoint = bare.__new__(bare)
    endpoint._replica, endpoint._rows = replica, engine.max_running
    endpoint.check_health()
    assert endpoint.record_autoscaling_stats() == {"kv_usage": 0, "row_usage": 0, "rows": 2, "waiting_tokens": 0}

    async def run() -> None:
        await read(replica.submit([echo("a", "DIE")]))

    asyncio.run(run())
    with pytest.raises(ReplicaDeadError, match="the device is gone"):
        endpoint.check_health()


def test_idle_thread_never_wakes(replica: Replica, engine: EchoEngine) -> None:
    async def run() -> None:
        await read(replica.submit([echo("a", "hello")]))

    def switches() -> int:
        """How often the thread has gone to sleep."""
        status = Path(f"/proc/self/task/{replica._thread.native_id}/status").read_text()
        return int(status.split("nonvoluntary_ctxt_switches")[0].split()[-1])

    asyncio.run(run())
    wait_until(lambda: not engine.busy and replica._inbox.empty())
    steps, before = engine.counters.num_steps, None
    while before != switches():  # it is on its way into the inbox
        before = switches()
        asyncio.run(asyncio.sleep(0.2))
    assert engine.counters.num_steps == steps
