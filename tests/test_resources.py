"""What a cluster can give, now and grown, and what a stage is told that asks for more."""

from __future__ import annotations

import pytest

from pipelines.resources import MAXIMUM_VARIABLE, check_resources


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four CPUs, and nothing known of an autoscaler: what Ray 2.60 says of every cluster that its launchers start."""
    ray = pytest.importorskip("ray")
    state = pytest.importorskip("ray._private.state").state
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: None)
    monkeypatch.delenv(MAXIMUM_VARIABLE, raising=False)
    return monkeypatch


def test_a_cluster_that_is_too_small_is_named(cluster: pytest.MonkeyPatch) -> None:
    check_resources(4, "workers", {"CPU": 1.0}, "train.num_workers")
    with pytest.raises(ValueError, match=r"5 workers of 1 CPU each need 5 CPU, the cluster has 4; lower train\.num_w"):
        check_resources(5, "workers", {"CPU": 1.0}, "train.num_workers")
    with pytest.raises(ValueError, match=r"4 actors of 0\.5 GPU each need 2 GPU, the cluster has 0"):
        check_resources(4, "actors", {"CPU": 1.0, "GPU": 0.5}, "regenerate.num_actors")


def test_what_the_cluster_file_lets_an_autoscaler_add_counts(cluster: pytest.MonkeyPatch) -> None:
    """From no nodes at all, up to the last GPU and no further."""
    cluster.setattr("ray.cluster_resources", lambda: {"memory": 1e9})
    cluster.setenv(MAXIMUM_VARIABLE, "CPU=704, GPU =32")
    check_resources(32, "workers", {"CPU": 1.0, "GPU": 1.0}, "train.num_workers")
    with pytest.raises(ValueError, match=r"33 workers of 1 GPU each need 33 GPU, the cluster has 32; lower train\.num"):
        check_resources(33, "workers", {"CPU": 1.0, "GPU": 1.0}, "train.num_workers")


def test_what_a_platform_has_reported_to_ray_counts(cluster: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("ray._private.state").state
    cluster.setattr(state, "get_max_resources_from_cluster_config", lambda: {"CPU": 64, "GPU": 8})
    check_resources(8, "workers", {"CPU": 1.0, "GPU": 1.0}, "train.num_workers")


@pytest.mark.parametrize(
    "text",
    ["CPU", "CPU=many", "CPU=1=2", "CPU=1,", "=5", "CPU=nan", "CPU=inf", "CPU=-5", "CPU=4,CPU=8", "CPU=4, CPU=8"],
)
def test_a_maximum_that_cannot_be_read_is_named(cluster: pytest.MonkeyPatch, text: str) -> None:
    cluster.setenv(MAXIMUM_VARIABLE, text)
    with pytest.raises(ValueError, match="LILICORR_MAX_RESOURCES must be like CPU=768,GPU=32, got '" + text):
        check_resources(1, "workers", {"CPU": 1.0}, "train.num_workers")
