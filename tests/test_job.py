"""The demo's job: paths in full, the run directory left out of the upload, a command line that a shell keeps, and how
it is followed: after a broken connection, and by a later command."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import sys
import types
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipelines import full, job, local
from pipelines.lock import Lock
from pipelines.stage import LOCK, resolve_config

OTHER = "a 'b' $HOME; `c`"


def test_relative_paths_are_made_absolute_and_others_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "target: {source: ./model}\nprompts: {source: x.jsonl}\n"
        "train: {runs: {a: {start_from: ./start, steps: 1}, b: {start_from: a, steps: 1}}}\n"
        "evaluate: {sets: [held_out, math500=sub/m.jsonl, mbpp=/data/m.jsonl]}\n"
        "deploy: {api_key_file: api.key, admin_key_file: /keys/admin.key}\n"
    )
    arguments = ["--profile", "mine.yaml", "--set", "prompts.data_dir=it's here"]
    options = job.absolute_paths(arguments)
    monkeypatch.chdir("/")
    config = resolve_config(full.parse([*arguments, *options])[0])
    assert config.target.source == f"{tmp_path}/model"
    assert (config.prompts.source, config.prompts.data_dir) == (f"{tmp_path}/x.jsonl", f"{tmp_path}/it's here")
    assert {name: run.start_from for name, run in config.train.runs.items()} == {"a": f"{tmp_path}/start", "b": "a"}
    assert config.evaluate.sets == ("held_out", f"math500={tmp_path}/sub/m.jsonl", "mbpp=/data/m.jsonl")
    assert (config.deploy.api_key_file, config.deploy.admin_key_file) == (f"{tmp_path}/api.key", "/keys/admin.key")
    assert job.absolute_paths([*arguments, *options]) == options[:2]
    assert job.absolute_paths(["--profile", "tiny"]) == []


def test_a_run_directory_in_the_checkout_is_not_uploaded(tmp_path: Path) -> None:
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    assert job.excluded_run_directory(tmp_path) == []
    for name in ("out", "deep/er out", "a[b]*!"):
        excluded = packaging._get_excludes(job.ROOT, job.excluded_run_directory(job.ROOT / name))
        assert excluded(job.ROOT / name / ".ray" / "token") and excluded(job.ROOT / name / "demo" / "x")
        assert not excluded(job.ROOT / "lilicorr" / Path(name).name / "x")
    for above in (job.ROOT, job.ROOT.parent):
        with pytest.raises(ValueError, match="outputs cannot go to .*, it holds the code"):
            job.excluded_run_directory(above)


def client_of(*jobs: tuple[str | None, str, str]) -> Mock:
    """Ray's job client of a head with these jobs: name, entrypoint, status; a driver by hand is one without a name."""
    client = Mock()
    client.list_jobs.return_value = [
        types.SimpleNamespace(
            submission_id=name,
            entrypoint=entrypoint,
            status=types.SimpleNamespace(is_terminal=lambda status=status: status not in ("PENDING", "RUNNING")),
        )
        for name, entrypoint, status in jobs
    ]
    return client


def without_ray(monkeypatch: pytest.MonkeyPatch, client: Any, serve_port: int = local.SERVE_PORT) -> None:
    """A head that runs, whose job client is `client`."""
    head = {"address": "127.0.0.1:1", "dashboard": "http://127.0.0.1:2", "serve_port": serve_port}
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    module = types.SimpleNamespace(JobSubmissionClient=lambda dashboard: client)
    monkeypatch.setitem(sys.modules, "ray.job_submission", module)
    monkeypatch.setattr(local, "start", lambda _: head)
    monkeypatch.setattr(local, "environment", lambda _: {})


def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that are followed from now on; all of them succeed at once."""
    jobs: list[str] = []

    async def follow(folder: Path, dashboard: str, name: str) -> str:
        jobs.append(name)
        return "SUCCEEDED"

    monkeypatch.setattr(job, "follow", follow)
    return jobs


def test_the_job_gets_the_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of()
    monkeypatch.setattr(local, "one_starter", lambda folder: contextlib.nullcontext())  # would make the folder
    without_ray(monkeypatch, client, serve_port=20_001)
    followed(monkeypatch)
    monkeypatch.setenv("LILICORR_CACHE", "~/mine")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's, for another cluster")
    arguments = ["--profile", "tiny", "--set", f"deploy.model_name={OTHER}", "--run-dir", str(job.ROOT / "out")]
    assert job.demo(job.ROOT / "out" / ".ray", arguments) == 0
    assert "RAY_AUTH_TOKEN" not in os.environ
    given = client.submit_job.call_args.kwargs
    words = shlex.split(given["entrypoint"])
    assert words[1:] == ["pipelines/full.py", "--set", "deploy.port=20001", *arguments]
    config = resolve_config(full.parse(words[2:])[0])
    assert (config.deploy.model_name, config.deploy.port) == (OTHER, 20_001)
    assert given["runtime_env"]["env_vars"]["LILICORR_CACHE"] == str(Path.home() / "mine")
    assert "/out" in given["runtime_env"]["excludes"] and given["runtime_env"]["working_dir"] == str(job.ROOT)
    assert not (job.ROOT / "out").exists()


def test_the_job_of_an_earlier_command_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C or with the terminal it was started from, only the command is gone."""
    options = ["--profile", "tiny", "--run-dir", str(tmp_path)]
    entrypoint = shlex.join([sys.executable, "pipelines/full.py", *options])
    client = client_of(("lilicorr-1", entrypoint, "RUNNING"))
    without_ray(monkeypatch, client)
    jobs = followed(monkeypatch)
    monkeypatch.setenv("LILICORR_JOB", "lilicorr-1")
    with Lock(tmp_path / "tiny" / LOCK):
        assert job.demo(tmp_path / ".ray", options) == 0
        assert jobs == ["lilicorr-1"] and not client.submit_job.called
        assert "job lilicorr-1 of an earlier command goes on and is followed" in capsys.readouterr().out
        with pytest.raises(ValueError, match="job lilicorr-1 is at work with other options: .*full.py --profile tiny"):
            job.demo(tmp_path / ".ray", [*options, "--set", "train.seed=1"])
        assert job.demo(tmp_path / ".ray", [*options, "--dry-run"]) == 0 and client.submit_job.call_count == 1

    # Submitted a moment ago, its driver has yet to take the run directory.
    client = client_of(
        (None, entrypoint, "RUNNING"), ("old", entrypoint, "FAILED"), ("lilicorr-2", entrypoint, "PENDING")
    )
    without_ray(monkeypatch, client)
    assert job.demo(tmp_path / ".ray", options) == 0 and jobs[-1] == "lilicorr-2" and not client.submit_job.called
    assert job.demo(tmp_path / ".ray", [*options, "--ablations"]) == 0 and client.submit_job.call_count == 1


