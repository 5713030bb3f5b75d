"""Several nodes on one machine, of which one is lost in the middle of a stage: the rest ends as if it had not been.

The driver's node has no CPUs, as in cluster.yaml, so that every actor and worker is on a node that can go.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import test_regenerate
from test_regenerate import ROOT, change, expected, folder_of, found, make_slow
from test_regenerate import config as corpus  # noqa: F401
from test_train import config as recipe  # noqa: F401
from test_train import inputs, with_train  # noqa: F401

import fake_generator
from lilicorr.config import PipelineConfig
from lilicorr.provenance import sha256_tree
from pipelines import regenerate, train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


class Nodes:
    """A head without CPUs and three nodes of one, each a raylet of its own."""

    def __init__(self, folder: str) -> None:
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
        self.nodes = {node.node_id: node for node in (self.cluster.add_node(num_cpus=1) for _ in range(3))}
        self.cluster.wait_for_nodes()

    def lose(self) -> None:
        """End one node that is at work, and everything on it, at once."""
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        busy = [node for name, node in self.nodes.items() if not free[name].get("CPU")]
        self.cluster.remove_node(busy[0], allow_graceful=False)


@pytest.fixture
def nodes(ray_environment: None) -> Iterator[Nodes]:
    """Such a cluster, and this process connected to it."""
    import ray

    folder = tempfile.mkdtemp(prefix="lr-", dir="/tmp")
    made = Nodes(folder)
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


@pytest.fixture
def shipped(nodes: Nodes) -> Iterator[None]:
    """Let workers have what is defined in the tests, whose folder they do not know."""
    import ray

    for module in (test_regenerate, fake_generator):
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in (test_regenerate, fake_generator):
        ray.cloudpickle.unregister_pickle_by_value(module)


def once(happened: Callable[[], bool], act: Callable[[], None]) -> threading.Event:
    """Do something in a thread as soon as something has happened; the event is set behind it."""
    done = threading.Event()

    def watch() -> None:
        while not happened():
            if done.wait(0.05):
                return
        act()
        done.set()

    threading.Thread(target=watch, daemon=True).start()
    return done


def test_regeneration_ends_without_the_node(nodes: Nodes, corpus: PipelineConfig, shipped: None) -> None:  # noqa: F811
    """Nobody replaces it: the actors of the other nodes make its shards as well."""
    corpus = change(corpus, num_actors=3)
    manifests = folder_of(corpus) / "manifest"
    lost = once(lambda: len(list(manifests.glob("*.json"))) >= 1, nodes.lose)
    numbers = regenerate.run(corpus, make_slow)
    assert lost.is_set()
    assert found(corpus) == expected(corpus) and numbers["ok"] == 22


def test_training_goes_on_where_another_node_takes_over(
    nodes: Nodes,
    recipe: PipelineConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Two workers on two of three nodes; the run ends with the bytes of one that was left alone."""
    runs = {"trunk": replace(recipe.train.runs["trunk"], steps=600)}
    recipe = with_train(recipe, runs=runs, num_workers=2, checkpoint_steps=20, log_steps=20, max_failures=3)
    whole = replace(recipe, profile="whole")
    shutil.copytree(recipe.directory, whole.directory, symlinks=True)
    train.run(whole)
    states = recipe.directory / "train" / "trunk" / "checkpoints"

    lost = once(lambda: len(list(states.glob("step_*"))) >= 2, nodes.lose)
    result = train.run(recipe)
    assert lost.is_set() and result["runs"]["trunk"]["steps"] == 600
    log = [json.loads(line) for line in (states.parent / "metrics.jsonl").read_text().splitlines()]
    assert sum(entry.get("resumed", False) for entry in log) == 1
    ends = [sha256_tree(run.directory / "train" / "trunk" / "final") for run in (recipe, whole)]
    assert ends[0] == ends[1]
