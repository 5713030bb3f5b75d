"""The plots of a training and evaluation run, drawn from its files only.

Place in the flow: `pipelines/evaluate.py` calls `draw_plots` when its results are written; anyone can again,
with the two folders of a finished run.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WINDOW = 10
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")


def draw_plots(evaluate_dir: Path, train_dir: Path, run_names: Collection[str] | None = None) -> list[Path]:
    """Draw every plot whose data is there beside `evaluate_dir/results.json`; returns the files.

    Of the runs in `train_dir` those of `run_names` are shown; None: all that were ever trained there.
    """
    results = json.loads((evaluate_dir / "results.json").read_text(encoding="utf-8"))
    figures = {"tau.png": tau_by_set(results), "slots.png": acceptance_by_slot(results)}
    paths = {path.parent.name: path for path in sorted(train_dir.glob("*/metrics.jsonl"))}
    runs = {name: read_metrics(path) for name, path in paths.items() if run_names is None or name in run_names}
    if any(runs.values()):
        figures["training.png"] = training_curves(runs)
    heads = {name: lines for name, lines in runs.items() if any("score_spread" in line for line in lines)}
    if heads:
        figures["heads.png"] = head_diagnostics(heads)
    for name, figure in figures.items():
        figure.savefig(evaluate_dir / name, dpi=150, bbox_inches="tight")
    return [evaluate_dir / name for name in figures]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a training run's metrics.jsonl; one that a kill or a full disk has cut is none."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def tau_by_set(results: dict[str, Any]) -> Figure:
    """Bars of tau by set and system, with 95 % intervals."""
    sets, systems = list(results["sets"]), _drafting(results)
    figure = Figure(figsize=(max(5.0, 1.6 * len(sets) + 1.5), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(systems))
    for index, system in enumerate(systems):
        places, heights, below, above = [], [], [], []
        for place, name in enumerate(sets):
            values = results["systems"][system][name]
            if values["tau"] is not None:
                low, high = values["tau_ci95"]
                places.append(place + (index - (len(systems) - 1) / 2) * width)
                heights.append(values["tau"])
                below.append(max(0.0, values["tau"] - low))
                above.append(max(0.0, high - values["tau"]))
        axes.bar(places, heights, 0.9 * width, color=_colour(index), label=system)
        axes.errorbar(places, heights, [below, above], fmt="none", ecolor="black", elinewidth=1, capsize=2)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label="autoregressive")
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylabel("acceptance length τ (tokens per block)")
    _finish(axes)
    _legend(figure, axes)
    return figure


def acceptance_by_slot(results: dict[str, Any]) -> Figure:
    """Conditional acceptance of every slot, one panel for each set."""
    sets, systems = list(results["sets"]), _drafting(results)
    figure = Figure(figsize=(max(5.0, 3.0 * len(sets)), 3.2), layout="constrained")
    panels = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, sets):
        for index, system in enumerate(systems):
            values = results["systems"][system][name]["per_slot"]
            reached = [(slot, value) for slot, value in enumerate(values, start=1) if value is not None]
            if reached:
                panel.plot(*zip(*reached), marker="o", markersize=3, color=_colour(index), label=system)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("slot")
        panel.set_ylim(0, 1.02)
        panel.xaxis.get_major_locator().set_params(integer=True)
        _finish(panel)
    panels[0].set_ylabel("acceptance, given all before")
    _legend(figure, panels[0])
    return figure


def training_curves(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Loss and, where it was measured, held-out tau against the step of every run."""
    labels = {"loss": "loss", "tau": "held-out τ (tokens per block)"}
    every_line = [line for lines in runs.values() for line in lines]
    keys = [key for key in labels if any(line.get(key) is not None for line in every_line)]
    figure = Figure(figsize=(4.5 * len(keys), 3.4), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys):
        for index, (run, lines) in enumerate(runs.items()):
            points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
            if points:
                marker = "o" if key == "tau" else None
                axes.plot(*zip(*points), marker=marker, markersize=3, color=_colour(index), label=run, linewidth=1)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(labels[key])
        _finish(axes)
    _legend(figure, figure.axes[0])
    return figure


def head_diagnostics(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Of the LiLiCorr heads: prefix by walk, by the top candidate and by any, blocks begun wrong, spread of the scores.

    Every point is the mean of a `WINDOW` of log lines: one line's blocks are too few to see a trend.
    """
    panels = {
        "prefix (tokens per block)": {"oracle_prefix": ":", "selected_prefix": "-", "top1_prefix": "--"},
        "share of blocks wrong at slot 1": {"zero_prefix_rate": "-"},
        "spread of the scores (nats)": {"score_spread": "-"},
    }
    figure = Figure(figsize=(4.5 * len(panels), 3.4), layout="constrained")
    for axes, (title, styles) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for index, (run, lines) in enumerate(runs.items()):
            for key, style in styles.items():
                points = _means([(line["step"], line[key]) for line in lines if line.get(key) is not None])
                name = f"{run}, {key.removesuffix('_prefix')}" if len(styles) > 1 else None
                axes.plot(*zip(*points), style, color=_colour(index), label=name, linewidth=1)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(title)
        _finish(axes)
    figure.axes[-1].set_ylim(bottom=0)
    _legend(figure, figure.axes[0])
    return figure


def _means(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """Mean step and value of every `WINDOW` points, the last one of those that are left."""
    parts = [points[start : start + WINDOW] for start in range(0, len(points), WINDOW)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _drafting(results: dict[str, Any]) -> list[str]:
    """The systems that draft: autoregression has a tau of 1 by definition, and no slots."""
    return [system for system, by_set in results["systems"].items() if any(v["per_slot"] for v in by_set.values())]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _finish(axes: Axes) -> None:
    """The common look: no box, light horizontal lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(figure: Figure, axes: Axes) -> None:
    """One legend above the plot, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=max(1, len(labels)), frameon=False, fontsize=8)
