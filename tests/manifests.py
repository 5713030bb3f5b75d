"""What Kubernetes, KubeRay and Ray would refuse in deploy/*.yaml, checked without any of them.

`SCHEMAS` holds the part of KubeRay's `ray.io/v1` and of a pod that these files use: a field outside it is an error, as
it is for an API server with strict validation. `check` adds what no schema can say: that the parts of a file agree.
"""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from pipelines.resources import MAXIMUM_VARIABLE

ROOT = Path(__file__).parents[1]
SHARED = "/shared"  # run directories, caches and checkpoints: on every pod
CODE = "/opt/lilicorr"  # the repository in the image, see deploy/Dockerfile

Json = dict[str, Any]


def _object(required: str = "", **properties: Json) -> Json:
    """Schema of an object that has these properties only."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Json) -> Json:
    return {"type": "array", "items": items, "minItems": 1}


def _map(values: Json) -> Json:
    return {"type": "object", "additionalProperties": values}


TEXT: Json = {"type": "string", "minLength": 1}
FLAG: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 0}
QUANTITY: Json = {"type": "string", "pattern": r"^[0-9]+([KMGT]i)?$"}

RESOURCES = _map(QUANTITY)
SECRET = _object("secretKeyRef", secretKeyRef=_object("name key", name=TEXT, key=TEXT, optional=FLAG))
CONTAINER = _object(
    "name image resources",
    name=TEXT,
    image={"type": "string", "pattern": "^[^ ]+:[^ :]+$"},
    env=_list(_object("name", name=TEXT, value={"type": "string"}, valueFrom=SECRET)),
    ports=_list(_object("name containerPort", name=TEXT, containerPort={"type": "integer", "maximum": 65535})),
    resources=_object("requests limits", requests=RESOURCES, limits=RESOURCES),
    volumeMounts=_list(_object("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)
POD = _object(
    "spec",
    spec=_object(
        "containers",
        containers=_list(CONTAINER),
        tolerations=_list(_object("key", key=TEXT, operator={"enum": ["Exists", "Equal"]}, value=TEXT, effect=TEXT)),
        nodeSelector=_map(TEXT),
        volumes=_list(
            _object(
                "name",
                name=TEXT,
                persistentVolumeClaim=_object("claimName", claimName=TEXT),
                emptyDir=_object(medium={"enum": ["Memory"]}, sizeLimit=QUANTITY),
            )
        ),
    ),
)
HEAD = _object("rayStartParams template", rayStartParams=_map({"type": "string"}), template=POD)
WORKERS = _object(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=_map({"type": "string"}),
    template=POD,
)
CLUSTER = _object(
    "rayVersion authOptions headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    authOptions=_object("mode", mode={"enum": ["token"]}, secretName=TEXT),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=_object(
        version={"enum": ["v1", "v2"]},
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        idleTimeoutSeconds=COUNT,
    ),
    headGroupSpec=HEAD,
    workerGroupSpecs=_list(WORKERS),
)
JOB = _object(
    "entrypoint rayClusterSpec shutdownAfterJobFinishes",
    entrypoint=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode"]},
    backoffLimit=COUNT,
    activeDeadlineSeconds=COUNT,
    runtimeEnvYAML=TEXT,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
    rayClusterSpec=CLUSTER,
)
UPGRADE = _object(
    "type",
    type={"enum": ["None", "NewCluster", "NewClusterWithIncrementalUpgrade"]},
    clusterUpgradeOptions=_object(
        "gatewayClassName",
        gatewayClassName=TEXT,
        maxSurgePercent=COUNT,
        stepSizePercent=COUNT,
        intervalSeconds=COUNT,
    ),
)
SERVICE = _object(
    "serveConfigV2 rayClusterConfig upgradeStrategy",
    serveConfigV2=TEXT,
    upgradeStrategy=UPGRADE,
    rayClusterConfig=CLUSTER,
)
SCHEMAS = {
    kind: _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=_object(
            "name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 50}
        ),
        spec=spec,
    )
    for kind, spec in (("RayCluster", CLUSTER), ("RayJob", JOB), ("RayService", SERVICE))
}


def check(manifest: Json) -> None:
    """Raise ValueError with the place and the fault of the first thing in a manifest that would not work."""
    kind = manifest.get("kind")
    if kind not in SCHEMAS:
        raise ValueError(f"kind must be one of {', '.join(SCHEMAS)}, got {kind!r}")
    faults = jsonschema.Draft202012Validator(SCHEMAS[kind]).iter_errors(manifest)
    fault = jsonschema.exceptions.best_match(faults)
    if fault is not None:
        raise ValueError(f"{fault.json_path}: {fault.message}")
    spec = manifest["spec"]
    if kind == "RayCluster":
        check_cluster(spec)
        check_maximum(spec)
    elif kind == "RayJob":
        check_cluster(spec["rayClusterSpec"])
        check_maximum(spec["rayClusterSpec"])
        check_job(spec)
    else:
        check_cluster(spec["rayClusterConfig"])
        check_service(spec)


def check_cluster(spec: Json) -> None:
    """The parts of a RayCluster's `spec` agree with each other and with the installed Ray."""
    if spec["rayVersion"] != version("ray"):
        raise ValueError(f"rayVersion is {spec['rayVersion']}, the project's Ray {version('ray')}")
    head, groups = spec["headGroupSpec"], spec["workerGroupSpecs"]
    if head["rayStartParams"].get("num-cpus") != "0":
        raise ValueError('headGroupSpec.rayStartParams.num-cpus must be "0": the head runs the driver and no work')
    for group in groups:
        low, wanted, high = group["minReplicas"], group.get("replicas", 0), group["maxReplicas"]
        if not low <= wanted <= high:
            raise ValueError(f"{group['groupName']}: replicas {wanted} is outside of {low} to {high}")
    containers = {"head": head["template"]["spec"]} | {g["groupName"]: g["template"]["spec"] for g in groups}
    images = {pod["containers"][0]["image"] for pod in containers.values()}
    if len(images) > 1:
        raise ValueError(f"head and workers have different images: {', '.join(sorted(images))}")
    for name, pod in containers.items():
        _check_pod(name, pod)


