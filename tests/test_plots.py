"""The plots: every file is drawn, and holds the numbers of the results and metrics it is drawn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lilicorr import plots

METRICS = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "tau": 1.7}, {"step": 3, "loss": 1.2}]


def figures(tau: float | None, per_slot: list[float | None]) -> dict[str, Any]:
    return {"tau": tau, "tau_ci95": None if tau is None else [tau - 0.25, tau + 0.5], "per_slot": per_slot}


RESULTS = {
    "sets": {"held_out": {}, "chat": {}},
    "systems": {
        "autoregressive": {"held_out": figures(1.0, []), "chat": figures(1.0, [])},
        "dflash": {"held_out": figures(2.0, [0.75, 0.5, None]), "chat": figures(1.5, [0.5, 0.25, 0.125])},
        "lilicorr": {"held_out": figures(2.5, [0.75, 0.7, 0.5]), "chat": figures(None, [None, None, None])},
    },
}


def test_every_plot_is_drawn_from_the_files(tmp_path: Path):
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "results.json").write_text(json.dumps(RESULTS))
    names = [path.name for path in plots.draw_plots(tmp_path / "evaluate", tmp_path / "train")]
    assert names == ["tau.png", "slots.png"]  # nothing was trained here
    for run, lines in {"dflash": METRICS, "lilicorr": METRICS[:1], "empty": []}.items():
        folder = tmp_path / "train" / run
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = plots.draw_plots(tmp_path / "evaluate", tmp_path / "train")
    assert [path.name for path in paths] == ["tau.png", "slots.png", "training.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths)
    (tmp_path / "train" / "lilicorr" / "metrics.jsonl").open("a").write('{"step": 2, "lo')  # a full disk
    paths = plots.draw_plots(tmp_path / "evaluate", tmp_path / "train", ["lilicorr"])
    assert [path.name for path in paths] == ["tau.png", "slots.png", "training.png"]
    paths = plots.draw_plots(tmp_path / "evaluate", tmp_path / "train", ["empty"])
    assert [path.name for path in paths] == ["tau.png", "slots.png"]  # what other profiles trained there is not shown


def test_bars_are_the_drafting_systems_with_their_intervals():
    axes = plots.tau_by_set(RESULTS).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [2.0, 1.5, 2.5]
    bars = [segment[:, 1].tolist() for container in axes.collections for segment in container.get_segments()]
    assert bars == [[1.75, 2.5], [1.25, 2.0], [2.25, 3.0]]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert centres == pytest.approx([-0.2, 0.8, 0.2])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["held_out", "chat"]


def test_slots_that_were_never_reached_are_left_out():
    held_out, chat = plots.acceptance_by_slot(RESULTS).axes
    dflash, lilicorr = held_out.lines
    assert (list(dflash.get_xdata()), list(dflash.get_ydata())) == ([1, 2], [0.75, 0.5])
    assert list(lilicorr.get_ydata()) == [0.75, 0.7, 0.5]
    assert [line.get_label() for line in chat.lines] == ["dflash"]


def test_training_curves_hold_every_logged_value():
    loss, tau = plots.training_curves({"dflash": METRICS, "lilicorr": METRICS[:1]}).axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[2.0, 1.5, 1.2], [2.0]]
    assert [list(line.get_xdata()) for line in tau.lines] == [[2]] and tau.lines[0].get_label() == "dflash"
    assert len(plots.training_curves({"lilicorr": METRICS[:1]}).axes) == 1


def test_head_diagnostics_are_means_over_a_window_of_lines(tmp_path: Path):
    lines = [
        {
            "step": 10 * (i + 1),
            "loss": 1.0,
            "selected_prefix": i,
            "top1_prefix": 1.0,
            "oracle_prefix": 2.0,
            "zero_prefix_rate": 0.5,
            "score_spread": 0.25,
        }
        for i in range(12)
    ]
    prefixes, zero, spread = plots.head_diagnostics({"lilicorr": [{"step": 0, "resumed": True}, *lines]}).axes
    assert [line.get_label() for line in prefixes.lines] == ["lilicorr, oracle", "lilicorr, selected", "lilicorr, top1"]
    assert prefixes.lines[1].get_xydata().tolist() == [[55.0, 4.5], [115.0, 10.5]]
    assert zero.lines[0].get_ydata().tolist() == [0.5, 0.5] and spread.lines[0].get_ydata().tolist() == [0.25, 0.25]
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "results.json").write_text(json.dumps(RESULTS))
    (tmp_path / "train" / "lilicorr").mkdir(parents=True)
    (tmp_path / "train" / "lilicorr" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = plots.draw_plots(tmp_path / "evaluate", tmp_path / "train")
    assert [path.name for path in paths] == ["tau.png", "slots.png", "training.png", "heads.png"]
