"""deploy/*.yaml hold what KubeRay and Serve take, and the checks see the usual mistakes in each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")

from lilicorr.provenance import COMMIT_VARIABLE
from manifests import CODE, ROOT, check
from pipelines.resources import MAXIMUM_VARIABLE

FOLDER = ROOT / "deploy"
NAMES = ("raycluster", "rayjob", "rayservice")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The RayCluster's spec inside any of the three kinds."""
    spec = manifest["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def workers_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return cluster_of(manifest)["workerGroupSpecs"][0]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_valid(name: str) -> None:
    check(read(name))


def test_every_file_of_the_folder_is_checked() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*NAMES, "cluster.gcp"}


def unknown_field(manifest: dict[str, Any]) -> None:
    cluster_of(manifest)["workerGroupSpec"] = []


def number_as_start_parameter(manifest: dict[str, Any]) -> None:
    cluster_of(manifest)["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def other_ray(manifest: dict[str, Any]) -> None:
    cluster_of(manifest)["rayVersion"] = "2.52.0"


def more_than_maximum(manifest: dict[str, Any]) -> None:
    workers_of(manifest)["replicas"] = 9


def volume_gone(manifest: dict[str, Any]) -> None:
    spec = workers_of(manifest)["template"]["spec"]
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "shared"]


def gpus_requested_only(manifest: dict[str, Any]) -> None:
    workers_of(manifest)["template"]["spec"]["containers"][0]["resources"]["limits"].pop("nvidia.com/gpu")


def no_token(manifest: dict[str, Any]) -> None:
    del cluster_of(manifest)["authOptions"]


def work_on_the_head(manifest: dict[str, Any]) -> None:
    cluster_of(manifest)["headGroupSpec"]["rayStartParams"] = {}


def refuse(name: str, mistake: Callable[[dict[str, Any]], None], message: str) -> None:
    """A manifest of ours with that mistake is refused with that message."""
    manifest = read(name)
    mistake(manifest)
    with pytest.raises(ValueError, match=re.escape(message)):
        check(manifest)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (unknown_field, "'workerGroupSpec' was unexpected"),
        (number_as_start_parameter, "0 is not of type 'string'"),
        (other_ray, "rayVersion is 2.52.0, the project's Ray 2.60"),
        (more_than_maximum, "replicas 9 is outside of"),
        (volume_gone, "no volume shared"),
        (gpus_requested_only, "and limited to None"),
        (no_token, "'authOptions' is a required property"),
        (work_on_the_head, 'num-cpus must be "0"'),
    ],
)
def test_a_mistake_in_the_cluster_is_refused(
    name: str, mistake: Callable[[dict[str, Any]], None], message: str
) -> None:
    refuse(name, mistake, message)


def one_pod_more(manifest: dict[str, Any]) -> None:
    workers_of(manifest)["maxReplicas"] = 5


def fewer_cpus(manifest: dict[str, Any]) -> None:
    workers_of(manifest)["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "96"


def head_not_told(manifest: dict[str, Any]) -> None:
    head = cluster_of(manifest)["headGroupSpec"]["template"]["spec"]["containers"][0]
    head["env"] = [entry for entry in head["env"] if entry["name"] != MAXIMUM_VARIABLE]


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (one_pod_more, "LILICORR_MAX_RESOURCES is CPU=704,GPU=32, the workers come to CPU=880,GPU=40"),
        (fewer_cpus, "LILICORR_MAX_RESOURCES is CPU=704,GPU=32, the workers come to CPU=384,GPU=32"),
        (head_not_told, "LILICORR_MAX_RESOURCES is None, the workers come to CPU=704,GPU=32"),
    ],
)
def test_another_maximum_than_the_workers_is_refused(
    name: str, mistake: Callable[[dict[str, Any]], None], message: str
) -> None:
    refuse(name, mistake, message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pipelines/full.py", "full.py", f"entrypoint must begin with python {CODE}/pipelines/full.py"),
        ("--profile paper_8b", "--profile paper_9b", "paper_9b"),
        ("--run-dir /shared/runs", "--run-dir runs", "--run-dir must lie below /shared, got runs"),
        ("--until evaluate", "--until deploy", "--until evaluate is missing"),
    ],
)
def test_a_mistake_in_the_job_is_refused(old: str, new: str, message: str) -> None:
    manifest = read("rayjob")
    assert old in manifest["spec"]["entrypoint"]
    manifest["spec"]["entrypoint"] = manifest["spec"]["entrypoint"].replace(old, new)
    with pytest.raises(ValueError, match=re.escape(message)):
        check(manifest)


def test_an_unknown_submission_mode_and_a_missing_strategy_are_refused() -> None:
    job = read("rayjob")
    job["spec"]["submissionMode"] = "K8sJob"
    with pytest.raises(ValueError, match="submissionMode: 'K8sJob' is not one of"):
        check(job)
    service = read("rayservice")
    del service["spec"]["upgradeStrategy"]
    with pytest.raises(ValueError, match="'upgradeStrategy' is a required property"):
        check(service)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("host: 0.0.0.0", "host: 127.0.0.1", "http_options.host 127.0.0.1 is reached from inside the pod only"),
        ("port: 8000", "port: 8001", "http_options.port 8001 is not among the head's ports"),
        ("gpus: 1", "gpus: 2", "a replica takes 2 GPUs and no pod has more than 1"),
        ("max_queue: 64", "max_queu: 64", "max_queu"),
        ("max_queue: 64", "max_queue: 96", "must be below max_ongoing_requests"),
        ("max_replicas: 4", "max_replica: 4", "autoscaling_config has no max_replica"),
        ("checkpoint: /shared/", "checkpoint: /home/", "is not below /shared"),
    ],
)
def test_a_mistake_in_the_service_is_refused(old: str, new: str, message: str) -> None:
    manifest = read("rayservice")
    assert old in manifest["spec"]["serveConfigV2"]
    manifest["spec"]["serveConfigV2"] = manifest["spec"]["serveConfigV2"].replace(old, new)
    with pytest.raises(ValueError, match=re.escape(message)):
        check(manifest)


def test_the_service_runs_what_the_config_file_runs() -> None:
    """One endpoint on every cluster: only paths, model and listening address differ from serve_app/config.yaml."""
    ours = yaml.safe_load(read("rayservice")["spec"]["serveConfigV2"])["applications"][0]
    theirs = yaml.safe_load((ROOT / "serve_app" / "config.yaml").read_text(encoding="utf-8"))["applications"][0]
    assert ours["args"].keys() == theirs["args"].keys()
    assert {**ours, "args": None} == {**theirs, "args": None}


def test_the_paper_profile_fits_on_the_workers() -> None:
    from lilicorr.config import load_profile

    config = load_profile("paper_8b", ROOT / "pipelines" / "profiles")
    for name in ("raycluster", "rayjob"):
        workers = workers_of(read(name))
        limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus = workers["maxReplicas"] * int(limits["nvidia.com/gpu"])
        assert config.train.num_workers * config.train.gpus_per_worker <= gpus
        assert config.regenerate.num_actors * config.regenerate.gpus_per_actor <= gpus


def test_the_image_holds_the_code_where_the_manifests_look_for_it() -> None:
    recipe = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert f"WORKDIR {CODE}\nCOPY . .\n" in recipe
    assert "gcc" in recipe and "wget" in recipe  # Triton's launchers and KubeRay's probes
    assert f"{COMMIT_VARIABLE}=$COMMIT" in recipe
