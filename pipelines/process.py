"""Processes of this machine, told apart by id and start: an id is used again after a while, with its start it is not.

Place in the flow: `pipelines.local` ends what it started by them, and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from pipelines.lock import process_start


def identity(pid: int) -> dict[str, int | None]:
    """A process id and its start, which together are never used again."""
    return {"pid": pid, "started": process_start(pid)}


def is_alive(process: dict[str, int | None]) -> bool:
    """Whether that very process still runs."""
    return process["started"] is not None and process_start(process["pid"]) == process["started"]


def process_table() -> dict[int, tuple[int, int]]:
    """Parent and session of every process of this machine, by id."""
    table = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        table[int(entry.parent.name)] = (int(fields[1]), int(fields[3]))
    return table


def descendants(pid: int) -> set[int]:
    """The processes below `pid` and, where it led a session, what is left of that session."""
    table = process_table()
    found: set[int] = set()
    fresh = {pid} | {child for child, (_, session) in table.items() if session == pid}
    while fresh:
        found |= fresh
        fresh = {child for child, (parent, _) in table.items() if parent in found} - found
    return found - {pid}