def check_maximum(spec: Json) -> None:
    """The head of a cluster for jobs is told what all workers have together, by which a job knows what to wait for."""
    most = {"CPU": 0, "GPU": 0}
    for group in spec["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        most["CPU"] += group["maxReplicas"] * int(limits["cpu"])
        most["GPU"] += group["maxReplicas"] * int(limits.get("nvidia.com/gpu", "0"))
    wanted = ",".join(f"{name}={amount}" for name, amount in most.items())
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    given = {entry["name"]: entry.get("value") for entry in head.get("env", [])}.get(MAXIMUM_VARIABLE)
    if given != wanted:
        raise ValueError(f"head: {MAXIMUM_VARIABLE} is {given}, the workers come to {wanted}")


def _check_pod(name: str, pod: Json) -> None:
    """A pod's mounts have volumes, it sees the shared folder, and its GPUs are asked for as Kubernetes wants it."""
    container = pod["containers"][0]
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
    if missing := set(mounts) - volumes:
        raise ValueError(f"{name}: no volume {', '.join(sorted(missing))}")
    if SHARED not in mounts.values():
        raise ValueError(f"{name}: {SHARED} is not mounted, and run directories lie there")
    requests, limits = (container["resources"][part].get("nvidia.com/gpu") for part in ("requests", "limits"))
    if requests != limits:
        raise ValueError(f"{name}: nvidia.com/gpu is requested {requests} times and limited to {limits}")


def check_job(spec: Json) -> None:
    """The command is one that `pipelines/full.py` takes, and leaves nothing behind that the cluster's end would end."""
    from lilicorr.config import load_profile

    words = shlex.split(spec["entrypoint"])
    if words[:2] != ["python", f"{CODE}/pipelines/full.py"]:
        raise ValueError(f"entrypoint must begin with python {CODE}/pipelines/full.py, got {' '.join(words[:2])}")
    options = dict(zip(words[2::2], words[3::2], strict=True))
    load_profile(options["--profile"], ROOT / "pipelines" / "profiles")
    if not options.get("--run-dir", "").startswith(SHARED + "/"):
        raise ValueError(f"--run-dir must lie below {SHARED}, got {options.get('--run-dir')}")
    if spec["shutdownAfterJobFinishes"] and options.get("--until") != "evaluate":
        raise ValueError("the endpoint of the last stage would end with the job's cluster: --until evaluate is missing")


def check_service(spec: Json) -> None:
    """Serve takes the configuration, and its replicas fit the pods and can be reached from outside of them."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    from serve_app.args import AppArgs

    config = yaml.safe_load(spec["serveConfigV2"])
    ServeDeploySchema.model_validate(config)
    scaling = config["applications"][0]["deployments"][0]["autoscaling_config"]
    if unknown := scaling.keys() - AutoscalingConfig.model_fields.keys():  # Serve passes over them
        raise ValueError(f"autoscaling_config has no {', '.join(sorted(unknown))}")
    args = AppArgs(**config["applications"][0]["args"])
    cluster = spec["rayClusterConfig"]
    gpus = [
        int(group["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0"))
        for group in cluster["workerGroupSpecs"]
    ]
    if args.gpus > max(gpus):
        raise ValueError(f"a replica takes {args.gpus:g} GPUs and no pod has more than {max(gpus)}")
    host, port = config["http_options"]["host"], config["http_options"]["port"]
    if host != "0.0.0.0":
        raise ValueError(f"http_options.host {host} is reached from inside the pod only")
    ports = [entry["containerPort"] for entry in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]]
    if port not in ports:
        raise ValueError(f"http_options.port {port} is not among the head's ports {ports}")
    for path in (args.checkpoint, args.api_key_file, args.admin_key_file):
        if path is not None and not re.match(rf"{SHARED}/", path):
            raise ValueError(f"{path} is not below {SHARED}, where every pod sees it")
