"""The driver with fake stages: order, ranges, force, and a SIGKILL inside every stage."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fake_stages import NAMES, NUM_STEPS, STAGES, made
from lilicorr import evaluate
from lilicorr.config import DeployConfig, PipelineConfig
from lilicorr.provenance import write_json
from pipelines import deploy, full
from pipelines.stage import MARKER, find, print_status, read_marker, resolve_config, select
from pipelines.stage import drive as drive_stages
from serve_app import dashboard
from test_tables import make_results

SCRIPT = Path(__file__).with_name("fake_stages.py")
ALL_STEPS = [f"{name}:{step}" for name in NAMES for step in range(NUM_STEPS)]


def drive(run_dir: Path, *options: str, kill_at: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the driver in a process of its own."""
    variables = {**os.environ, **({"KILL_AT": kill_at} if kill_at else {})}
    command = [sys.executable, str(SCRIPT), "--profile", "tiny", "--run-dir", str(run_dir), *options]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)


def contents(run_dir: Path) -> dict[str, str]:
    """What every stage has made, by content."""
    config = PipelineConfig(profile="tiny", run_dir=str(run_dir))
    markers = {name: read_marker(config, name) for name in NAMES}
    return {name: marker["content"] for name, marker in markers.items() if marker is not None}


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a driver that was left alone."""
    run_dir = tmp_path_factory.mktemp("unkilled")
    done = drive(run_dir)
    assert done.returncode == 0, done.stderr
    assert made(run_dir / "tiny") == ALL_STEPS
    assert "resolved config of profile tiny:" in done.stdout and "[5/5] deploy: finished in" in done.stdout
    return run_dir


def test_a_second_run_skips_everything_and_says_why(unkilled: Path) -> None:
    done = drive(unkilled)
    assert done.returncode == 0, done.stderr
    assert made(unkilled / "tiny") == ALL_STEPS
    assert all(f"{name}: skipped: same hash " in done.stdout for name in NAMES)
    assert not (unkilled / "tiny" / "_lock.json").exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, NUM_STEPS], ids=["in the middle", "before the marker"])
def test_a_driver_killed_in_a_stage_goes_on_there(unkilled: Path, tmp_path: Path, name: str, step: int) -> None:
    killed = drive(tmp_path, kill_at=f"{name}:{step}")
    assert killed.returncode == -signal.SIGKILL
    assert sorted(contents(tmp_path)) == sorted(NAMES[: NAMES.index(name)])
    rerun = drive(tmp_path)
    assert rerun.returncode == 0, rerun.stderr
    assert "taking over the lock" in rerun.stdout and "its process is gone" in rerun.stdout
    assert f"{name}: runs: goes on from unfinished work" in rerun.stdout
    assert made(tmp_path / "tiny") == ALL_STEPS, "a finished step was made twice, or one is missing"
    assert contents(tmp_path) == contents(unkilled)


def test_from_until_and_force(tmp_path: Path) -> None:
    assert drive(tmp_path, "--until", "regenerate").returncode == 0
    assert sorted(contents(tmp_path)) == ["prepare", "regenerate"]
    early = drive(tmp_path, "--from", "evaluate")
    problem = f"error: evaluate needs train, not finished in {tmp_path / 'tiny'}"
    assert early.returncode == 1 and early.stderr.splitlines() == [problem]
    assert drive(tmp_path, "--from", "train", "--until", "train").returncode == 0
    assert drive(tmp_path, "--from", "train", "--until", "train", "--force", "train").returncode == 0
    assert made(tmp_path / "tiny").count("train:0") == 2
    assert len(list((tmp_path / "tiny" / "_replaced").iterdir())) == 1


def test_the_tables_lie_beside_the_results_of_any_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("prompts: {source: stdlib}\n")
    options = ["--profile", str(profile), "--run-dir", str(tmp_path / "runs"), "--until", "evaluate", "--tables"]
    monkeypatch.setattr(full, "print_results", lambda *_: None)
    monkeypatch.setattr(full, "execute", lambda *_: resolve_config(full.parse(options)[0]))
    with pytest.raises(SystemExit, match=r"results\.json is missing: run pipelines/evaluate.py first"):
        full.main(options)
    folder = tmp_path / "runs" / "mine" / "evaluate"
    write_json(folder / "results.json", make_results(humaneval={}).greedy)
    full.main(options)
    evaluate.main(["--table", "all", "--results", str(folder)])
    assert (folder / "tables.md").read_text() == capsys.readouterr().out
    with pytest.raises(SystemExit):
        full.parse([*options, "--until", "train"])
    assert "--tables is made by the stage evaluate, which is left out" in capsys.readouterr().err


def test_a_changed_config_runs_what_depends_on_it(tmp_path: Path) -> None:
    assert drive(tmp_path).returncode == 0
    changed = drive(tmp_path, "--set", "evaluate.max_new_tokens=5")
    assert changed.returncode == 0
    assert "train: skipped" in changed.stdout and "deploy: skipped" in changed.stdout
    assert "evaluate: runs: config changed: evaluate.max_new_tokens 32 -> 5" in changed.stdout


def test_dry_run_and_status_change_nothing(tmp_path: Path) -> None:
    assert drive(tmp_path, "--until", "prepare").returncode == 0
    before = sorted(tmp_path.rglob("*"))
    dry = drive(tmp_path, "--dry-run", "--force", "prepare")
    lines = [line.split() for line in dry.stdout.splitlines()]
    assert [line[0] for line in lines] == list(NAMES) and lines[0][1:] == ["runs:", "forced"]
    assert lines[1][1:] == ["runs:", "not", "done", "yet"]
    status = drive(tmp_path, "--status")
    assert "nobody at work" in status.stdout and "prepare     done in" in status.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_options_are_named(tmp_path: Path) -> None:
    unknown = drive(tmp_path, "--set", "train.batchsize=3")
    assert unknown.returncode != 0 and "unknown key train.batchsize; did you mean train.batch_size?" in unknown.stderr
    stage = drive(tmp_path, "--from", "trian")
    assert stage.returncode != 0 and "unknown stage 'trian'" in stage.stderr
    profile = drive(tmp_path, "--profile", "dmeo")
    assert profile.returncode == 1 and "; did you mean demo? (known profiles: demo, " in profile.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--status",), ("--dry-run",)])
@pytest.mark.parametrize("name", ["", "tiny"], ids=["the folder of all profiles", "the folder of this one"])
def test_a_run_directory_that_is_a_file(tmp_path: Path, options: tuple[str, ...], name: str) -> None:
    file = tmp_path / "file" / name if name else tmp_path / "file"
    file.parent.mkdir(exist_ok=True)
    file.touch()
    done = drive(tmp_path / "file", *options)
    problem = f"error: outputs go to {tmp_path / 'file' / 'tiny'}, but {file} is a file; choose another --run-dir"
    assert done.returncode == 1 and done.stderr.splitlines() == [problem]


def test_the_table_of_other_draft_models_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "STAGES", STAGES)
    monkeypatch.setattr("lilicorr.summary.print_table", lambda results: print(results["table"]))
    config = PipelineConfig(profile="p", run_dir=str(tmp_path))
    write_json(config.directory / "evaluate" / "results.json", {"table": "tau"})

    def printed(config: PipelineConfig, first: str | None = None) -> str:
        full.print_results(config, first)
        return capsys.readouterr().out

    assert printed(config) == "evaluate: to do: goes on from unfinished work\n"
    drive_stages(STAGES, config)
    assert printed(config) == "tau\n"
    changed = replace(config, train=replace(config.train, batch_size=2))
    assert printed(changed) == "evaluate: to do: unless train makes the same as before\n"
    assert printed(changed, "evaluate") == printed(changed, "deploy") == "tau\n"
    drive_stages(select(STAGES, None, "train"), changed)
    assert printed(changed) == printed(changed, "train") == "evaluate: to do: upstream changed: train\n"


def test_fake_stages_have_the_real_dependencies() -> None:
    for fake, real in zip(STAGES, full.STAGES, strict=True):
        assert (fake.name, fake.fields, fake.inputs) == (real.name, real.fields, real.inputs)


class Endpoint(BaseHTTPRequestHandler):
    """Answers /v1/models with a fingerprint, and /health."""

    fingerprint = "v1"

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/v1/models", "/health") else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m", "fingerprint": self.fingerprint}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_only_the_endpoint_that_was_deployed_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    port = server.server_port
    config = PipelineConfig(profile="p", run_dir=str(tmp_path), deploy=DeployConfig(port=port))
    weights = config.directory / "train" / config.deploy.run / "final" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"one")
    version = deploy.wanted_version(config)
    monkeypatch.setattr(Endpoint, "fingerprint", version)
    path = config.directory / "deploy" / "endpoint.json"
    path.parent.mkdir(parents=True)
    record = {"url": f"http://127.0.0.1:{port}", "version": version, "curl": "curl it", "model": "m"}
    assert full.endpoint_report(config) == "endpoint: none yet"
    path.write_text(json.dumps(record))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert full.endpoint_problem(config) is None
        full.print_results(config)
        assert capsys.readouterr().out == "curl it\n"
        assert full.endpoint_report(config) == f"endpoint: http://127.0.0.1:{port}/v1, model m: answers"
        check_ports(config, port)
        weights.write_bytes(b"two")
        assert f"weights or code changed: version {version} is served, " in (full.endpoint_problem(config) or "")
        weights.rename(weights.parent.with_name("weights"))
        weights.parent.rmdir()
        assert full.endpoint_problem(config) == "run lilicorr is not trained any more"
        weights.parent.mkdir()
        weights.write_bytes(b"one")
        for package in deploy.PACKAGES:
            (tmp_path / "code" / package).mkdir(parents=True)
        monkeypatch.setattr(deploy, "ROOT", tmp_path / "code")
        assert "weights or code changed" in (full.endpoint_problem(config) or "")
        path.write_text(json.dumps({**record, "version": "v2"}))
        assert full.endpoint_problem(config) == f"something else is served at {record['url']} now"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    problem = full.endpoint_problem(config)
    assert problem is not None and problem.startswith("the endpoint does not answer at ")
    full.print_results(config)
    assert capsys.readouterr().out == ""
    report = full.endpoint_report(config)
    assert report.startswith(f"endpoint: {record['url']}/v1, model m: does not answer at {record['url']}/health (")


def test_a_port_that_speaks_something_else_is_no_endpoint(tmp_path: Path) -> None:
    config = PipelineConfig(profile="p", run_dir=str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=speak)
        thread.start()
        write_json(config.directory / "deploy" / "endpoint.json", {"url": url, "version": "v", "model": "m"})
        problem = full.endpoint_problem(config)
        thread.join()
    assert problem is not None and problem.startswith(f"the endpoint does not answer at {url}/v1/models: BadStatusLine")


class Slow:
    """An endpoint that takes `seconds` for an answer, in place of `urlopen`."""

    def __init__(self, seconds: float, fingerprint: str) -> None:
        self.seconds, self.body = seconds, json.dumps({"data": [{"fingerprint": fingerprint}]}).encode()

    def __call__(self, request: object, timeout: float) -> io.BytesIO:
        if timeout < self.seconds:
            raise TimeoutError("timed out")
        return io.BytesIO(self.body)


def test_an_endpoint_that_answers_late_is_not_deployed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PipelineConfig(profile="p", run_dir=str(tmp_path))
    weights = config.directory / "train" / config.deploy.run / "final" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"one")
    version, url = deploy.wanted_version(config), f"http://127.0.0.1:{config.deploy.port}"
    write_json(config.directory / "deploy" / "endpoint.json", {"url": url, "version": version, "model": "m"})
    monkeypatch.setattr(urllib.request, "urlopen", Slow(20.0, version))
    assert full.endpoint_problem(config) is None
    assert "does not answer" in full.endpoint_report(config)  # which is not waited for


def test_an_endpoint_may_take_as_long_to_answer_as_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve says that it runs; on a busy machine its first answer comes ten minutes later."""
    late = iter(6 * [urllib.error.URLError("connection refused")])

    def urlopen(request: object, timeout: float) -> io.BytesIO:
        for error in late:
            raise error
        return Slow(0.0, "v")(request, timeout)

    now = itertools.count(0, 100)
    clock = types.SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None)
    monkeypatch.setattr(dashboard, "time", clock)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    deploy.wait_until_serving("http://127.0.0.1:1", "v", None)
    assert next(now) > 600


