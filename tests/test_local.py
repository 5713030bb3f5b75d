"""The local Ray head without Ray: ports, token, and that stopping ends what was started and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lilicorr.provenance import write_json
from pipelines import local
from pipelines.errors import explain
from pipelines.lock import process_start

# A leader that starts a child in a session of its own, and ignores SIGTERM as a hanging process would.
LEADER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep, start_new_session=apart) for apart in (False, True)]
print(*[child.pid for child in children], flush=True)
time.sleep(600)
"""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with the head."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def start_leader(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A stand-in for `ray start --block` with its record, and the ids of its children."""
    leader = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert leader.stdout is not None
    children = [int(word) for word in leader.stdout.readline().split()]
    (folder / "temporary").mkdir()
    record = {
        "temporary": str(folder / "temporary"),
        "process": local.identity(leader.pid),
        "dashboard": "http://127.0.0.1:1",
    }
    write_json(folder / "head.json", record)
    return leader, children


def gone(pid: int) -> bool:
    """Whether a process has ended; waits a little."""
    deadline = time.monotonic() + 10
    while process_start(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    return process_start(pid) is None


def test_stop_ends_the_head_and_what_it_started(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "STOP_TIMEOUT_S", 0.3)
    leader, children = start_leader(tmp_path)
    assert local.stop(tmp_path) == 3
    leader.wait()
    assert all(gone(pid) for pid in children)
    assert bystander.poll() is None
    assert not (tmp_path / "head.json").exists() and not (tmp_path / "temporary").exists()
    assert local.stop(tmp_path) == 0


def test_stop_ends_the_rest_of_a_head_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "STOP_TIMEOUT_S", 0.3)
    leader, children = start_leader(tmp_path)
    leader.kill()
    leader.wait()
    try:
        assert local.read_head(tmp_path) is None
        assert local.stop(tmp_path) == 1  # the child of its session; the other one can no longer be told
        assert gone(children[0])
    finally:
        os.kill(children[1], 9)


def test_what_ends_by_itself_while_it_is_stopped_is_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.kill

    def kill(*_: int) -> None:
        """As it is for a process that has ended since it was looked at."""
        raise ProcessLookupError

    monkeypatch.setattr(local, "STOP_TIMEOUT_S", 0.3)
    leader, children = start_leader(tmp_path)
    monkeypatch.setattr(local.os, "kill", kill)
    try:
        assert local.stop(tmp_path) == 3
        assert not (tmp_path / "head.json").exists() and not (tmp_path / "temporary").exists()
    finally:
        for pid in (leader.pid, *children):
            really(pid, signal.SIGKILL)
        leader.wait()


