"""The table of a finished evaluation on the terminal.

Place in the flow: `pipelines/full.py` prints it behind the stage `evaluate`; `tables` has the paper's own tables.
"""

from __future__ import annotations

import sys
from typing import Any

PRINT_WIDTH = 130  # columns of a log file


def print_table(results: dict[str, Any]) -> None:
    """Print tau with its interval and the speed-up by system and set, then the slots of the first set."""
    from rich.console import Console
    from rich.table import Table

    names = list(results["sets"])
    table = Table(title="acceptance length tau [95 % interval], speed-up over autoregression; (drafted width, prompts)")
    slots = Table(title=f"accepted prefix by any candidate, the head's choice and top-1, on {names[0]}")
    counts = next(iter(results["systems"].values()))
    for column in ("system", *(f"{name} ({counts[name]['num_prompts']})" for name in names)):
        table.add_column(column, no_wrap=True)
    for column in ("system", "oracle", "selected", "top-1", "acceptance of slots 1, 2, ..."):
        slots.add_column(column, no_wrap=column == "system")
    for system, by_set in results["systems"].items():
        first = by_set[names[0]]
        row = f"{system} ({first['drafted_width']})" if first["drafted_width"] else system
        table.add_row(row, *[_cell(by_set[name]) for name in names])
        if first["per_slot"]:
            prefixes = [_show(first[f"{name}_prefix"]) for name in ("oracle", "selected", "top1")]
            slots.add_row(system, *prefixes, " ".join(_show(value) for value in first["per_slot"]))
    console = Console(width=None if sys.stdout.isatty() else PRINT_WIDTH)
    console.print(table)
    console.print(slots)


def _cell(values: dict[str, Any]) -> str:
    """Two lines of the table."""
    low, high = values["tau_ci95"] or (None, None)
    return f"{_show(values['tau'])} \\[{_show(low)}, {_show(high)}]\n{_show(values['speedup'])}x"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
