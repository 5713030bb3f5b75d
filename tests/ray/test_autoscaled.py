"""A cluster without a worker: a stage that fits on the nodes its autoscaler may start waits for them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_regenerate
from test_regenerate import change, expected, found, make_replay
from test_regenerate import config as corpus  # noqa: F401
from training_runs import config as recipe  # noqa: F401
from training_runs import with_train

import fake_generator
from lilicorr.config import PipelineConfig
from pipelines import local, regenerate, train
from pipelines.process import descendants
from pipelines.resources import MAXIMUM_VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
HEAD_ID = "f" * 51 + "00000"  # of Ray's provider whose nodes are processes of this machine
NODE_TYPES = {
    "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0},
    "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
}


def autoscaling(address: str) -> dict[str, object]:
    """The file of a cluster like cluster.yaml, its machines of Ray's fake provider."""
    commands = ("setup", "head_setup", "worker_setup", "initialization", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "test",
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
        },
        "auth": {},
        "docker": {},
        "available_node_types": NODE_TYPES,
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in commands},
    }


@pytest.fixture
def autoscaled(ray_environment: None) -> Iterator[None]:
    """A head without CPUs whose autoscaler may start two nodes of one; this process connected to it."""
    import ray

    taken: set[int] = set()
    port, client_port, *agent_ports = (local.free_port(taken) for _ in range(6))
    folder = tempfile.mkdtemp(prefix="lr-", dir="/tmp")
    Path(folder, "cluster.json").write_text(json.dumps(autoscaling(f"127.0.0.1:{port}")))
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=0"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={client_port}"]
    agents = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
    command += [f"--{agent}-port={number}" for agent, number in zip(agents, agent_ports, strict=True)]
    command += ["--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={folder}"]
    command += ["--object-store-memory=150000000", f"--autoscaling-config={folder}/cluster.json"]
    variables = {
        **os.environ,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_NODE_TYPE_NAME": "ray.head.default",
    }
    with open(Path(folder, "head.log"), "wb") as log:
        head = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in Path(folder, "head.log").read_text() and time.monotonic() < deadline:
            assert head.poll() is None, Path(folder, "head.log").read_text()
            time.sleep(0.2)
        ray.init(
            address=f"127.0.0.1:{port}",
            log_to_driver=False,
            namespace=uuid.uuid4().hex,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
        yield
    finally:
        ray.shutdown()
        started = [head.pid, *descendants(head.pid)]
        head.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while head.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in started:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shipped(autoscaled: None) -> Iterator[None]:
    """Let workers have what is defined in the tests, whose folder they do not know."""
    import ray

    for module in (test_regenerate, fake_generator):
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in (test_regenerate, fake_generator):
        ray.cloudpickle.unregister_pickle_by_value(module)


def test_regeneration_starts_its_nodes(
    shipped: None,
    corpus: PipelineConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without what the autoscaler may have it is refused, as on a cluster that stays as it is."""
    corpus = change(corpus, num_actors=2)
    with pytest.raises(ValueError, match="2 actors of 1 CPU each need 2 CPU, the cluster has 0; lower"):
        regenerate.run(corpus, make_replay)
    monkeypatch.setenv(MAXIMUM_VARIABLE, "CPU=2")
    regenerate.run(corpus, make_replay)
    assert found(corpus) == expected(corpus)


def test_training_starts_its_nodes(
    autoscaled: None,
    recipe: PipelineConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(MAXIMUM_VARIABLE, "CPU=2")
    recipe = with_train(recipe, runs={"trunk": recipe.train.runs["trunk"]}, num_workers=2)
    assert train.run(recipe)["runs"]["trunk"]["steps"] == 5
