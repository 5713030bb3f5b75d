"""Replicas come, go and are exchanged while clients read: no request fails and no stream is cut."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from fakes import wait_until
from models import deploy, replica_pids, save_random_checkpoint, serving
from test_faults import STREAMS, case, read_while, wait_until_served  # noqa: F401
from test_load import Case, models  # noqa: F401
from test_metrics import samples

from serve_app.controller import Controller

pytestmark = [pytest.mark.ray, pytest.mark.slow]
REPLICA = {"engine": {"max_running": STREAMS}, "num_replicas": 2}


@pytest.fixture(scope="module")
def url(ray_cluster: None, models: tuple[Path, Path]) -> Iterator[str]:  # noqa: F811
    with serving(*models, **REPLICA) as address:
        yield address


def tokens_by_replica(url: str) -> dict[str, float]:
    """What each replica that is up has decoded."""
    found = samples(httpx2.get(url + "/metrics", timeout=60).text)
    up = {labels["replica"] for labels, value in found["lilicorr:replica_up"] if value}
    counts = {labels["replica"]: value for labels, value in found["vllm:generation_tokens_total"]}
    return {name: counts[name] for name in up}


def fingerprint(url: str) -> str:
    """Of the weights of the replica that happens to answer."""
    return httpx2.get(url + "/v1/models", timeout=60).json()["data"][0]["fingerprint"]


def read_through(url: str, case: Case, act: Callable[[], None]) -> None:  # noqa: F811
    """All clients get whole and right answers, before, while and after `act` happens."""
    ended = asyncio.run(read_while(url, case, act))
    assert len(ended) > STREAMS
    assert not [error for error in ended if error is not None]


def test_one_to_three_replicas_and_back_fail_no_request(url: str, case: Case) -> None:  # noqa: F811
    def to(count: int) -> None:
        Controller().scale("lilicorr", "Endpoint", count)
        wait_until(lambda: len(replica_pids()) == count, 300)

    def there_and_back() -> None:
        to(3)
        wait_until(lambda: len([count for count in tokens_by_replica(url).values() if count]) == 3, 120)
        to(1)

    to(1)
    wait_until_served(url, case, 1)
    read_through(url, case, there_and_back)
    wait_until_served(url, case, 1)
    to(2)
    wait_until_served(url, case)


def test_a_rolling_update_to_other_weights_cuts_no_stream(
    url: str,
    case: Case,  # noqa: F811
    models: tuple[Path, Path],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Drafts change and answers do not. The folder has to outlive the test: replicas may be started again."""
    target, _ = models
    checkpoint = tmp_path_factory.mktemp("update") / "checkpoint"
    save_random_checkpoint(checkpoint, target, seed=1)
    wait_until_served(url, case)
    before, old = replica_pids(), fingerprint(url)
    read_through(url, case, lambda: deploy(target, checkpoint, **REPLICA))
    wait_until_served(url, case)
    after = replica_pids()
    assert len(after) == 2 and not set(after) & set(before)
    assert old not in {fingerprint(url) for _ in range(8)}


def test_an_update_to_weights_that_cannot_be_loaded_leaves_a_replica_to_answer(
    url: str,
    case: Case,  # noqa: F811
    models: tuple[Path, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Of what its fields say it fits; that a tensor is damaged shows in the replica, which then takes no request."""
    target, checkpoint = models
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-9])
    wait_until_served(url, case)
    before = replica_pids()

    def update() -> None:
        with pytest.raises(RuntimeError):
            deploy(target, broken, **REPLICA)

    read_through(url, case, update)
    assert set(replica_pids()) < set(before) and len(replica_pids()) == 1
    deploy(target, checkpoint, **REPLICA)
    wait_until_served(url, case)


def test_an_update_to_weights_of_another_target_stops_nobody(
    url: str,
    case: Case,  # noqa: F811
    models: tuple[Path, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    target, checkpoint = models
    shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 999}))
    wait_until_served(url, case)
    before = replica_pids()

    def update() -> None:
        with pytest.raises(ValueError, match="vocab_size is 999, the target's embedding has 264"):
            deploy(target, tmp_path / "other", **REPLICA)

    read_through(url, case, update)
    assert replica_pids() == before
