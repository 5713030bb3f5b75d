"""Folders that appear complete or not at all.

Place in the flow: the training set (`corpus`), draft models (`checkpoint`) and training states (`training`)
are folders of several files. Each is written beside its final place, flushed to disk, and renamed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASIDE = ".tmp-"  # marks unfinished folders; nothing reads a folder with this in its name


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`; it takes the place of `path` if the block ends without an error.

    Every file is flushed to disk before the rename. A folder already at `path` is replaced as a whole; after
    an error it is as it was, and the unfinished one is removed. A process killed between moving the former
    folder away and the new one in leaves none at `path`, which readers take as work not done.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{ASIDE}{uuid.uuid4().hex[:8]}"
    aside, old = path.with_name(path.name + mark), path.with_name(path.name + mark + "-old")
    aside.mkdir()
    try:
        yield aside
        for file in aside.rglob("*"):
            flush(file)
        flush(aside)
        if path.exists():
            path.rename(old)
        aside.rename(path)
        flush(path.parent)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(parent: Path) -> None:
    """Delete the folders under `parent` that a killed process left unfinished; nobody may be writing there."""
    for leftover in sorted(child for child in parent.glob(f"*{ASIDE}*") if child.is_dir()):
        shutil.rmtree(leftover)
