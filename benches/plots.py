"""Pictures and a short table of what the benches measured, from their .jsonl files alone.

    python -m benches.plots FOLDER        # benches/results, or what benches/gpu.sh wrote

Reads every .jsonl file in FOLDER; where a measurement stands there more than once the newest counts. Draws, where there
are rows for it, `kernels.png` (share of the physical floor), `stages.png` (milliseconds of a block, its stages stacked
by head) and `decode.png` (tokens and blocks per second against requests at once), and prints the table.

Place in the flow: the last part of `gpu.sh`; docs/benches.md names the fields of the rows. Paper: Table 3.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from benches.head_latency import BLOCK, STAGES
from lilicorr.plots import COLOURS

Row = dict[str, Any]
IDENTITY = ("kind", "geometry", "profile", "device", "head", "system", "run", "kernel", "stage", "variant", "version")


def read_rows(folder: Path) -> list[Row]:
    """The rows of every file in `folder`, the newest of each measurement; ValueError where there is none."""
    newest: dict[tuple[Any, ...], Row] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            key = (*(row.get(name) for name in IDENTITY), row.get("concurrency"))
            if key not in newest or newest[key]["provenance"]["date"] <= row["provenance"]["date"]:
                newest[key] = row
    if not newest:
        raise ValueError(f"no rows in {folder}: it must hold .jsonl files of the benches")
    return list(newest.values())


def of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """The rows of a bench; those of stages in the version that serves: captured on a GPU, else eager."""
    found = [row for row in rows if row.get("kind") == kind]
    if kind == "head_latency":
        served = "captured" if any(row["version"] == "captured" for row in found) else "eager"
        found = [row for row in found if row["version"] == served]
    return found


def kernel_shares(rows: list[Row]) -> Figure | None:
    """Bars of every kernel's share of its floor, a panel for each geometry; None without a GPU's rows."""
    rows = [row for row in of_kind(rows, "kernel") if row["version"] == "triton"]
    geometries = sorted({row["geometry"] for row in rows})
    if not rows:
        return None
    figure = Figure(figsize=(9, 3.4 * len(geometries)), layout="constrained")
    for axes, geometry in zip(figure.subplots(len(geometries), squeeze=False)[:, 0], geometries):
        here = [row for row in rows if row["geometry"] == geometry]
        names = list(dict.fromkeys(row["kernel"] for row in here))
        counts = sorted({row["concurrency"] for row in here})
        for index, count in enumerate(counts):
            share = {row["kernel"]: 100 * row["share_of_floor"] for row in here if row["concurrency"] == count}
            places = [place + (index - (len(counts) - 1) / 2) * 0.8 / len(counts) for place in range(len(names))]
            heights = [share.get(name, 0.0) for name in names]
            axes.bar(places, heights, 0.75 / len(counts), color=COLOURS[index], label=f"{count} rows")
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_ylabel("% of the floor")
        axes.set_title(geometry)
        axes.legend()
    return figure


def stacked_stages(rows: list[Row]) -> Figure | None:
    """A bar of stages for each head and a mark for its whole block, a panel for each geometry and number of rows."""
    rows = of_kind(rows, "head_latency")
    panels = sorted({(row["geometry"], row["concurrency"]) for row in rows})
    if not rows:
        return None
    figure = Figure(figsize=(3.4 * len(panels) + 1.5, 4.2), layout="constrained")
    for axes, (geometry, count) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        here = [row for row in rows if (row["geometry"], row["concurrency"]) == (geometry, count)]
        heads = list(dict.fromkeys(row["head"] for row in here))
        times = {(row["head"], row["stage"]): row["median_us"] / 1000 for row in here}
        bottoms = len(heads) * [0.0]
        for index, stage in enumerate(STAGES):
            heights = [times.get((head, stage), 0.0) for head in heads]
            axes.bar(heads, heights, 0.7, bottom=bottoms, color=COLOURS[index], label=stage)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
        axes.plot(heads, [times.get((head, BLOCK)) for head in heads], "k_", markersize=24, label="whole block")
        floors = [row["floor_us"] for row in here if row["stage"] == BLOCK and row["floor_us"]]
        if floors:
            axes.axhline(min(floors) / 1000, color="black", linestyle=":", linewidth=0.8, label="floor")
        axes.tick_params(axis="x", labelsize="small")
        axes.set_title(f"{geometry}, {count} rows")
        axes.set_ylabel("ms per block")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def decode_rates(rows: list[Row]) -> Figure | None:
    """Tokens per second, and blocks per second, of every system against requests at once."""
    rows = of_kind(rows, "decode")
    if not rows:
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, field, what in zip(figure.subplots(1, 2), ("tokens_per_s", "blocks_per_s"), ("tokens", "blocks")):
        _rates(axes, [row for row in rows if row.get(field)], field)
        axes.set_ylabel(f"{what} per second")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _rates(axes: Axes, rows: list[Row], field: str) -> None:
    """Lines of median with lowest and highest."""
    groups = sorted({(str(row["profile"] or row["geometry"]), row["system"]) for row in rows})
    for index, (source, system) in enumerate(groups):
        line = [row for row in rows if (str(row["profile"] or row["geometry"]), row["system"]) == (source, system)]
        line.sort(key=lambda row: row["concurrency"])
        values = [[row[field][name] for row in line] for name in ("median", "low", "high")]
        errors = [[m - low for m, low in zip(values[0], values[1])], [h - m for m, h in zip(values[0], values[2])]]
        counts, colour = [row["concurrency"] for row in line], COLOURS[index % len(COLOURS)]
        axes.errorbar(counts, values[0], errors, marker="o", capsize=2, color=colour, label=f"{system} ({source})")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("requests at once")
    axes.set_ylim(bottom=0)


def table(rows: list[Row]) -> list[str]:
    """The lines of the short table: whole blocks with head and accept, kernels' shares, rates, the training step."""
    lines = []
    times = {(r["geometry"], r["head"], r["concurrency"], r["stage"]): r for r in of_kind(rows, "head_latency")}
    for (geometry, head, count, stage), row in times.items():
        if stage == BLOCK:
            floor = f"{row['median_us'] / row['floor_us']:5.2f} x floor" if row["floor_us"] else ""
            parts = [f"{s} {times[geometry, head, count, s]['median_us'] / 1000:.3f}" for s in STAGES[3:5]]
            block = f"{geometry:10}{head:10}c={count:<3} block {row['median_us'] / 1000:8.3f} ms"
            lines.append(f"{block} {floor:14} {', '.join(parts)}")
    for row in of_kind(rows, "kernel"):
        if row["version"] == "triton" and row["concurrency"] in (1, 32):
            share = f"{row['median_us']:8.1f} us {row['share_of_floor']:5.0%} of floor"
            lines.append(f"{row['geometry']:10}{row['kernel']:20}c={row['concurrency']:<3} {share}")
    for row in of_kind(rows, "decode"):
        rates = [f"{row[field]['median']:9.1f} {field}" for field in ("tokens_per_s", "blocks_per_s") if row.get(field)]
        source = row["profile"] or row["geometry"] or "toy"
        lines.append(f"{source:10}{row['system']:16}c={row['concurrency']:<3} {' '.join(rates)}")
    for row in of_kind(rows, "train_step"):
        used = (
            "" if row["utilisation"] is None else f"  {row['peak_gib']:.1f} GiB  {row['utilisation']:.0%} utilisation"
        )
        rate = f"{row['tokens_per_s']['median']:9.0f} tokens/s{used}"
        lines.append(f"{row['geometry']:10}train step, {row['head']}, {row['variant']:10}{rate}")
    return lines + real_lines(rows)


