"""Shared fixtures: one thread per test process, tiny random targets of both families, and a local Ray instance."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ray_variables import RAY_VARIABLES

if TYPE_CHECKING:
    from lilicorr.target import Target

# Triton reads it when it is first imported, which transformers does: that is why this file imports it in functions.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep parallel test processes from fighting over two cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a seed of its own is the same every time."""
    torch.manual_seed(0)


@pytest.fixture
def target_factory() -> Callable[..., Target]:
    """`make_target`, for tests that need their own shape."""
    from random_target import make_target

    return make_target


@pytest.fixture
def tiny_target() -> Target:
    """Six random Qwen3 layers of width 32 in fp64, two of them captured, vocabulary 67, mask id 66, eos 65."""
    from random_target import make_target

    return make_target()


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[None]:
    """The variables of a Ray instance of the tests, which Ray reads when it is imported."""
    before = {name: os.environ.get(name) for name in RAY_VARIABLES}
    os.environ.update(RAY_VARIABLES)
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture(scope="module")
def ray_cluster(ray_environment: None) -> Iterator[None]:
    """A Ray instance of four logical CPUs and no dashboard; it ends with the module's tests, and no other one does."""
    import ray

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