def check_ports(config: PipelineConfig, port: int) -> None:
    """A port that `make demo` chose because the usual one was in use is no change; one that the user chose is."""
    other = replace(config, deploy=DeployConfig(port=9000))
    assert full.endpoint_problem(other) == f"the endpoint listens on port {port}, deploy.port is 9000"
    usual = replace(config, deploy=DeployConfig())
    assert full.endpoint_problem(usual) == f"the endpoint listens on port {port}, deploy.port is 8000"
    head = Path(config.run_dir) / ".ray" / "head.json"
    write_json(head, {"serve_port": port})
    assert full.endpoint_problem(usual) is None
    moved = "/v1, model m (port 8000 was in use when the Ray head started): answers"
    assert full.endpoint_report(usual).endswith(moved)
    assert full.endpoint_problem(other) == f"the endpoint listens on port {port}, deploy.port is 9000"
    head.unlink()


def test_the_port_is_no_part_of_the_deployed_config_and_status_has_the_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A marker of an older version has the port, which then was part of it."""
    config = PipelineConfig(profile="p", run_dir=str(tmp_path))
    deployed = replace(find(full.STAGES, "deploy"), run=lambda _: {}, inputs=(), problem=None, check=None)
    drive_stages([deployed], config)
    marker = read_marker(config, "deploy")
    marker["config"]["deploy.port"] = 21234
    write_json(config.directory / "deploy" / MARKER, marker)
    print_status([deployed], config)
    printed = capsys.readouterr().out
    assert "deploy      done in 0.0 s: same hash" in printed and "endpoint: none yet" in printed
