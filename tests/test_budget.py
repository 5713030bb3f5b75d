"""The budget of a step counts what really happens, and for the paper's size it is near the published figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from lilicorr.budget import PeakMemory, step_budget
from lilicorr.config import DrafterConfig, RunConfig, TrainConfig, load_profile
from lilicorr.deal import ANCHOR_COST
from pipelines import estimate

PROFILES = Path(__file__).parents[1] / "pipelines" / "profiles"
SMALL = Qwen3Config(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
)
CONFIG = TrainConfig(drafter=DrafterConfig(num_layers=2, block_size=5, num_candidates=4), chunk_blocks=4)
HEADS = {"argmax": {}, "lilicorr": {"hidden_size": 16, "num_heads": 2, "factor_dim": 16}}


def test_peak_memory_is_what_is_alive_at_once() -> None:
    given = torch.ones(1000)
    with PeakMemory() as memory:
        first = given + 1
        view = first[:10]
        second = given * 2
        del second
        third = torch.cat([first, first])
        del first
    assert (memory.alive, memory.peak, memory.largest) == (4000 + 8000, 12_000, 8000) and view.sum() == 20
    del view, third
    assert memory.alive == 0 and memory.peak == 12_000


@pytest.mark.parametrize("head", HEADS)
def test_parts_add_up_and_grow_with_what_they_depend_on(head: str) -> None:
    run = RunConfig(head=head, head_config=HEADS[head], steps=1)
    few, many = (step_budget(CONFIG, run, SMALL, torch.bfloat16, 40, blocks, 1) for blocks in (8, 32))
    assert few["bytes"].keys() == many["bytes"].keys() and all(size > 0 for size in many["bytes"].values())
    assert many["operations"]["micro-batches done again"] == 0
    weights = few["bytes"]["trained weights, fp32"]
    assert few["bytes"]["their gradient"] == weights and few["bytes"]["AdamW's moments"] == 2 * weights
    fixed = {name for name in few["bytes"] if "activations" not in name and "loss" not in name}
    assert all(few["bytes"][name] == many["bytes"][name] for name in fixed)
    activations = [budget["bytes"]["activations of the drafter"] for budget in (few, many)]
    assert 2 < activations[1] / activations[0] < 4.1
    assert few["operations"]["target"] == many["operations"]["target"]
    growth = many["operations"]["loss and backward"] / few["operations"]["loss and backward"]
    assert 2.5 < growth < 4.1


def test_a_step_holds_the_states_of_all_its_rows_and_does_most_of_them_again_on_a_gpu() -> None:
    """One row, four one by one on a GPU and on a CPU, and four at once."""
    run = RunConfig(head="argmax", steps=1)
    changes: list[dict[str, float]] = [{}, {}, {"gpus_per_worker": 0.0}, {"micro_batch_size": 4}]
    configs = [replace(CONFIG, **change) for change in changes]
    one, gpu, cpu, at_once = (
        step_budget(config, run, SMALL, torch.bfloat16, 40, 8, rows) for config, rows in zip(configs, (1, 4, 4, 4))
    )
    states, kept = "captured and final states", "activations of the drafter"
    assert {found["bytes"][states] / one["bytes"][states] for found in (gpu, cpu, at_once)} == {4.0}
    assert (gpu["bytes"][kept], cpu["bytes"][kept]) == (one["bytes"][kept], 4 * one["bytes"][kept])
    assert 3.5 < at_once["bytes"][kept] / one["bytes"][kept] < 4.5
    again = {key: found["operations"]["micro-batches done again"] for key, found in enumerate((one, gpu, cpu, at_once))}
    assert again[0] == again[2] == again[3] == 0
    forward = one["operations"]["drafter forward"]
    assert 0.75 * forward < again[1] < 0.75 * (forward + one["operations"]["loss and backward"] / 2)
    for part in ("drafter forward", "loss and backward"):
        assert at_once["operations"][part] == pytest.approx(one["operations"][part], rel=0.02)


@pytest.mark.parametrize("rows", [1, 3])
def test_sharded_layers_are_held_in_part_and_gathered_for_their_passes(rows: int) -> None:
    """A quarter of a layer stays, 16 bytes a weight; with several micro-batches all layers are whole for a while."""
    run = RunConfig(head="argmax", steps=1)
    whole, sharded = (
        step_budget(replace(CONFIG, **changes), run, SMALL, torch.bfloat16, 40, 8, rows)["bytes"]
        for changes in ({}, {"sharding": "fsdp2", "num_workers": 4})
    )
    layer = 2 * 32 * 8 * (4 + 2) + 3 * 32 * 64 + 2 * 32 + 2 * 8
    saved = 0.75 * 2 * layer
    for name, size in (("trained weights, fp32", 4), ("their gradient", 4), ("AdamW's moments", 8)):
        assert whole[name] - sharded[name] == pytest.approx(size * saved), name
    gathered = sharded["layers gathered, and their gradient until it is reduced"]
    assert gathered == 8 * layer * (1 if rows == 1 else 2)
    assert set(sharded) - set(whole) == {"layers gathered, and their gradient until it is reduced"}


def test_the_corpus_is_stated_or_measured(tmp_path: Path) -> None:
    config = replace(load_profile("paper_8b", PROFILES), run_dir=str(tmp_path))
    assert estimate.find_corpus(config, None, None).num_rows == 1_397_187
    assert estimate.find_corpus(config, 500, 90.0).mean_answer == pytest.approx(67.5)
    with pytest.raises(ValueError, match="give --rows and --length, both or neither"):
        estimate.find_corpus(config, 500, None)
    demo = replace(load_profile("demo", PROFILES), run_dir=str(tmp_path))
    with pytest.raises(ValueError, match="--rows must be at least 1 and --length at least 2 and finite, got 0"):
        estimate.find_corpus(config, 0, 90.0)
    with pytest.raises(ValueError, match="there is no training set in .* yet"):
        estimate.find_corpus(demo, None, None)
    folder = demo.directory / "train" / "training_set"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text('{"rows": 4, "tokens": 400, "supervised_tokens": 100}')
    found = estimate.find_corpus(demo, None, None)
    assert (found.num_rows, found.mean_length, found.mean_answer) == (4, 100.0, 25.0)


def test_workers_wait_for_the_busiest_one() -> None:
    """With as many workers as rows nothing can be balanced; with one there is nobody to wait for."""
    config = load_profile("paper_8b", PROFILES).train
    corpus = estimate.Corpus(1000, 1000.0, 750.0, "stated")
    workers = (1, 8, 16, 32, 64)
    shares = [estimate.busiest_share(replace(config, num_workers=count), corpus) for count in workers]
    assert shares == pytest.approx([1.0, 1.01, 1.03, 1.15, 1.58], abs=0.02)
    assert shares == sorted(shares)
    assert [estimate.rows_per_worker(replace(config, num_workers=count)) for count in (32, 24, 64)] == [2, 3, 1]


@pytest.mark.parametrize("source", estimate.PUBLIC)
def test_the_public_targets_have_their_published_sizes(source: str, target_factory: Callable) -> None:
    config = estimate.target_config(replace(load_profile("paper_8b", PROFILES).target, source=source))
    published = {"Qwen/Qwen3-8B": 8.19e9, "Qwen/Qwen3-4B": 4.02e9}[source]
    layers = config.num_hidden_layers * (
        2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
        + 3 * config.hidden_size * config.intermediate_size
    )
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    assert (layers + tables) / published == pytest.approx(1, abs=0.003)


def test_the_command_refuses_what_it_does_not_do_and_says_what_it_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        estimate.main(["--estimate", "--profile", "tiny", "--dry-run"])
    assert end.value.code == 2 and "knows no --status and no --dry-run" in capsys.readouterr().err

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We could not connect\nto the hub")

    monkeypatch.setattr("lilicorr.target.AutoConfig.from_pretrained", unreachable)
    options = ["--profile", "tiny", "--set", "target.source=some/model", "--rows", "9", "--length", "9"]
    with pytest.raises(SystemExit, match="^error: target.source 'some/model' is neither .*: We could not connect$"):
        estimate.main(options)


@pytest.mark.slow
def test_the_paper_run_is_near_what_public_reports_lead_to(capsys: pytest.CaptureFixture[str]) -> None:
    """The ranges stand for an 8B target with everything in bf16 and fp32 masters, and 1.4 million rows, six times."""
    config = load_profile("paper_8b", PROFILES, ["train.runs.dflash.epochs=0.001"])
    found = estimate.estimate(config, estimate.find_corpus(config, None, None), 0.4)["runs"]["lilicorr"]
    parts = found["bytes"]
    static = (
        sum(parts[name] for name in ("target's weights", "trained weights, fp32", "their gradient", "AdamW's moments"))
        + parts["bf16 copies of the weights"]
    )
    assert 34e9 * 0.8 < static < 36e9 * 1.2 and sum(parts.values()) < 80e9
    assert 93e12 * 0.8 < sum(found["operations"].values()) < 106e12 * 1.2
    operations = found["operations"]
    blocks = sum(operations.values()) - operations["target"]
    assert (blocks / 512) / (operations["target"] / 1000) == pytest.approx(ANCHOR_COST, rel=0.05)
    assert found["steps"] == 130_992 and 500 * 0.8 < found["gpu_hours"] < 700 * 1.2
