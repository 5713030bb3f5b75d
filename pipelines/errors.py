"""What was foreseen ends a command in one line; a fault of the code keeps its traceback.

Place in the flow: every command does its work inside `one_line_errors`, and what Ray runs in another process does it
inside `sent_home`. Foreseen is what this repository raises itself with a message (ValueError for what a user set,
RuntimeError for what the world refused) and what the system says of a path or of a disk that takes no more. The same
class raised by a library, or by an operation of Python, is a fault.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from pipelines.lock import LockedError

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(ROOT / name for name in ("lilicorr", "pipelines", "serve_app"))
OF_PATHS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # full, over its quota, read-only; they have no class of their own


class UserError(ValueError):
    """A foreseen error of a Ray worker; its one line stands in the text of whatever Ray wraps it in."""


OF_SYSTEM = re.compile(r"\(os error (\d+)\)")  # the number of the system's error in the text of safetensors' own class
IN_TEXT = re.compile(rf"\b{UserError.__module__}\.{UserError.__name__}: (.+)")


def explain(error: BaseException) -> str | None:
    """What to tell the user about an error, None for a fault of the code."""
    sent = IN_TEXT.search(str(error))
    if sent:
        return sent[1]
    if isinstance(error, OF_PATHS) or (isinstance(error, OSError) and error.errno in OF_DISKS):
        # Arrow's name the file in the text
        return f"{error.strerror}: {error.filename}" if error.filename is not None else str(error)
    number = OF_SYSTEM.search(str(error)) if isinstance(error, SafetensorError) else None
    if number and int(number[1]) in OF_DISKS:
        return str(error)
    foreseen = isinstance(error, (ValueError, OSError, LockedError)) or type(error) is RuntimeError
    return str(error) if foreseen and _raised_here(error) else None


def _raised_here(error: BaseException) -> bool:
    """Whether a `raise` statement of our packages made the error; an operation that failed is no such statement."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not (frames[-1].line or "").startswith("raise "):
        return False
    file = Path(frames[-1].filename).resolve()
    return any(file.is_relative_to(package) for package in PACKAGES)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with status 1 and one message on a foreseen error; every other one passes."""
    try:
        yield
    except Exception as error:
        text = explain(error)
        if text is None:
            raise
        raise SystemExit(f"error: {text}") from error


@contextmanager
def sent_home() -> Iterator[None]:
    """In a Ray worker: make a UserError of a foreseen error, which `explain` finds again at the driver.

    A traceback does not travel, and Ray has a wrapper of its own for a task, an actor's start and a trainer.
    """
    try:
        yield
    except Exception as error:
        text = explain(error)
        if text is None:
            raise
        raise UserError(" ".join(text.split())) from error


def problem_of(check: Callable[..., Any], *arguments: Any) -> list[str]:
    """What `check(*arguments)` raises, if that is foreseen."""
    try:
        check(*arguments)
    except Exception as error:
        text = explain(error)
        if text is None:
            raise
        return [text]
    return []
