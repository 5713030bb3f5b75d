"""Deploy a trained draft model as an OpenAI-compatible endpoint on Ray Serve.

Last stage of the pipeline: train/<run>/final in, `endpoint.json` (url, model, a curl line) out. It talks to
the REST API of a Ray cluster's dashboard and does not need to stay: the endpoint outlives this process. The
cluster is RAY_ADDRESS, else a head on this machine that `pipelines/local.py` starts and `make demo-stop` ends.

    python pipelines/deploy.py --profile demo

Running it again changes nothing while weights, code and config are the same, and replaces the replicas where
they are not. `serve.yaml` is what was deployed; edit it and `serve deploy` it to scale by hand.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import shlex
import shutil
import socket
import sys
import tempfile
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from lilicorr.config import DeployConfig, EngineConfig, PipelineConfig, fingerprint
from lilicorr.folder import new_folder, remove_unfinished
from lilicorr.provenance import sha256_tree, write_atomic, write_json
from pipelines import local
from pipelines.inputs import key_file
from serve_app.dashboard import REQUEST_TIMEOUT_S, Dashboard, cluster_token, wait_for
from serve_app.scale import APP
from serve_app.scale import TIMEOUT_S as START_TIMEOUT_S

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lilicorr", "serve_app")  # what a replica imports
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses of all interfaces -> of the loopback one
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EXAMPLE_CHARS = 400
CHECKPOINTS = ".checkpoint"  # copies of what was deployed; hidden, so no part of the stage's outputs
KEPT_COPIES = 2
IN_VERSION = ("model_name", "max_model_len", "yarn", "engine", "max_queue")  # settings of a replica, seen from outside


def run(config: PipelineConfig) -> dict[str, Any]:
    """Deploy `config.deploy.run` and wait until the endpoint answers.

    Raises ValueError for an untrained run, a port or a route somebody else has, and RuntimeError if the
    application does not come up.
    """
    deploy, folder = config.deploy, config.directory.resolve() / "deploy"
    trained = deployed_checkpoint(config)
    if not (trained / "config.json").is_file():
        raise ValueError(f"deploy.run {deploy.run!r} is not trained: {trained} has no config.json")
    checkpoint = copy_checkpoint(folder / CHECKPOINTS, trained)
    code = copy_code(folder / ".code")
    application = build_application(config, checkpoint, code)
    dashboard = find_dashboard(config)
    make_room(dashboard, deploy)
    serve_config = {
        "proxy_location": "HeadOnly" if deploy.host in LOOPBACK else "EveryNode",
        "http_options": {"host": deploy.host, "port": deploy.port},
        "applications": [*other_applications(dashboard), application],
    }
    write_atomic(folder / "serve.yaml", yaml.safe_dump(serve_config, sort_keys=False).encode())
    dashboard.deploy(serve_config)
    url = url_of(deploy.host, deploy.port)
    version = application["args"]["version"]
    wait_until_running(dashboard, version)
    wait_until_serving(url, version, deploy.api_key_file)
    remove_old_copies(folder / CHECKPOINTS)
    example = example_message(config.directory / "prepare" / "held_out.parquet")
    endpoint = {
        "url": url,
        "model": deploy.model_name,
        "example": example,
        "curl": curl_line(url, deploy.model_name, example, deploy.api_key_file),
        "checkpoint": str(checkpoint),
        "version": version,
        "dashboard": dashboard.url,
    }
    write_json(folder / "endpoint.json", endpoint)
    logger.info("the endpoint is up; try\n%s", endpoint["curl"])
    return {"url": url, "model": deploy.model_name, "version": version}


def url_of(host: str, port: int) -> str:
    """The endpoint's address on this machine; `host` is where Serve listens, of either kind of IP."""
    reached = EVERYWHERE.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def deployed_checkpoint(config: PipelineConfig) -> Path:
    """The draft model that is to be served."""
    return config.directory.resolve() / "train" / config.deploy.run / "final"


def wanted_version(config: PipelineConfig) -> str:
    """The version that deploying now would serve: of weights, code and settings as they are.

    Raises ValueError for an untrained run.
    """
    return version_of(deployed_checkpoint(config), code_hash(ROOT), config.deploy)


def version_of(checkpoint: Path, code: str, deploy: DeployConfig) -> str:
    """What tells one replica from another: its weights, the hash of the code, its settings."""
    return fingerprint(sha256_tree(checkpoint), code, *(getattr(deploy, name) for name in IN_VERSION))


