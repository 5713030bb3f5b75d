"""What clients see when a replica or Serve's controller is killed while they read, and that the endpoint comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from models import replica_pids, serving
from test_load import Case, Times, ask, make_cases, models  # noqa: F401

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STREAMS = 16


@pytest.fixture(scope="module")
def url(ray_cluster: None, models: tuple[Path, Path]) -> Iterator[str]:  # noqa: F811
    """An endpoint of two replicas of 16 rows."""
    with serving(*models, num_replicas=2, engine={"max_running": STREAMS}) as address:
        yield address


@pytest.fixture(scope="module")
def case(models: tuple[Path, Path]) -> Case:  # noqa: F811
    """The longest answer there is, so that a stream of it is under way for a while."""
    return max(make_cases(*models), key=lambda case: case.num_tokens)


async def read_while(url: str, case: Case, act: Callable[[], None]) -> list[BaseException | None]:
    """Read `STREAMS` answers at once, again and again until `act` has happened; what each answer ended with."""
    ended: list[BaseException | None] = []
    acted = asyncio.Event()
    limits = httpx2.Limits(max_connections=STREAMS)
    async with httpx2.AsyncClient(base_url=url, timeout=100, limits=limits) as client:

        async def read() -> None:
            last = False
            while not last:
                last = acted.is_set()
                try:
                    await ask(client, case, False, Times())
                    ended.append(None)
                except httpx2.HTTPError as error:
                    ended.append(error)
                    return

        readers = [asyncio.create_task(read()) for _ in range(STREAMS)]
        await asyncio.sleep(1.0)
        await asyncio.to_thread(act)
        acted.set()
        await asyncio.gather(*readers)
    return ended


def wait_until_served(url: str, case: Case, count: int = 2) -> None:
    """Until so many replicas run and no other, and what they answer is right."""
    from ray import serve

    deadline = time.monotonic() + 300
    while True:
        states = serve.status().applications["lilicorr"].deployments["Endpoint"].replica_states
        if states == {"RUNNING": count} and len(replica_pids()) == count:
            break
        assert time.monotonic() < deadline, states
        time.sleep(1)
    body = case.body | {"stream": False}
    del body["stream_options"]
    for _ in range(4 * count):
        answer = httpx2.post(url + "/v1/chat/completions", json=body, timeout=100)
        assert answer.json()["choices"][0]["message"]["content"] == case.text


def test_a_killed_replica_costs_its_own_streams_and_is_replaced(url: str, case: Case) -> None:
    """An answer is whole and right or its connection breaks: none is cut short and looks whole."""
    wait_until_served(url, case)
    before = replica_pids()
    assert len(before) == 2
    ended = asyncio.run(read_while(url, case, lambda: os.kill(before[0], signal.SIGKILL)))
    broken = [error for error in ended if error is not None]
    assert 0 < len(broken) < STREAMS and len(ended) > STREAMS
    wait_until_served(url, case)
    after = replica_pids()
    assert len(after) == 2 and before[0] not in after and before[1] in after


def test_streams_do_not_notice_that_the_controller_is_killed(url: str, case: Case) -> None:
    """Replicas and proxy answer without it; Ray starts it again and it finds what it had."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    wait_until_served(url, case)
    before = replica_pids()
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    ended = asyncio.run(read_while(url, case, lambda: ray.kill(controller, no_restart=False)))
    assert not [error for error in ended if error is not None]
    wait_until_served(url, case)
    assert replica_pids() == before