def real_lines(rows: list[Row]) -> list[str]:
    """The lines of a real run: what was regenerated, what each run trained, and held-out tau and speed."""
    lines = []
    for row in of_kind(rows, "regenerate"):
        speed = f"{row['tokens_per_s']['median']:.0f} tokens/s at {row['rows']} rows"
        lines.append(f"regenerated {row['completion_tokens']} tokens in {row['turns']} answers, {speed}")
    for row in of_kind(rows, "train"):
        sizes = f"{row['steps']} steps, {row['blocks']} blocks, {row['seconds']:.0f} s"
        lines.append(f"trained {row['run']:10}{sizes}, loss {row['loss']:.3f}, {row['tokens_per_s']:.0f} tokens/s")
    for row in of_kind(rows, "held_out"):
        shown = (("tau", 3), ("tokens_per_s", 1), ("speedup", 2))
        figures = [_with_interval(row, name, digits) for name, digits in shown]
        lines.append(f"{row['system']:16}tau {figures[0]}  tokens/s {figures[1]}  speed-up {figures[2]}")
    return lines


def _with_interval(row: Row, name: str, digits: int) -> str:
    """A figure with its 95 % interval."""
    low, high = row[f"{name}_ci95"]
    return f"{row[name]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        rows = read_rows(folder)
    except ValueError as error:
        parser.error(str(error))
    drawn = {"kernels.png": kernel_shares(rows), "stages.png": stacked_stages(rows), "decode.png": decode_rates(rows)}
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=130, bbox_inches="tight")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
