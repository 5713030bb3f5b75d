"""One local Ray instance for all tests of this folder, apart from any other on the machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # the default writes a token into the home folder
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback interface only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # the default of 15 starves the workers on a machine with other work
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Four logical CPUs, no dashboard; it ends with the tests, and no other instance does."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    import ray  # reads the variables above when it is imported

    folder = tempfile.mkdtemp(prefix="lr-", dir="/tmp")  # short: a socket's path has at most 107 bytes
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=150_000_000,
        log_to_driver=False,
        namespace=uuid.uuid4().hex,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
