"""`pipelines.deploy` against a dashboard that is a script, and once against a real head: ports, other applications,
waiting, refusals, an endpoint that outlives its driver."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
import yaml
from models import ROOT, save_random_checkpoint

from lilicorr.config import DeployConfig, EngineConfig, PipelineConfig, RunConfig, TargetConfig, YarnConfig, from_dict
from lilicorr.provenance import write_json
from lilicorr.tiny import tiny_target_folder
from pipelines import deploy, full, local
from pipelines.deploy import Dashboard, run
from pipelines.train import Job, set_aside
from ray_variables import RAY_VARIABLES
from serve_app.args import AppArgs
from serve_app.guard import read_keys

TOKEN = "secret"
OTHER = {"name": "other", "route_prefix": "/other", "import_path": "other:app"}


class FakeCluster:
    """A dashboard's Serve API and the endpoint it would start, on two ports."""

    def __init__(self) -> None:
        self.http_options: dict[str, Any] | None = None
        self.applications: dict[str, Any] = {}
        self.statuses = ["DEPLOYING", "RUNNING"]  # what the application reports, poll by poll
        self.requests: list[str] = []
        self.server = self._listen(0, self._dashboard())
        self.endpoint: ThreadingHTTPServer | None = None
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        for server in filter(None, (self.server, self.endpoint)):
            server.shutdown()
            server.server_close()

    @staticmethod
    def _listen(port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def _dashboard(cluster) -> type[BaseHTTPRequestHandler]:
        class Handler(_Handler):
            def answer(self, method: str, body: bytes) -> tuple[int, Any]:
                cluster.requests.append(method)
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return 401, "Unauthorized"
                if method == "PUT":
                    cluster.put(json.loads(body))
                elif method == "DELETE":
                    cluster.http_options, cluster.applications = None, {}
                elif deploy.APP in cluster.applications and len(cluster.statuses) > 1:
                    cluster.applications[deploy.APP]["status"] = cluster.statuses.pop(0)
                elif deploy.APP in cluster.applications:
                    cluster.applications[deploy.APP]["status"] = cluster.statuses[0]
                return 200, {"http_options": cluster.http_options, "applications": cluster.applications}

        return Handler

    def put(cluster, config: dict[str, Any]) -> None:
        if cluster.http_options is None:
            cluster.http_options = config["http_options"]
        cluster.applications = {app["name"]: {"deployed_app_config": app, **app} for app in config["applications"]}
        if cluster.endpoint is None:

            class Handler(_Handler):
                def answer(self, method: str, body: bytes) -> tuple[int, Any]:
                    args = cluster.applications[deploy.APP]["args"]
                    keys = read_keys(args["api_key_file"])
                    if keys and self.path != "/health" and self.headers.get("Authorization") != f"Bearer {keys[0]}":
                        return 401, "Unauthorized"
                    return 200, {"data": [{"fingerprint": args["version"]}]}

            cluster.endpoint = cluster._listen(config["http_options"]["port"], Handler)


class _Handler(BaseHTTPRequestHandler):
    def answer(self, method: str, body: bytes) -> tuple[int, Any]:
        raise NotImplementedError

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, data = self.answer(self.command, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    do_GET = do_PUT = do_DELETE = _do

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    cluster = FakeCluster()
    monkeypatch.setenv("RAY_ADDRESS", cluster.url)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr("serve_app.dashboard.POLL_S", 0.01)
    yield cluster
    cluster.close()


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    """A run directory with a trained run."""
    config = PipelineConfig(
        profile="p",
        run_dir=str(tmp_path),
        target=TargetConfig("embedded"),
        deploy=DeployConfig(model_name="m", port=local.free_port(set()), gpus_per_replica=0.0),
    )
    final = config.directory / "train" / "lilicorr" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    return config


def test_the_profiles_yarn_reaches_the_replica_and_is_a_new_version(config: PipelineConfig, tmp_path: Path) -> None:
    final = config.directory / "train" / "lilicorr" / "final"
    plain = deploy.build_application(config, final, tmp_path)["args"]
    yarn = YarnConfig(factor=4.0, original_max_position_embeddings=128)
    stretched = replace(config, deploy=replace(config.deploy, yarn=yarn))
    args = deploy.build_application(stretched, final, tmp_path)["args"]
    assert plain["yarn"] is None and from_dict(YarnConfig, args["yarn"]) == yarn
    assert plain["version"] != args["version"]


def test_what_a_profile_says_of_the_endpoint_reaches_the_replica(
    config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = config.directory / "train" / "lilicorr" / "final"
    (tmp_path / "admin.key").write_text("0123456789abcdef")
    monkeypatch.chdir(tmp_path)
    values = {"engine": {"max_running": 4, "verify_costs": [[1, 2, 3.0]]}, "max_queue": 3, "max_ongoing_requests": 9}
    said = from_dict(DeployConfig, values | {"api_key_file": "admin.key", "admin_key_file": "admin.key"})
    args = AppArgs(**deploy.build_application(replace(config, deploy=said), final, tmp_path)["args"])
    assert args.engine_config == EngineConfig(max_running=4, verify_costs=((1.0, 2.0, 3.0),))
    assert (args.max_queue, args.max_ongoing_requests, args.max_requests) == (3, 9, 7)
    assert args.api_key_file == args.admin_key_file == str(tmp_path / "admin.key")
    assert deploy.build_application(config, final, tmp_path)["args"]["engine"] == {}
    for wrong, message in (
        ({"admin_key_file": "no.key"}, "no.key"),
        ({"engine": {"max_model_len": 8}}, "max_model_len"),
    ):
        with pytest.raises(ValueError, match=message):
            deploy.build_application(replace(config, deploy=from_dict(DeployConfig, wrong)), final, tmp_path)


@pytest.mark.parametrize(
    "host, url",
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::1", "http://[::1]:1"),
     ("::", "http://[::1]:1"), ("node", "http://node:1")],
)  # fmt: skip
def test_the_address_of_the_endpoint(host: str, url: str) -> None:
    assert deploy.url_of(host, 1) == url


def endpoint_of(config: PipelineConfig) -> dict[str, Any]:
    return json.loads((config.directory / "deploy" / "endpoint.json").read_text())


def test_deploys_and_writes_the_endpoint(cluster: FakeCluster, config: PipelineConfig) -> None:
    result = run(config)
    endpoint = endpoint_of(config)
    assert result == {"url": endpoint["url"], "model": "m", "version": endpoint["version"]}
    assert endpoint["url"] == f"http://127.0.0.1:{config.deploy.port}"
    assert cluster.http_options == {"host": "127.0.0.1", "port": config.deploy.port}
    application = cluster.applications[deploy.APP]["deployed_app_config"]
    assert application["import_path"] == "serve_app.app:build_app"
    served = Path(application["args"]["checkpoint"])
    assert served.parent == config.directory / "deploy" / ".checkpoint" and endpoint["checkpoint"] == str(served)
    assert (served / "config.json").samefile(config.directory / "train" / "lilicorr" / "final" / "config.json")
    code = Path(application["runtime_env"]["working_dir"].removeprefix("local://"))
    assert (code / "serve_app" / "app.py").is_file() and (code / "lilicorr" / "decode.py").is_file()
    assert not list(code.rglob("__pycache__"))
    command = shlex.split(endpoint["curl"])
    assert json.loads(command[-1])["model"] == "m" and f"{endpoint['url']}/v1/chat/completions" in command


def test_an_endpoint_with_keys_is_asked_with_the_first_of_them(
    cluster: FakeCluster, config: PipelineConfig, tmp_path: Path
) -> None:
    file = tmp_path / "a key's file"
    file.write_text("sk-first\nsk-second\n")
    keyed = replace(config, deploy=replace(config.deploy, api_key_file=str(file)))
    run(keyed)
    assert full.endpoint_problem(keyed) is None
    assert "401" in (full.endpoint_problem(config) or "")
    curl = endpoint_of(keyed)["curl"]
    assert "sk-" not in curl
    shown = subprocess.run(["sh", "-c", f"printf '%s\\n' {curl}"], capture_output=True, text=True, check=True)
    assert "Authorization: Bearer sk-first" in shown.stdout.splitlines()


def test_again_is_the_same_and_new_weights_are_not(cluster: FakeCluster, config: PipelineConfig) -> None:
    first = run(config)
    deployed = cluster.applications[deploy.APP]["deployed_app_config"]
    assert run(config) == first
    assert cluster.applications[deploy.APP]["deployed_app_config"] == deployed
    (config.directory / "train" / "lilicorr" / "final" / "model.safetensors").write_bytes(b"new")
    assert run(config)["version"] != first["version"]
    assert "DELETE" not in cluster.requests


def test_what_is_served_stays_when_its_run_is_trained_again(cluster: FakeCluster, config: PipelineConfig) -> None:
    """Training moves the former outputs away and writes others; the last two that were deployed are kept."""
    folder = config.directory / "train" / "lilicorr"
    trained = replace(config, train=replace(config.train, runs={"lilicorr": RunConfig(steps=1)}))
    served = []
    for weights in ("one", "two", "three"):
        write_json(folder / "run.json", {"identity": weights})
        (folder / "final").mkdir(exist_ok=True)
        (folder / "final" / "config.json").write_text(weights)
        run(trained)
        served.append(Path(endpoint_of(trained)["checkpoint"]))
        set_aside(Job(trained, "lilicorr", f"after {weights}"))
        assert not (folder / "final").exists() and (served[-1] / "config.json").read_text() == weights
    assert [path.is_dir() for path in served] == [False, True, True]


def test_a_copy_where_links_are_refused(
    cluster: FakeCluster, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = config.directory / "train" / "lilicorr" / "final" / "config.json"
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))
    run(config)
    copy = Path(endpoint_of(config)["checkpoint"]) / "config.json"
    assert copy.read_text() == original.read_text() and not copy.samefile(original)


def test_the_wanted_version_is_the_deployed_one_until_code_or_weights_change(
    cluster: FakeCluster, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing but the code differs in the end: what Python caches of it does not count."""
    root = tmp_path / "code"
    for package in deploy.PACKAGES:
        (root / package / "__pycache__").mkdir(parents=True)
        (root / package / "a.py").write_text("A = 1\n")
    monkeypatch.setattr(deploy, "ROOT", root)
    first = run(config)["version"]
    assert first == deploy.wanted_version(config)
    (root / "lilicorr" / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert deploy.wanted_version(config) == first
    (root / "serve_app" / "a.py").write_text("A = 2\n")
    assert deploy.wanted_version(config) != first
    assert run(config)["version"] == deploy.wanted_version(config)
    changes: list[dict[str, Any]] = [
        {"yarn": YarnConfig(4.0, 128)},
        {"engine": replace(config.deploy.engine, max_running=3)},
        {"max_queue": 7},
        {"max_model_len": 77},
        {"model_name": "other"},
    ]
    versions = {deploy.wanted_version(config)}
    for change in changes:
        changed = replace(config, deploy=replace(config.deploy, **change))
        assert run(changed)["version"] == deploy.wanted_version(changed)
        versions.add(deploy.wanted_version(changed))
    assert len(versions) == 1 + len(changes)


def test_other_applications_stay(cluster: FakeCluster, config: PipelineConfig) -> None:
    cluster.http_options = {"host": "127.0.0.1", "port": config.deploy.port}
    cluster.applications = {"other": {"deployed_app_config": OTHER, **OTHER}}
    run(config)
    assert cluster.applications["other"]["deployed_app_config"] == OTHER
    saved = yaml.safe_load((config.directory / "deploy" / "serve.yaml").read_text())
    assert [application["name"] for application in saved["applications"]] == ["other", deploy.APP]


def test_route_of_another_application_is_not_taken(cluster: FakeCluster, config: PipelineConfig) -> None:
    cluster.http_options = {"host": "127.0.0.1", "port": config.deploy.port}
    cluster.applications = {"other": {"deployed_app_config": OTHER, **OTHER, "route_prefix": "/"}}
    with pytest.raises(ValueError, match="'other'.*route /"):
        run(config)


def test_serve_moves_only_if_nobody_else_uses_it(cluster: FakeCluster, config: PipelineConfig) -> None:
    cluster.http_options = {"host": "127.0.0.1", "port": 1}
    cluster.applications = {"other": {"deployed_app_config": OTHER, **OTHER}}
    with pytest.raises(ValueError, match="127.0.0.1:1 for other"):
        run(config)
    assert "DELETE" not in cluster.requests
    cluster.applications = {}
    run(config)
    assert "DELETE" in cluster.requests
    assert cluster.http_options["port"] == config.deploy.port


def test_taken_port_is_refused(cluster: FakeCluster, config: PipelineConfig) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", config.deploy.port))
        other.listen()
        with pytest.raises(ValueError, match=rf"127.0.0.1:{config.deploy.port}.*another program.*--set deploy.port"):
            run(config)
    assert "PUT" not in cluster.requests


def test_failed_application_is_an_error_with_its_reason(cluster: FakeCluster, config: PipelineConfig) -> None:
    cluster.statuses = ["DEPLOYING", "DEPLOY_FAILED"]
    original = cluster.put

    def put(sent: dict[str, Any]) -> None:
        original(sent)
        cluster.applications[deploy.APP]["deployments"] = {"Endpoint": {"message": "no checkpoint there"}}

    cluster.put = put
    with pytest.raises(RuntimeError, match="no checkpoint there"):
        run(config)
    assert not (config.directory / "deploy" / "endpoint.json").exists()


def test_untrained_run_is_refused(config: PipelineConfig) -> None:
    (config.directory / "train" / "lilicorr" / "final" / "config.json").unlink()
    with pytest.raises(ValueError, match="'lilicorr' is not trained"):
        run(config)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_refused_token_says_what_to_set(cluster: FakeCluster, token: str | None) -> None:
    with pytest.raises(RuntimeError, match="401.*RAY_AUTH_TOKEN"):
        Dashboard(cluster.url, token).details()


def test_token_is_found_where_ray_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert deploy.cluster_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert deploy.cluster_token() == "home"
    (tmp_path / "token").write_text("path")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert deploy.cluster_token() == "path"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "value")
    assert deploy.cluster_token() == "value"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert deploy.cluster_token() is None


def deploy_in_a_process(config: PipelineConfig, **extra: str) -> None:
    """`run(config)` in a driver that has ended when this returns; `extra` variables are set there."""
    code = f"from lilicorr.config import *\nfrom pipelines.deploy import run\nrun({config!r})"
    variables = {**os.environ, **RAY_VARIABLES, "PYTHONPATH": str(ROOT)}
    variables.pop("RAY_ADDRESS", None)
    variables |= extra
    subprocess.run([sys.executable, "-c", code], env=variables, check=True, timeout=450)


def ask(config: PipelineConfig) -> tuple[str, str]:
    """The version that answers and its answer, by way of endpoint.json."""
    endpoint = endpoint_of(config)
    body = {"model": endpoint["model"], "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    answer = httpx2.post(f"{endpoint['url']}/v1/chat/completions", json={**body, "max_tokens": 8}, timeout=60).json()
    return answer["system_fingerprint"], answer["choices"][0]["message"]["content"]


@pytest.mark.ray
def test_endpoint_outlives_its_driver_and_follows_the_checkpoint(config: PipelineConfig) -> None:
    target = tiny_target_folder(Path(config.run_dir) / "target")
    final = config.directory / "train" / "lilicorr" / "final"
    save_random_checkpoint(final, target, seed=0)
    config = replace(config, target=TargetConfig(str(target)))
    try:
        deploy_in_a_process(config)
        first, text = ask(config)
        assert first == endpoint_of(config)["version"]
        save_random_checkpoint(final, target, seed=1)
        head_folder = Path(config.run_dir) / ".ray"
        head = json.loads((head_folder / "head.json").read_text())
        deploy_in_a_process(config, RAY_ADDRESS=head["address"], **local.environment(head_folder))
        second, same_text = ask(config)
        assert second == endpoint_of(config)["version"] != first
        assert same_text == text  # greedy: another draft model changes the speed, not the answer
    finally:
        local.stop(Path(config.run_dir) / ".ray")
