"""`serve_app.scale`: the right way for what is deployed, waiting, errors that say what to do; the two config files."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml
from models import ROOT
from operated import FakeServe, application

from serve_app import scale
from serve_app.args import AppArgs
from serve_app.autoscaling import EnginePolicy
from serve_app.dashboard import Dashboard
from serve_app.scale import scaling_of, set_replicas, wait_until_scaled

CONFIGS = {
    name: yaml.safe_load((ROOT / "serve_app" / name).read_text()) for name in ("config.yaml", "config.manual.yaml")
}
TOKEN = "secret"


def fixed() -> dict[str, Any]:
    """As `pipelines/deploy.py` deploys."""
    return {"name": "lilicorr", "import_path": "serve_app.app:build_app", "args": {"num_replicas": 1}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.dashboard.POLL_S", 0.01)


def test_an_autoscaled_endpoint_is_held_at_the_number_and_keeps_the_rest() -> None:
    serve = FakeServe()
    before = set_replicas(serve, 3, 3)
    assert (before.kind, before.minimum, before.maximum, before.running) == ("autoscaled", 1, 4, 1)
    (config,) = serve.deployed
    ours, other = config["applications"]
    (endpoint,) = ours["deployments"]
    bounds = {"min_replicas": 3, "max_replicas": 3, "initial_replicas": 3}
    assert endpoint == {"name": "Endpoint", "autoscaling_config": {"upscale_delay_s": 7.0, **bounds}}
    assert other == serve.other and config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert wait_until_scaled(serve, 3, 3, 5).running == 3
    assert not serve.scaled


def test_bounds_give_it_back_to_the_autoscaler() -> None:
    serve = FakeServe()
    set_replicas(serve, 3, 3)
    set_replicas(serve, 1, 2)
    (endpoint,) = serve.deployed[-1]["applications"][0]["deployments"]
    scaling = endpoint["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["initial_replicas"]) == (1, 2, 2)


def test_an_externally_scaled_endpoint_gets_a_request() -> None:
    serve = FakeServe({**fixed(), "external_scaler_enabled": True})
    assert set_replicas(serve, 2, 2).kind == "external"
    assert serve.scaled == [("lilicorr", "Endpoint", 2)] and not serve.deployed
    assert wait_until_scaled(serve, 2, 2, 5).running == 2


def test_a_fixed_number_is_another_fixed_number() -> None:
    serve = FakeServe(fixed())
    assert set_replicas(serve, 2, 2).kind == "fixed"
    assert serve.config == {**fixed(), "deployments": [{"name": "Endpoint", "num_replicas": 2}]}
    assert wait_until_scaled(serve, 2, 2, 5).running == 2


@pytest.mark.parametrize("kind", ["fixed", "external"])
def test_only_an_autoscaler_takes_bounds(kind: str) -> None:
    serve = FakeServe({**fixed(), "external_scaler_enabled": kind == "external"})
    with pytest.raises(ValueError, match=rf"no autoscaler \({kind}\).*config.yaml"):
        set_replicas(serve, 1, 2)
    assert not serve.deployed and not serve.scaled


@pytest.mark.parametrize("bounds", [(0, 0), (-1, 2), (3, 2)])
def test_bounds_out_of_order_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"got {bounds[0]}\.\.{bounds[1]}"):
        set_replicas(FakeServe(), *bounds)


def test_what_is_not_there_is_named() -> None:
    details = FakeServe().details()
    with pytest.raises(ValueError, match="no application 'x'; it runs: lilicorr, other"):
        scaling_of(details, "x")
    with pytest.raises(ValueError, match="no deployment 'x'; it has: Endpoint"):
        scaling_of(details, "lilicorr", "x")
    with pytest.raises(ValueError, match="it runs: none"):
        scaling_of({"applications": {}})
    with pytest.raises(ValueError, match="not deployed from a config"):
        set_replicas(FakeServe(config={}), 2, 2)


def test_waiting_ends_with_the_time_or_with_a_failure() -> None:
    serve = FakeServe()
    serve.message = "no node has a GPU"
    with pytest.raises(RuntimeError, match="not there after 0 s: RUNNING, 1 wanted, replicas: 1 RUNNING; no node has"):
        wait_until_scaled(serve, 2, 2, 0.05)
    serve.status = "DEPLOY_FAILED"
    with pytest.raises(RuntimeError, match="failed: DEPLOY_FAILED.*no node has a GPU"):
        wait_until_scaled(serve, 2, 2, 5)


def test_a_dashboard_that_is_busy_is_asked_again() -> None:
    serve, answers = FakeServe(), FakeServe.details
    asked: list[int] = []

    def busy() -> dict[str, Any]:
        asked.append(1)
        if len(asked) < 3:
            raise RuntimeError("the Ray dashboard does not answer")
        return answers(serve)

    serve.details = busy
    assert wait_until_scaled(serve, 1, 1, 5).running == 1
    asked.clear()
    with pytest.raises(RuntimeError, match="not there after 0 s: the Ray dashboard does not answer"):
        wait_until_scaled(serve, 1, 1, 0)


@pytest.fixture
def dashboard() -> Iterator[tuple[FakeServe, str]]:
    """A Serve behind the dashboard's REST API, and its URL."""
    serve = FakeServe()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = 200, b""
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, answer = 401, b"Unauthorized"
            elif self.command == "GET":
                answer = json.dumps(serve.details()).encode()
            elif self.command == "PUT":
                serve.deploy(json.loads(body))
            else:
                _, _, _, _, app, _, deployment, _ = self.path.split("/")
                serve.scale(app, deployment, json.loads(body)["target_num_replicas"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_POST = _do

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield serve, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_command_scales_and_waits(dashboard: tuple[FakeServe, str], monkeypatch: pytest.MonkeyPatch) -> None:
    serve, url = dashboard
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", url)
    assert scale.main(["3"]) == 0 and serve.running == 3
    assert scale.main(["1..2"]) == 0 and serve.running == 2
    serve.config = {**fixed(), "external_scaler_enabled": True}
    assert scale.main(["1", "--address", url]) == 0 and serve.scaled == [("lilicorr", "Endpoint", 1)]


def test_an_application_that_is_being_built_is_waited_for(
    dashboard: tuple[FakeServe, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Right after `serve deploy`, and where it is deployed again while the command waits."""
    serve, url = dashboard
    monkeypatch.setattr("serve_app.dashboard.POLL_S", 0.01)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    serve.num_building = 3
    assert scale.main(["2", "--address", url]) == 0
    assert serve.num_building == 0 and serve.running == 2 and len(serve.deployed) == 1
    serve.num_building = 3
    assert wait_until_scaled(serve, 2, 2, 5).running == 2 and serve.num_building == 0
    serve.num_building = 1000
    assert scale.main(["2", "--address", url, "--timeout", "0"]) == 1
    assert "no deployment 'Endpoint'; it has: none; it is DEPLOYING" in capsys.readouterr().err
    assert len(serve.deployed) == 1


def test_a_dashboard_that_ends_in_the_middle_of_its_answer_is_one_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RuntimeError, match="does not answer: IncompleteRead"):
            Dashboard(f"http://127.0.0.1:{server.getsockname()[1]}", None).details()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0"], "at least 1"),
        (["2", "--app", "x"], "no application 'x'"),
        (["2", "--address", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_the_command_says_what_is_wrong(
    dashboard: tuple[FakeServe, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", dashboard[1])
    assert scale.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_refused_token_says_what_to_set(
    dashboard: tuple[FakeServe, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    assert scale.main(["2", "--address", dashboard[1]]) == 1
    assert "RAY_AUTH_TOKEN_PATH" in capsys.readouterr().err


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_file_is_what_serve_and_the_application_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    from serve_app.app import RETRY_AFTER_S, build_app

    (ours,) = CONFIGS[name]["applications"]
    ServeDeploySchema.model_validate(CONFIGS[name])
    args = AppArgs.model_validate(ours["args"])
    (endpoint,) = ours["deployments"]
    # what Serve lets through and what the replica expects are set in two places
    assert endpoint["max_ongoing_requests"] == args.max_ongoing_requests > args.max_requests
    assert endpoint["max_queued_requests"] == args.max_queued_requests > 0  # while no replica runs
    assert endpoint["backpressure_config"] == {"status_code": 503, "retry_after_s": RETRY_AFTER_S}
    assert endpoint["graceful_shutdown_timeout_s"] >= 300  # a long answer is finished, not cut
    assert "request_timeout_s" not in CONFIGS[name]["http_options"]  # it would end long streams
    monkeypatch.setattr("serve_app.app.check_weights", lambda args: None)  # its checkpoint is an example
    deployed = build_app(args)._bound_deployment  # and where no config file says anything, the same holds
    assert deployed.name == endpoint["name"] == scale.DEPLOYMENT
    assert deployed.max_queued_requests == endpoint["max_queued_requests"]
    assert deployed._deployment_config.backpressure_config.model_dump() == endpoint["backpressure_config"]


def test_the_two_config_files_differ_in_scaling_alone() -> None:
    (automatic,), (manual,) = (CONFIGS[name]["applications"] for name in CONFIGS)
    assert automatic["args"] == manual["args"]
    assert manual["external_scaler_enabled"] and "external_scaler_enabled" not in automatic
    (ours,), (other,) = automatic["deployments"], manual["deployments"]
    scaling, policy = ours["autoscaling_config"], automatic["autoscaling_policy"]
    assert not ours.keys() & {"num_replicas"} and "autoscaling_config" not in other
    assert "policy" not in scaling  # Serve would import it in the dashboard
    assert policy["policy_function"] == f"{EnginePolicy.__module__}:{EnginePolicy.__name__}"
    EnginePolicy(**policy["policy_kwargs"])
    assert 1 == scaling["min_replicas"] < scaling["max_replicas"]


def test_serve_refuses_both_ways_in_one_file() -> None:
    from ray.serve.schema import ServeApplicationSchema

    with pytest.raises(ValueError, match="external_scaler_enabled"):
        ServeApplicationSchema.model_validate(application(external_scaler_enabled=True))