def code_hash(root: Path) -> str:
    """16 hex digits of what a replica imports from below `root`."""
    return fingerprint([sha256_tree(root / package) for package in PACKAGES])


def copy_code(folder: Path) -> Path:
    """A copy of what the replicas import, under its hash in `folder`, which stays as it is while they run.

    The working directory of a job would not do: it ends with the job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        aside = Path(temporary) / "code"
        for package in PACKAGES:
            shutil.copytree(ROOT / package, aside / package, ignore=shutil.ignore_patterns("__pycache__"))
        code = folder / code_hash(aside)
        if not code.is_dir():
            aside.rename(code)
    return code


def copy_checkpoint(folder: Path, checkpoint: Path) -> Path:
    """A copy of a checkpoint, under the hash of its content in `folder`.

    Replicas read it whenever they start again; training moves or replaces the original.
    """
    remove_unfinished(folder)
    copy = folder / fingerprint(sha256_tree(checkpoint))
    if not copy.is_dir():
        with new_folder(copy) as aside:
            shutil.copytree(checkpoint, aside, copy_function=link_or_copy, dirs_exist_ok=True)
    os.utime(copy)  # the last that was deployed, which `remove_old_copies` goes by
    return copy


def link_or_copy(source: str, destination: str) -> None:
    """Make `destination` the same file as `source`, or a copy where the file system has no hard links.

    A checkpoint is only ever replaced as a whole, so that the content of the common file does not change.
    """
    try:
        os.link(os.path.realpath(source), destination)
    except OSError:
        shutil.copy2(source, destination)


def remove_old_copies(folder: Path) -> None:
    """Leave the two checkpoints of `folder` that were deployed last: replicas of the one before may still be ending."""
    copies = sorted(folder.iterdir(), key=lambda copy: copy.stat().st_mtime_ns)
    for copy in copies[:-KEPT_COPIES]:
        shutil.rmtree(copy)


def build_application(config: PipelineConfig, checkpoint: Path, code: Path) -> dict[str, Any]:
    """The entry of a Serve config. Its `version` (`version_of`) redeploys when it changes."""
    from lilicorr.target import resolve_target
    from serve_app.app import AppArgs

    target, deploy = config.target, config.deploy
    args = AppArgs(
        checkpoint=str(checkpoint),
        target=target.source if target.source == "embedded" else str(resolve_target(target)),
        target_revision=target.revision,
        target_dtype=target.dtype,
        mask_token_id=target.mask_token_id,
        template_kwargs=target.template_kwargs,
        model_name=deploy.model_name,
        yarn=asdict(deploy.yarn) if deploy.yarn else None,
        max_model_len=deploy.max_model_len,
        num_replicas=deploy.num_replicas,
        gpus=deploy.gpus_per_replica,
        engine=changed_fields(deploy.engine),
        max_queue=deploy.max_queue,
        max_ongoing_requests=deploy.max_ongoing_requests,
        api_key_file=key_file(deploy.api_key_file),
        admin_key_file=key_file(deploy.admin_key_file),
        version=version_of(checkpoint, code.name, deploy),
    )
    return {
        "name": APP,
        "route_prefix": "/",
        "import_path": "serve_app.app:build_app",
        "runtime_env": {"working_dir": f"local://{code}", "env_vars": {"PYTHONDONTWRITEBYTECODE": "1"}},
        "args": args.model_dump(),
    }


def changed_fields(config: EngineConfig) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {name: value for name, value in asdict(config).items() if value != getattr(EngineConfig(), name)}


def find_dashboard(config: PipelineConfig) -> Dashboard:
    """The dashboard of RAY_ADDRESS (a cluster's or a dashboard's), else of a head on this machine."""
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        folder = config.directory.resolve().parent / ".ray"
        head = local.start(folder)
        if local.owns_instance():
            import ray

            ray.shutdown()  # the stages before are done with it, and the endpoint's head needs its memory
        return Dashboard(head["dashboard"], Path(local.environment(folder)["RAY_AUTH_TOKEN_PATH"]).read_text().strip())
    if address.startswith(("http://", "https://")):
        return Dashboard(address, cluster_token())
    import ray

    url = ray.init(address=address, ignore_reinit_error=True).dashboard_url
    if not url:
        raise ValueError(f"the Ray cluster at RAY_ADDRESS={address} has no dashboard, which deploying needs")
    return Dashboard(f"http://{url}", cluster_token())


def make_room(dashboard: Dashboard, deploy: DeployConfig) -> None:
    """Make sure that Serve can listen where the endpoint is to be. Serve cannot move while it runs.

    Raises ValueError if another program has the port, or Serve listens elsewhere for other applications.
    """
    details = dashboard.details()
    options = details.get("http_options")
    if options:
        if (options["host"], options["port"]) == (deploy.host, deploy.port):
            return
        others = sorted(details["applications"].keys() - {APP})
        if others:
            raise ValueError(
                f"Serve of {dashboard.url} listens on {options['host']}:{options['port']} for {', '.join(others)}; "
                f"set deploy.host and deploy.port to that instead of {deploy.host}:{deploy.port}"
            )
        dashboard.shut_down_serve()
    family = socket.AF_INET6 if ":" in deploy.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((deploy.host, deploy.port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {deploy.host}:{deploy.port} ({error.strerror}); is another program there? "
                "Choose a free port: --set deploy.port=PORT"
            ) from error


def other_applications(dashboard: Dashboard) -> list[dict[str, Any]]:
    """The configs of Serve's other applications: a deployment without them would delete them."""
    configs = []
    for name, application in sorted(dashboard.details()["applications"].items()):
        if name == APP:
            continue
        if application.get("route_prefix") == "/":
            raise ValueError(f"the Serve application {name!r} of {dashboard.url} has the route / of the endpoint")
        if application.get("deployed_app_config"):
            configs.append(application["deployed_app_config"])
    return configs


def wait_until_running(dashboard: Dashboard, version: str) -> None:
    """Poll Serve until the application runs in this version; raises RuntimeError if it fails or takes too long."""

    def look() -> bool | str:
        status, report, running = application_state(dashboard)
        if status == "DEPLOY_FAILED":
            raise RuntimeError(f"the application did not start: {report}")
        return (running == version and status == "RUNNING") or f"{status} {report}"

    wait_for(look, "the application", START_TIMEOUT_S)


def application_state(dashboard: Dashboard) -> tuple[str, str, str | None]:
    """The application's status, Serve's words about it, its version; a dashboard too busy to answer is UNKNOWN."""
    try:
        application = dashboard.details()["applications"].get(APP, {})
    except RuntimeError as error:
        return "UNKNOWN", str(error), None
    deployments = application.get("deployments", {}).values()
    messages = [application.get("message"), *(deployment.get("message") for deployment in deployments)]
    arguments = (application.get("deployed_app_config") or {}).get("args", {})
    return application.get("status", "MISSING"), "; ".join(filter(None, messages)), arguments.get("version")


def wait_until_serving(url: str, version: str, api_key_file: str | None) -> None:
    """Poll the endpoint itself until it is healthy and answers in this version."""

    def look() -> bool | str:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=REQUEST_TIMEOUT_S):
                pass
            found = served_version(url, api_key_file, REQUEST_TIMEOUT_S)
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            return repr(error)
        return found == version or f"it still serves version {found}"

    wait_for(look, f"version {version} at {url}, of which Serve says that it runs,", START_TIMEOUT_S)


def served_version(url: str, api_key_file: str | None, timeout_s: float) -> str:
    """The version that the endpoint at `url` says it serves, asked with the first of its API keys if it has any.

    Raises OSError, HTTPException, ValueError or LookupError where nobody answers, or something else does.
    """
    request = urllib.request.Request(f"{url}/v1/models")
    if api_key_file is not None:
        from serve_app.guard import read_keys  # which needs FastAPI

        key = read_keys(api_key_file)[0].encode().decode("latin-1")  # its UTF-8, as headers go
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)["data"][0]["fingerprint"]


def example_message(held_out: Path) -> str:
    """A user's message of moderate length from the held-out conversations, if the pipeline has any."""
    if held_out.is_file():
        import pyarrow.parquet as pq

        for messages in pq.read_table(held_out, columns=["messages"]).column("messages").to_pylist():
            if messages[0]["role"] == "user" and len(messages[0]["content"]) <= EXAMPLE_CHARS:
                return messages[0]["content"]
    return "Hello"


def curl_line(url: str, model: str, message: str, api_key_file: str | None) -> str:
    """A command that asks the endpoint something; its shell reads the API key from the file, if there is one."""
    file = key_file(api_key_file)
    key = f' -H "Authorization: Bearer $(head -n1 {shlex.quote(file)})"' if file else ""
    body = {"model": model, "messages": [{"role": "user", "content": message}], "max_tokens": 64, "stream": True}
    content = shlex.quote(json.dumps({**body, "temperature": 0}))
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {content}"


if __name__ == "__main__":
    from pipelines.stage import main

    main(run, "deploy")
