"""The lock of a run directory: one living driver at a time, whatever the clocks say, and a dead one's is taken over."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lilicorr.provenance import write_json
from pipelines import lock
from pipelines.lock import Lock, LockedError, process_start, read_owner, why_dead

HOLD = """
import sys, time
from pathlib import Path
from pipelines.lock import Lock
with Lock(Path(sys.argv[1]), heartbeat_s=0.05):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock."""
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_driver_is_refused_and_a_dead_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "_lock.json"
    process = holder(path)
    try:
        owner = read_owner(path)
        assert owner is not None and owner["pid"] == process.pid and why_dead(owner) is None
        with pytest.raises(LockedError, match=f"in use by process {process.pid} on"), Lock(path):
            pass
    finally:
        process.kill()
        process.wait()
    assert path.exists() and why_dead(owner) == "its process is gone"
    with Lock(path) as lock:
        assert read_owner(path)["token"] == lock.token
    assert not path.exists()


ELSEWHERE = {"token": "x", "pid": 1, "process_started": 1, "host": "elsewhere", "job": "lilicorr-1"}


@pytest.mark.parametrize("age", [61, -61], ids=["old", "of a clock ahead"])
def test_a_lock_of_another_host_is_replaced_when_its_heartbeat_stands_still(tmp_path: Path, age: float) -> None:
    path = tmp_path / "_lock.json"
    write_json(path, {**ELSEWHERE, "heartbeat": time.time() - age / 2})
    with pytest.raises(LockedError, match="in use by process 1 on elsewhere, job lilicorr-1"), Lock(path):
        pass
    write_json(path, {**ELSEWHERE, "heartbeat": time.time() - age})
    with Lock(path, heartbeat_s=0.01, stale_s=0.1):
        assert read_owner(path)["pid"] == os.getpid()


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_takes_no_lock_from_a_living_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    path, clock = tmp_path / "_lock.json", time.time
    process = holder(path)
    try:
        monkeypatch.setattr(lock.time, "time", lambda: clock() + jump_s)
        owner = read_owner(path)
        assert why_dead(owner) is not None
        with pytest.raises(LockedError, match=f"in use by process {process.pid} on"), Lock(path, heartbeat_s=0.05):
            pass
        later = read_owner(path)
        assert later["token"] == owner["token"] and later["heartbeat"] != owner["heartbeat"]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_that_hangs_is_waited_for_and_then_replaced(tmp_path: Path) -> None:
    path = tmp_path / "_lock.json"
    process = holder(path)
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
        write_json(path, {**read_owner(path), "heartbeat": time.time() - 61})
        start = time.monotonic()
        with Lock(path, heartbeat_s=0.01, stale_s=0.3):
            assert read_owner(path)["pid"] == os.getpid() and time.monotonic() - start > 0.3
    finally:
        process.kill()
        process.wait()


def test_a_lock_that_is_given_back_meanwhile_is_free(tmp_path: Path) -> None:
    path = tmp_path / "_lock.json"
    write_json(path, {**ELSEWHERE, "heartbeat": time.time() - 3600})
    timer = threading.Timer(0.1, path.unlink)
    timer.start()
    with Lock(path, heartbeat_s=0.05):  # which would otherwise watch for a minute
        assert read_owner(path)["pid"] == os.getpid()
    timer.join()


def wait_for_a_heartbeat(path: Path) -> None:
    """Return when the owner of the lock has said that it lives once more."""
    first, deadline = read_owner(path)["heartbeat"], time.monotonic() + 10
    while read_owner(path)["heartbeat"] == first:
        assert time.monotonic() < deadline, "no further heartbeat"
        time.sleep(0.01)


def test_the_heartbeat_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "_lock.json"
    with Lock(path, heartbeat_s=0.01):
        wait_for_a_heartbeat(path)


def test_a_heartbeat_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "_lock.json"
    failures = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.ESTALE, "Stale file handle")]

    def write(*arguments: Any) -> None:
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()
        write_json(*arguments)

    monkeypatch.setattr(lock, "write_json", write)
    with Lock(path, heartbeat_s=0.01):
        wait_for_a_heartbeat(path)
    assert not failures


def test_a_driver_that_lost_its_lock_ends_and_leaves_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "_lock.json"
    process = holder(path)
    try:
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            write_json(path, {**read_owner(path), "token": "somebody else"})  # again if a heartbeat came in between
            time.sleep(0.5)
        assert process.poll() == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert read_owner(path)["token"] == "somebody else"


def test_process_start_tells_the_living_from_the_dead() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid()) is not None
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process_start(process.pid) is None
