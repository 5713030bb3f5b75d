"""The node of a replica is lost while clients read: the others go on, and the endpoint is whole again elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import wait_until
from models import running_replicas, serving
from test_faults import STREAMS, case, read_while, wait_until_served  # noqa: F401
from test_load import Case, models  # noqa: F401

from nodes import Nodes, node_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def nodes(ray_environment: None) -> Iterator[Nodes]:
    with node_cluster() as made:
        yield made


def test_a_lost_node_costs_its_own_streams_and_its_replica_comes_back(
    nodes: Nodes,
    models: tuple[Path, Path],  # noqa: F811
    case: Case,  # noqa: F811
) -> None:
    """Two replicas on two of three nodes; proxy and controller are on the head, which stays."""
    with serving(*models, num_replicas=2, cpus=1.0, engine={"max_running": STREAMS}) as url:
        wait_until_served(url, case)
        before = {replica["node_id"]: replica["pid"] for replica in running_replicas()}
        assert len(before) == 2 and before.keys() <= nodes.nodes.keys()
        lost, kept = before
        ended = asyncio.run(read_while(url, case, lambda: nodes.lose(lost)))
        broken = [error for error in ended if error is not None]
        assert len(broken) < STREAMS < len(ended)  # answers of the replica that stays, whole and right
        # Serve takes a while to notice, and until then counts the lost replica
        wait_until(lambda: {replica["node_id"] for replica in running_replicas()} == set(nodes.nodes), timeout_s=300)
        wait_until_served(url, case)
        after = {replica["node_id"]: replica["pid"] for replica in running_replicas()}
        assert after.keys() == nodes.nodes.keys() and after[kept] == before[kept]
