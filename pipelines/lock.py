"""One driver per run directory: a lock file with an owner and a heartbeat.

Place in the flow: `pipelines.stage` holds the lock of `runs/<profile>` while it runs stages. A driver that
died leaves its lock behind; it is taken over when its process is gone (same host), or when nothing was heard of it for
a minute (another host, or a process that hangs).
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from lilicorr.provenance import write_json

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
STALE_S = 60.0
SETTLE_S = 0.2  # two drivers may take a stale lock over at once; the last writer wins


class LockedError(RuntimeError):
    """Another living driver owns the run directory."""


class Lock:
    """Context manager that owns `path`, and says so again every few seconds.

    Raises LockedError on entry while another driver lives; to find that out may take `stale_s` seconds. If the lock is
    lost while held (this process was stopped for longer than `stale_s` and another driver took over), the process ends
    itself by SIGTERM.
    """

    def __init__(self, path: Path, heartbeat_s: float = HEARTBEAT_S, stale_s: float = STALE_S) -> None:
        self.path = path
        self.heartbeat_s = heartbeat_s
        self.stale_s = stale_s
        self.token = uuid.uuid4().hex
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lock heartbeat")

    def __enter__(self) -> Lock:
        owner = read_owner(self.path)
        if owner is not None:
            self._take_over(owner)
        self._write()
        time.sleep(SETTLE_S)
        self._require_ownership()
        self._thread.start()
        return self

    def _take_over(self, owner: dict[str, Any]) -> None:
        """Return as soon as the lock of `owner` may be taken; raises LockedError if its owner lives.

        Clocks jump, and those of two hosts differ, so a heartbeat that looks old only asks for a closer look: a driver
        lives that is heard within `stale_s` of this process's own, steady clock.
        """
        reason = why_dead(owner, self.stale_s)
        if reason is not None and not is_gone(owner):
            logger.warning("waiting up to %.0f s for %s: %s", self.stale_s, describe(owner), reason)
            found = self._next(owner)
            if found is None:
                return
            owner, reason = found, reason if found == owner else None
        if reason is None:
            raise LockedError(f"{self.path.parent} is in use by {describe(owner)}; remove {self.path} if not")
        logger.warning("taking over the lock of %s: %s", describe(owner), reason)

    def _next(self, owner: dict[str, Any]) -> dict[str, Any] | None:
        """What the lock holds as soon as that is not `owner`, or else after `stale_s`."""
        deadline = time.monotonic() + self.stale_s
        while True:
            time.sleep(max(0.0, min(self.heartbeat_s, deadline - time.monotonic())))
            found = read_owner(self.path)
            if found != owner or time.monotonic() >= deadline:
                return found

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        if self._is_owner():
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        write_json(
            self.path,
            {
                "token": self.token,
                "pid": os.getpid(),
                "process_started": process_start(os.getpid()),
                "host": platform.node(),
                "job": os.environ.get("LILICORR_JOB"),
                "heartbeat": time.time(),
            },
        )

    def _is_owner(self) -> bool:
        owner = read_owner(self.path)
        return owner is not None and owner["token"] == self.token

    def _require_ownership(self) -> None:
        if not self._is_owner():
            raise LockedError(f"{self.path.parent} was taken by {describe(read_owner(self.path))}")

    def _beat(self) -> None:
        while not self._stopped.wait(self.heartbeat_s):
            try:
                if not self._is_owner():
                    logger.error("lost the lock %s to %s", self.path, describe(read_owner(self.path)))
                    os.kill(os.getpid(), signal.SIGTERM)  # not SIGINT, which Ray blocks in jobs
                    return
                self._write()
            except OSError as error:  # a full disk, a file system that is away: one missed beat does not end the others
                logger.warning("no heartbeat in %s, trying again: %s", self.path, error)


def is_gone(owner: dict[str, Any]) -> bool:
    """Whether the owner of a lock was a process of this host that has ended."""
    return owner["host"] == platform.node() and process_start(owner["pid"]) != owner["process_started"]


def why_dead(owner: dict[str, Any], stale_s: float = STALE_S) -> str | None:
    """Why the owner of a lock does not seem to live, None if it does; by its heartbeat it may still (`Lock`)."""
    if is_gone(owner):
        return "its process is gone"
    age = time.time() - owner["heartbeat"]
    if abs(age) > stale_s:
        return f"its last heartbeat is {age:.0f} s old" if age > 0 else f"its last heartbeat is {-age:.0f} s ahead"
    return None


def read_owner(path: Path) -> dict[str, Any] | None:
    """The record in a lock file, None if there is no lock."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def describe(owner: dict[str, Any] | None) -> str:
    """The owner of a lock in words."""
    if owner is None:
        return "nobody"
    job = f", job {owner['job']}" if owner["job"] else ""
    return f"process {owner['pid']} on {owner['host']}{job}"


def process_start(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; None if it is gone or a zombie.

    A process id is used again after a while, an id together with its start is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