def test_stop_leaves_a_process_that_got_the_id_later(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    earlier = {"pid": bystander.pid, "started": process_start(bystander.pid) - 100}
    write_json(tmp_path / "head.json", {"temporary": str(tmp_path / "none"), "process": earlier})
    assert local.stop(tmp_path) == 0
    assert bystander.poll() is None


def test_a_living_head_that_does_not_answer_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be coming up, or the machine may be busy: another start waits, and ends with an error."""
    monkeypatch.setattr(local, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(local, "ANSWER_POLL_S", 0.05)
    local.environment(tmp_path)
    leader, children = start_leader(tmp_path)
    try:
        with pytest.raises(RuntimeError, match=f"is alive .process {leader.pid}., but http://127.0.0.1:1 has not answ"):
            local.start(tmp_path)
        assert leader.poll() is None and (tmp_path / "head.json").exists()
        replies = iter([False, True])
        monkeypatch.setattr(local, "answers", lambda *_: next(replies))
        assert local.start(tmp_path)["process"]["pid"] == leader.pid
    finally:
        leader.kill()
        leader.wait()
        for child in children:
            os.kill(child, 9)


def test_two_starts_at_once_make_one_head(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def launch(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, object]]:
        launched.append(bystander.pid)
        time.sleep(0.2)  # in which the other start finds no record yet
        record = {"process": local.identity(bystander.pid), "dashboard": "http://127.0.0.1:1"}
        write_json(folder / "head.json", record)
        return bystander, record

    monkeypatch.setattr(local, "launch", launch)
    monkeypatch.setattr(local, "answers", lambda *_: True)
    threads = [threading.Thread(target=local.start, args=(tmp_path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert launched == [bystander.pid] and bystander.poll() is None


def test_the_token_is_made_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ".ray"
    variables = local.environment(folder)
    token = Path(variables["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    first = token.read_text()
    assert local.environment(folder) == variables and token.read_text() == first
    assert variables["RAY_AUTH_MODE"] == "token" and variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_a_token_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves none, an empty file counts as none, and of two first commands at once both have the same."""
    folder = tmp_path / ".ray"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(local.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            local.environment(folder)
    assert list(folder.iterdir()) == []
    (folder / "token").touch(mode=0o644)
    token = Path(local.environment(folder)["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    first = token.read_text()
    local.make_token(token)  # another command that found none
    assert token.read_text() == first and list(folder.iterdir()) == [token]


def test_a_head_gets_its_own_token_and_a_short_folder(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def start_process(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        given.update(options, command=command)
        return bystander

    deep = tmp_path / "a folder whose path is long"
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = tmp_path / ".ray"
    for name in (*local.environment(folder), "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "the user's")
    monkeypatch.setattr(local.subprocess, "Popen", start_process)
    _, head = local.launch(folder)
    Path(head["temporary"]).rmdir()
    assert Path(head["temporary"]).parent == Path("/tmp") and f"--temp-dir={head['temporary']}" in given["command"]
    assert given["env"]["RAY_AUTH_TOKEN_PATH"] == str(folder / "token") and given["env"]["RAY_AUTH_MODE"] == "token"
    assert not {"RAY_AUTH_TOKEN", "RAY_ADDRESS"} & given["env"].keys()
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(local, "living_head", lambda _: head)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ray._raylet", types.SimpleNamespace(Config=None))
    local.connect(tmp_path / "tiny")
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(folder / "token") and "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize("own", [None, "glibc.malloc.arena_max=2"])
def test_processes_of_a_head_keep_their_memory_unless_the_user_says_otherwise(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(local.subprocess, "Popen", lambda _, **options: given.update(options) or bystander)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    _, head = local.launch(tmp_path / ".ray")
    Path(head["temporary"]).rmdir()
    assert given["env"]["GLIBC_TUNABLES"] == (own or local.ALLOCATOR)


def test_the_allocator_understands_its_settings() -> None:
    """A name that glibc does not know is ignored without a word, so what it lists is looked at."""
    loader = next((path for path in Path("/lib64").glob("ld-linux-*.so.2")), None)
    if loader is None:
        pytest.skip("no glibc")
    environment = {"GLIBC_TUNABLES": local.ALLOCATOR}
    listed = subprocess.run([loader, "--list-tunables"], env=environment, capture_output=True, text=True, check=True)
    found = dict(line.split(":", 1) for line in listed.stdout.splitlines() if line.startswith("glibc.malloc."))
    for name, value in (setting.split("=") for setting in local.ALLOCATOR.split(":")):
        assert int(found[name].split()[0], 0) == int(value)


def test_the_default_temporary_folder_is_used_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    short = tempfile.mkdtemp(prefix="lr-", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", short)
    made = Path(local.temporary_folder())
    made.rmdir()
    Path(short).rmdir()
    assert made.parent == Path(short)


def test_a_dashboard_is_no_cluster_to_connect_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(ValueError, match="RAY_ADDRESS=http://127.0.0.1:8265 is a dashboard, .* HOST:PORT") as caught:
        local.connect(tmp_path / "runs" / "tiny")
    assert explain(caught.value) == str(caught.value)


def evaluated(run_dir: Path) -> subprocess.CompletedProcess[str]:
    """What a shell makes of the line in the README: the user's token afterwards, its status and its errors."""
    command = 'eval "$("$0" "$1" env --run-dir "$2")"; status=$?; echo "token $RAY_AUTH_TOKEN"; exit $status'
    arguments = ["sh", "-c", command, sys.executable, local.__file__, str(run_dir)]
    return subprocess.run(arguments, env={**os.environ, "RAY_AUTH_TOKEN": "x"}, capture_output=True, text=True)


def test_the_variables_of_a_head_and_of_none(tmp_path: Path) -> None:
    problem = f"no Ray head in {tmp_path / '.ray'}: start one with python pipelines/local.py start, or give --run-dir"
    done = evaluated(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "token x\n", f"error: {problem}\n")
    command = [sys.executable, local.__file__, "status", "--run-dir", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{problem}\n"
    head = {"address": "127.0.0.1:1", "dashboard": "http://127.0.0.1:1", "process": local.identity(os.getpid())}
    write_json(tmp_path / ".ray" / "head.json", head)
    done = evaluated(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "token \n", "")


def test_workers_are_given_the_cache_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "somewhere")
    monkeypatch.setenv("LILICORR_CACHE", "mine")
    local.set_environment(tmp_path / "runs" / "p")
    assert os.environ["LILICORR_CACHE"] == str(tmp_path / "mine")
    monkeypatch.delenv("LILICORR_CACHE")
    local.set_environment(tmp_path / "runs" / "p")
    assert "LILICORR_CACHE" not in os.environ


def test_a_free_port_is_outside_rays_own_and_not_in_use() -> None:
    taken: set[int] = set()
    first = local.free_port(taken)
    assert first not in range(10_002, 20_000) and taken == {first}
    with socket.socket() as server:
        server.bind(("127.0.0.1", first))
        server.listen()
        assert not local.is_free(first)
        assert local.free_port(set()) != first
    assert local.free_port(taken) != first


def test_an_action_without_options_refuses_them() -> None:
    script = str(Path(local.__file__))
    done = subprocess.run([sys.executable, script, "status", "--profile", "demo"], capture_output=True, text=True)
    assert done.returncode == 2 and "status takes no --profile demo" in done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--profile", "nosuch"], "no profile 'nosuch'"),
        (["--profile", "tiny", "--set", "train.sede=1"], "unknown key train.sede"),
        (["--profile", "tiny", "--systems", "medusa"], "systems must be all or some of"),
    ],
)
def test_the_demo_refuses_options_before_it_starts_a_head(tmp_path: Path, options: list[str], problem: str) -> None:
    command = [sys.executable, str(Path(local.__file__)), "demo", "--run-dir", str(tmp_path / "runs"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {problem}"), done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []
