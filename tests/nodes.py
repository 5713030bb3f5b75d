"""Several Ray nodes on one machine, one of which can be lost.

The driver's node has no CPUs, as in cluster.yaml: every actor, worker, task and replica is on a node that can go.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Nodes:
    """A head without CPUs and so many nodes of one, each a raylet of its own."""

    def __init__(self, folder: str, count: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "temp_dir": folder,
                "include_dashboard": False,
                "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 5},
            },
        )
        self.nodes: dict[str, Any] = {}
        for _ in range(count):
            self.add()
        self.cluster.wait_for_nodes()
        self.cluster._shutdown_at_exit = False  # a node that comes later may come in a thread, which sets no signals

    def add(self) -> None:
        """One more node."""
        node = self.cluster.add_node(num_cpus=1)
        self.nodes[node.node_id] = node

    def lose(self, name: str | None = None) -> None:
        """End that node, or one that is at work, and everything on it, at once."""
        from ray._private.state import available_resources_per_node

        if name is None:
            free = available_resources_per_node()
            name = next(one for one in self.nodes if not free[one].get("CPU"))
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@contextmanager
def node_cluster(count: int = 3) -> Iterator[Nodes]:
    """Such a cluster, and this process connected to it."""
    import ray

    folder = tempfile.mkdtemp(prefix="lr-", dir="/tmp")
    made = Nodes(folder, count)
    ray.init(
        address=made.cluster.address,
        log_to_driver=False,
        namespace=uuid.uuid4().hex,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield made
    ray.shutdown()
    made.cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