def test_two_commands_at_once_submit_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is a job to follow is asked, and a job submitted, by one command at a time."""
    client, folder = client_of(), tmp_path / ".ray"
    without_ray(monkeypatch, client)
    followed(monkeypatch)

    def another_command_waits(*_: Any, **__: Any) -> Any:
        with open(folder / "start.lock", "w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return []

    client.list_jobs.side_effect = client.submit_job.side_effect = another_command_waits
    assert job.demo(folder, ["--profile", "tiny", "--run-dir", str(tmp_path)]) == 0
    assert client.list_jobs.called and client.submit_job.called


def test_the_driver_of_a_killed_head_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the run directory until it finds that its head is gone; a new head knows nothing of it."""
    monkeypatch.setenv("LILICORR_JOB", "lilicorr-1")
    with Lock(tmp_path / "tiny" / LOCK):
        for jobs in ([], [("lilicorr-1", "of the head before", "FAILED")]):
            client = client_of(*jobs)
            without_ray(monkeypatch, client)
            with pytest.raises(ValueError, match="in use by process .* job lilicorr-1, which is none of this head's"):
                job.demo(tmp_path / ".ray", ["--profile", "tiny", "--run-dir", str(tmp_path)])
            assert not client.submit_job.called


class ScriptedClient:
    """Ray's job client; its connections and statuses come one after the other, and an error among them is raised."""

    def __init__(self, connections: list[list[str | Exception]], statuses: list[str | Exception]) -> None:
        self.connections, self.statuses = iter(connections), iter(statuses)

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        for text in next(self.connections):
            if isinstance(text, Exception):
                raise text
            yield text

    def get_job_status(self, name: str) -> Any:
        status = next(self.statuses)
        if isinstance(status, Exception):
            raise status
        return types.SimpleNamespace(value=status, is_terminal=lambda: status != "RUNNING")


def test_a_broken_connection_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    aiohttp, requests = pytest.importorskip("aiohttp"), pytest.importorskip("requests")
    monkeypatch.setattr(job, "FOLLOW_POLL_S", 0.0)
    refused = requests.exceptions.ConnectionError("refused")

    def follow(first: Exception | None, statuses: list[str | Exception], head: dict[str, Any] | None) -> list[str]:
        """The lines printed where the first connection ends with an error or without one."""
        connections: list[list[str | Exception]] = [["one\n"], ["one\n", "two\n"]]
        connections[0] += [] if first is None else [first]
        without_ray(monkeypatch, ScriptedClient(connections, statuses))
        monkeypatch.setattr(local, "living_head", lambda _: head)
        assert asyncio.run(job.follow(tmp_path, "http://127.0.0.1:2", "lilicorr-1")) == "SUCCEEDED"
        return [line for line in capsys.readouterr().out.splitlines() if line in ("one", "two")]

    closed = RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
    for error in (closed, aiohttp.ClientConnectionError("reset"), TimeoutError("no answer")):
        assert follow(error, ["RUNNING", "SUCCEEDED"], None) == ["one", "two"]
    assert follow(closed, ["SUCCEEDED", "SUCCEEDED"], None) == ["one", "two"]  # it ended meanwhile
    assert follow(None, [refused, "SUCCEEDED"], {"dashboard": "answers again"}) == ["one", "two"]
    with pytest.raises(RuntimeError, match="the Ray head of .* has ended, and the job lilicorr-1 with it"):
        follow(closed, [refused], None)
    with pytest.raises(KeyError):
        follow(KeyError("a fault"), [], None)


def test_what_is_uploaded_is_the_code_and_the_embedded_target(tmp_path: Path) -> None:
    """Ray takes 512 MiB at most, and every node fetches it: environments, outputs and history stay here."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    packaging.create_package(str(job.ROOT), tmp_path / "code.zip", include_gitignore=True, excludes=list(job.EXCLUDED))
    with zipfile.ZipFile(tmp_path / "code.zip") as archive:
        sizes = {info.filename: info.compress_size for info in archive.infolist()}
    assert not [name for name in sizes if name.split("/")[0] in {".venv", "runs", ".git"} or "__pycache__" in name]
    weights = sizes.pop("lilicorr/embedded/model.safetensors")
    assert sizes["pipelines/full.py"] > 0 and sum(sizes.values()) < 5e6 and weights < 10e6
