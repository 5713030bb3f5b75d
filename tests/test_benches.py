"""The benches at toy size: rows of the documented schema, work that is counted right, and a script that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benches import decode, head_latency, kernels, plots, train_step, verify_cost
from benches.geometry import TOY, random_draft_model, random_target
from benches.timing import RowFile
from lilicorr.heads import HEADS

SCRIPT = Path(__file__).resolve().parents[1] / "benches" / "gpu.sh"
TIMES = {"median_us", "p10_us", "p90_us", "repeats"}
WORK = {"bytes", "operations", "floor_us", "share_of_floor"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """The main function of a bench with arguments -> the rows it wrote."""

    def call(main: Callable[[], None], *arguments: str) -> list[dict[str, Any]]:
        output = tmp_path / "results" / "rows.jsonl"
        monkeypatch.setattr(sys, "argv", ["bench", "--dry", "--output", str(output), *arguments])
        main()
        rows = [json.loads(text) for text in output.read_text(encoding="utf-8").splitlines()]
        assert all(row.pop("provenance")["versions"] for row in rows)
        return rows

    return call


def test_head_latency_has_a_row_for_every_stage_of_every_head(run, monkeypatch) -> None:
    monkeypatch.setattr(head_latency, "DRY_CONCURRENCIES", (2,))
    monkeypatch.setattr(head_latency, "DRY_REPEATS", 1)
    rows = run(head_latency.main)
    versions = ("eager", "captured") if torch.cuda.is_available() else ("eager",)
    stages = (*head_latency.STAGES, head_latency.BLOCK)
    expected = [(head, stage, version) for head in HEADS for stage in stages for version in versions]
    assert [(row["head"], row["stage"], row["version"]) for row in rows] == expected
    where = {"kind", "geometry", "head", "concurrency", "context", "device", "stage", "version"}
    for row in rows:
        assert row.keys() - {"graph_agreement"} == where | TIMES | WORK and row["concurrency"] == 2
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
    for head in HEADS:
        work = {row["stage"]: row["bytes"] for row in rows if row["head"] == head}
        assert work.pop("block") == sum(work.values())


@torch.no_grad()
def test_the_stages_are_those_of_the_step_and_their_work_is_counted() -> None:
    target = random_target(TOY, "cpu", torch.float32)
    model = random_draft_model(TOY, target, "lilicorr", torch.float32)
    block = head_latency.Block(target, model, 2, 70)
    stages = head_latency.stages_of(block)
    proposal, output = stages["speculative head"].run(), block.run()
    verdict = stages["accept"].run()
    accepted = verdict.num_accepted
    assert torch.equal(output[:, -2], accepted) and torch.equal(output[torch.arange(2), accepted], verdict.next_ids)
    assert torch.equal(block.arguments["forward"][0][:, 1:], proposal.token_ids)
    assert (block.state.lengths[:2] == 70 + accepted + 1).all()
    block.reset()
    assert (block.state.lengths[:2] == 70).all()

    matrices = [p for name, p in target.model.named_parameters() if p.dim() == 2 and "embed" not in name]
    weights = sum(p.numel() for p in matrices)
    slots, positions = model.spec.num_slots, 2 * (model.spec.num_slots + 1)
    attention = 4 * positions * (70 + slots + 1) * TOY.num_layers * TOY.num_heads * TOY.head_dim
    assert stages["target verify"].num_operations == 2 * positions * weights + attention
    cached = 2 * 2 * (70 + slots + 1) * TOY.num_layers * TOY.num_kv_heads * TOY.head_dim
    assert stages["target verify"].num_bytes == 4 * (weights + cached + positions * TOY.vocab_size)
    assert stages["LM head"].num_bytes == 4 * TOY.vocab_size * (TOY.hidden_size + 2 * slots)
    head = sum(p.numel() for p in model.head.parameters())
    assert stages["speculative head"].num_bytes == 4 * (head + 2 * slots * TOY.vocab_size)


def test_a_graph_must_give_what_the_calls_gave() -> None:
    scores, ids = torch.tensor([1.0, 2.0]), torch.arange(4)
    assert head_latency.agreement("x", [scores], [scores]) == 1.0
    assert head_latency.agreement("x", [ids], [torch.tensor([0, 1, 2, 9])]) == 0.75
    with pytest.raises(RuntimeError, match="x: the captured"):
        head_latency.agreement("x", [scores], [scores + 0.1])


def test_a_head_that_fails_is_reported_and_the_others_go_on(monkeypatch, capsys) -> None:
    done = []

    def bench_head(_size: Any, _target: Any, head: str, *_: Any) -> None:
        if head == "domino":
            raise RuntimeError("no kernel for this card")
        done.append(head)

    monkeypatch.setattr(head_latency, "bench_head", bench_head)
    monkeypatch.setattr(decode, "check", lambda *_: None)
    with pytest.raises(SystemExit, match="not measured: domino"):
        head_latency.bench(TOY, True, RowFile(None))
    assert done == [head for head in HEADS if head != "domino"] and "no kernel for this card" in capsys.readouterr().err


def test_decode_of_random_weights(run) -> None:
    rows = run(decode.main, "--geometry", "8b")
    systems = [(row["system"], row["concurrency"]) for row in rows]
    assert systems == [(name, c) for name in ("autoregressive", "argmax", "lilicorr") for c in (1, 2)]
    for row in rows:
        assert row["kind"] == "decode" and row["geometry"] == "toy" and row["profile"] is None
        assert row["num_prompts"] == row["concurrency"] and row["num_tokens"] == 8 * row["concurrency"]
        assert 0 < row["blocks_per_s"]["low"] <= row["blocks_per_s"]["high"] <= row["tokens_per_s"]["high"]


def test_checkpoints_are_named_by_their_run_and_read_their_own_layers(tmp_path: Path, monkeypatch) -> None:
    folders = [tmp_path / "train" / run / "final" for run in ("dflash", "lilicorr")] + [tmp_path / "published"]
    assert decode.named(folders) == dict(zip(("dflash", "lilicorr", "published"), folders))
    for other, name in ((tmp_path / "elsewhere" / "dflash" / "final", "dflash"), (tmp_path / "transformers",) * 2):
        with pytest.raises(ValueError, match=f"{other} would be measured as '{Path(name).name}'"):
            decode.named([*folders, other])
    layers = {tmp_path / "a": (1, 3), tmp_path / "b": (1, 3), tmp_path / "c": (1, 4)}
    monkeypatch.setattr(decode, "captured_layers", layers.__getitem__)
    assert decode.captured_by({"a": tmp_path / "a", "b": tmp_path / "b"}) == (1, 3)
    with pytest.raises(ValueError, match=r"the same layers of the target .* got a \[1, 3\], c \[1, 4\]"):
        decode.captured_by({"a": tmp_path / "a", "c": tmp_path / "c"})


def test_kernels_are_timed_on_a_gpu_only(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit):
        kernels.main()
    assert "error: no GPU here: the kernels are timed on one; --dry" in capsys.readouterr().err


@pytest.mark.parametrize("bench", [decode, verify_cost])
def test_what_cannot_be_measured_ends_in_one_line(bench, tmp_path: Path, monkeypatch, capsys) -> None:
    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit):
            bench.main()
        return capsys.readouterr().err

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU here" in refused("--geometry", "8b")
    where = ("--profile", "tiny", "--run-dir", str(tmp_path))
    assert f"error: not prepared: {tmp_path / 'tiny' / 'prepare' / 'held_out.parquet'} is missing" in refused(*where)
    (tmp_path / "tiny" / "prepare").mkdir(parents=True)
    (tmp_path / "tiny" / "prepare" / "held_out.parquet").touch()
    assert "error: not trained: " in refused(*where)
    assert "is not a draft model: config.json is missing" in refused(*where, "--checkpoint", str(tmp_path / "none"))

    def load_target(_config: Any, _device: str, layer_ids: tuple[int, ...]) -> None:
        raise ValueError(f"captures {layer_ids}")

    monkeypatch.setattr(decode, "captured_layers", lambda _: (2, 5))
    monkeypatch.setattr(decode, "load_target", load_target)
    assert "error: captures (2, 5)" in refused(*where, "--checkpoint", str(tmp_path / "none"))
    if bench is decode:
        assert "error: captures ()" in refused(*where, "--target-only")
        assert "error: --target-only measures a profile's target: not with" in refused("--dry", "--target-only")


def test_verify_cost_has_a_time_for_every_width_and_compares(run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify_cost, "ROUNDS", 1)
    monkeypatch.setattr(decode, "HEADS", {"lilicorr": HEADS["lilicorr"]})
    rows = run(verify_cost.main)
    assert [row["kind"] for row in rows] == 3 * ["verify_cost"] + ["trimmed"]
    assert [row["width"] for row in rows[:3]] == [2, 3, 4] and all(row["milliseconds"]["low"] > 0 for row in rows[:3])
    printed = capsys.readouterr().out
    table = json.loads(printed.splitlines()[0].partition("verify_costs: ")[2])
    assert [entry[:2] for entry in table] == [[2, 2], [2, 3], [2, 4]]
    whole, trimmed = rows[3]["whole"], rows[3]["trimmed"]
    assert whole["mean_drafted"] == 3.0 >= trimmed["mean_drafted"] > 0 and trimmed["tau"] >= 1.0


def test_train_step_has_a_row_for_each_variant(run) -> None:
    rows = run(train_step.main)
    assert [row["variant"] for row in rows] == ["target", "features"]
    for row in rows:
        assert row["kind"] == "train_step" and row["tokens"] == 2 * train_step.DRY_LENGTH and row["blocks"] == 12
        assert row["operations"] == 2 * sum(row["parts"].values()) and row["tokens_per_s"]["low"] > 0
    whole, given = (row["parts"] for row in rows)
    assert {**given, "target": whole["target"]} == whole and whole["target"] > 0


def test_a_training_step_that_is_wrong_is_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(train_step.Trainer, "step", lambda self, step: {"loss": float("nan")})
    with pytest.raises(RuntimeError, match="loss of a toy step is nan"):
        train_step.check("lilicorr")


@torch.no_grad()
def test_operations_of_the_drafter_are_those_it_does() -> None:
    target, length, num_blocks = random_target(TOY, "cpu", torch.float32), 30, 5
    model = random_draft_model(TOY, target, "lilicorr", None)
    shape, block_size, drafter = model.shape, model.spec.block_size, model.drafter
    features = torch.zeros(1, length, shape.num_captured_layers * shape.hidden_size)
    embeds = torch.zeros(1, num_blocks, block_size, shape.hidden_size)
    with FlopCounterMode(display=False) as counter:
        drafter(embeds, torch.arange(num_blocks)[None], drafter.context_kv(drafter.fuse(features)))
    # the attention there multiplies with the whole row and masks; half of it is seen in the mean
    width = shape.num_heads * shape.head_dim
    masked = 4 * shape.num_layers * num_blocks * block_size * length / 2 * width
    assert counter.get_total_flops() == train_step.drafter_operations(model, length, num_blocks) + masked


def gpu_rows() -> list[dict[str, Any]]:
    """Rows as a GPU gives them."""
    times = {"median_us": 200.0, "floor_us": 100.0, "share_of_floor": 0.5, "version": "captured"}
    stages = (*head_latency.STAGES, head_latency.BLOCK)
    where = {"kind": "head_latency", "geometry": "qwen3-8b", "head": "lilicorr", "concurrency": 1}
    rates = {name: {"median": 500.0, "low": 400.0, "high": 600.0} for name in ("tokens_per_s", "blocks_per_s")}
    step = {"variant": "target", "head": "lilicorr", "utilisation": 0.4, "peak_gib": 60.0}
    kernel = {**times, "version": "triton", "kernel": "accept", "concurrency": 32}
    return [
        *({**where, **times, "stage": stage} for stage in stages),
        *({**where, **times, "stage": stage, "version": "eager", "median_us": 900.0} for stage in stages),
        {"kind": "kernel", "geometry": "qwen3-8b", **kernel},
        {"kind": "decode", "profile": None, "geometry": "qwen3-8b", "system": "lilicorr", "concurrency": 8, **rates},
        {"kind": "train_step", "geometry": "qwen3-8b", **step, **rates},
    ]


def test_plots_and_table_come_from_the_newest_rows(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path)])
    with pytest.raises(SystemExit):
        plots.main()
    assert f"error: no rows in {tmp_path}: it must hold .jsonl files of the benches" in capsys.readouterr().err
    dated = [{**row, "provenance": {"date": "2026-02-01"}} for row in gpu_rows()]
    older = {**dated[6], "median_us": 777_000.0, "provenance": {"date": "2026-01-01"}}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dated))
    (tmp_path / "b.jsonl").write_text(json.dumps(older) + "\n")
    plots.main()
    assert {path.name for path in tmp_path.glob("*.png")} == {"kernels.png", "stages.png", "decode.png"}
    block, kernel, rates, step = capsys.readouterr().out.splitlines()
    assert "block    0.200 ms  2.00 x floor" in block and "200.0 us   50% of floor" in kernel
    assert "500.0 blocks_per_s" in rates and "60.0 GiB  40% utilisation" in step


def test_the_readme_quotes_the_newest_rows() -> None:
    root = SCRIPT.parents[1]
    texts = (root / "benches" / "results" / "decode.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, texts), key=lambda row: row["provenance"]["date"])
    newest = {(r["system"], r["concurrency"]): r for r in rows if r["kind"] == "decode" and r["profile"] == "demo"}
    section = (root / "README.md").read_text(encoding="utf-8").partition("## Decoding speed")[2].partition("\n## ")[0]
    quoted = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    systems = {system for system, _ in newest}
    assert {name.partition(",")[0] for name, *_ in quoted[2:]} == systems and len(systems) > 2
    for name, tau, *speeds in quoted[2:]:
        for concurrency, speed in zip(map(int, quoted[0][2:]), speeds, strict=True):
            row = newest.get((name.partition(",")[0], concurrency))
            assert speed == (f"{row['tokens_per_s']['median']:.0f}" if row else ""), (name, concurrency)
            assert row is None or tau == ("" if row["tau"] is None else f"{row['tau']:.2f}"), name


def script(
    out: Path, *arguments: str, python: str = sys.executable, seconds: int = 0
) -> subprocess.CompletedProcess[str]:
    """benches/gpu.sh with another Python, as if it had begun so many seconds ago."""
    environment = {**os.environ, "PYTHON": python, "OMP_NUM_THREADS": "1", "SECONDS": str(seconds)}
    return subprocess.run(["bash", str(SCRIPT), str(out), *arguments], env=environment, capture_output=True, text=True)


def test_the_script_goes_on_where_a_part_fails(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in *benches.decode*) exit 3;; esac\n')
    python.chmod(0o755)
    done = script(tmp_path / "out", "--dry", python=str(python))
    assert done.returncode == 1
    states = states_of(done)
    assert states.pop("decode") == "failed, status 3" and set(states.values()) == {"ok"}
    assert set(states) == {"parity", "kernels", "head_latency_8b", "head_latency_4b", "train_step", "plots"}
    assert "--geometry 4b --dry" in (tmp_path / "out" / "head_latency_4b.log").read_text()
    for wrong in (["--fast"], ["--dry", "more"], ["--pack", str(tmp_path)], ["--train-s", "3"]):
        assert script(tmp_path / "out", *wrong).returncode == 2
    assert script(Path("--dry")).returncode == 2


def states_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """How every part ended."""
    return {line.split()[0]: line.split(" s  ")[1] for line in done.stdout.splitlines() if " s  " in line}


def test_the_script_ends_within_six_minutes(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *decode*) sleep 60;; esac\n')
    python.chmod(0o755)
    done = script(tmp_path / "late", python=str(python), seconds=330)
    states = states_of(done)
    assert done.returncode == 1 and states["decode"].startswith("cut off after ") and states["plots"] == "ok"
    assert states["train_step"] == "not begun, the time was over"
    over = states_of(script(tmp_path / "over", python=str(python), seconds=340))
    assert over.pop("plots") == "ok" and set(over.values()) == {"not begun, the time was over"} and len(over) == 7
    dry = states_of(script(tmp_path / "dry", "--dry", python="true", seconds=400))
    assert set(dry.values()) == {"ok"}


def test_the_script_hands_its_options_to_the_real_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ran $*"\n')
    python.chmod(0o755)
    out, work = tmp_path / "out", tmp_path / "work"
    options = ["--dry", "--work", str(work), "--train-s", "3"]
    done = script(Path("real"), str(out), *options, python=str(python))
    assert done.returncode == 0, done.stderr
    expected = f"ran -m benches.real --out {out} --work {work} --train-s 3 --dry"
    assert (out / "real.log").read_text().strip() == expected
    assert [line.split()[0] for line in done.stdout.splitlines() if " s  ok" in line] == ["real", "plots"]
    for wrong in ([], ["--pack"], [str(out), "--work"], [str(out), "more"]):
        assert script(Path("real"), *wrong).returncode == 2


@pytest.mark.slow
def test_the_script_runs_every_part_at_toy_size(tmp_path: Path) -> None:
    done = script(tmp_path / "out", "--dry")
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.name for path in (tmp_path / "out").iterdir()}
    benches = ("kernels", "head_latency_8b", "head_latency_4b", "decode", "train_step")
    assert {f"{name}.jsonl" for name in benches} | {"stages.png", "decode.png"} <= files
