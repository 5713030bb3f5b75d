"""Files as the marker of a finished stage records them, and whether they are still those.

Place in the flow: `pipelines.stage` records what a stage read from outside the run directory (`inputs.SOURCES` names
it) and what it wrote. Size and time of change are looked at first; only a file with another time is hashed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from lilicorr.folder import ASIDE
from lilicorr.provenance import sha256_file, visible_files

MARKER = "_SUCCESS.json"
VOLATILE = "checkpoints"  # folders a stage prunes itself; no part of its result

Record = dict[str, Any]  # path, size in bytes, mtime_ns, sha256


def record(path: Path, name: str) -> Record:
    """What is kept of a file, under a name; a change while it is hashed shows by its time."""
    status = path.stat()
    return {"path": name, "size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_file(path)}


def list_outputs(folder: Path) -> list[Record]:
    """Records of every committed file of a stage by relative path, sorted."""
    outputs = []
    for path in sorted(visible_files(folder)):
        parts = path.relative_to(folder).parts
        if parts != (MARKER,) and VOLATILE not in parts and not any(ASIDE in part for part in parts):
            outputs.append(record(path, "/".join(parts)))
    return outputs


def list_sources(files: Mapping[str, Path]) -> list[Record]:
    """Records of files anywhere under the names given."""
    return [record(path, name) for name, path in files.items()]


def changed_outputs(folder: Path, outputs: Sequence[Record]) -> str | None:
    """Which of a stage's outputs is not what it wrote, None if all are."""
    for output in outputs:
        path = folder / output["path"]
        if not path.is_file():
            return f"output missing: {output['path']}"
        change = _change(path, output)
        if change:
            return f"output changed: {output['path']} {change}"
    return None


def changed_sources(files: Mapping[str, Path], sources: Sequence[Record]) -> str | None:
    """Which of the files to read is not one that the stage read, None if all are.

    What is gone altogether counts as unchanged, since nothing could be made of it again; a file that is gone from a
    folder that still has others does not.
    """
    recorded = {source["path"]: source for source in sources}
    for name, path in files.items():
        source = recorded.pop(name, None)
        change = "was not there or not recorded" if source is None else _change(path, source)
        if change:
            return f"source changed: {name} {change}"
    folders = {PurePath(name).parent for name in files}
    gone = [name for name in recorded if PurePath(name).parent in folders]
    return f"source changed: {gone[0]} is gone" if gone else None


def _change(path: Path, before: Record) -> str | None:
    """What is other about a file; markers of before its time was recorded have it hashed."""
    status = path.stat()
    if status.st_size != before["size"]:
        return f"has {status.st_size} bytes instead of {before['size']}"
    if status.st_mtime_ns == before.get("mtime_ns") or sha256_file(path) == before["sha256"]:
        return None
    return "has another content of the same size"
