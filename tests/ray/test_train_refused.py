"""What the training stage refuses before anything starts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_runs import RUNS, shape, with_head, with_train

from lilicorr.checkpoint import save_draft_model
from lilicorr.config import DrafterConfig, PipelineConfig, RunConfig
from lilicorr.draft_model import build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.target import load_target
from pipelines import inputs as dry_run
from pipelines import train
from test_checkpoint import edit_config, with_value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": {}}, "train.runs is empty"),
        (
            {"runs": {"a": RunConfig(head="medusa", steps=1)}},
            "train.runs.a.head must be one of argmax, domino, dspark, lilicorr",
        ),
        ({"runs": {"a": RunConfig()}}, "exactly one of epochs and steps"),
        ({"runs": {"a": RunConfig(head="argmax", steps=1, start_from="b")}}, "there is none.*got 'b'"),
        ({"runs": {"a": RunConfig(steps=1), "b": RunConfig(steps=1, start_from="b")}}, r"before it \(a\) or .*got 'b'"),
        (
            {"runs": {"a": RunConfig(steps=1, start_from="./no/where")}},
            "a.start_from: there is no folder .*no/where; .*hf down",
        ),
        ({"runs": {"a": RunConfig(steps=1, head_config={"widht": 3})}}, "unknown key train.runs.a.head_config.widht"),
        ({"runs": {"training_set": RunConfig(steps=1)}}, "train.runs.training_set: a run's name"),
        ({"runs": {"../a": RunConfig(steps=1)}}, r"train.runs.\.\./a: a run's name"),
        ({"drafter": DrafterConfig(num_layers=6)}, "6 distinct layers cannot be captured"),
        (
            {"drafter": shape(target_layer_ids=(2, 6))},
            r"train.drafter: target_layer_ids \[2, 6\] are past the target's 6",
        ),
        ({"layout": "packed"}, "layout must be one of turn, conversation, got 'packed'"),
        ({"precision": "fp8"}, "train.precision must be one of bfloat16, float32, got 'fp8'"),
        ({"attention": "flash"}, "train.attention must be one of auto, flex, sdpa, parts, got 'flash'"),
        ({"attention": "flex"}, "train.attention flex has a backward pass on CUDA only, the workers are on cpu"),
        ({"sharding": "zero"}, "train.sharding must be one of none, fsdp2, got 'zero'"),
        ({"sharding": "fsdp2"}, "train.sharding fsdp2 spreads layers over at least 2 workers, there is 1"),
        ({"sharding": "fsdp2", "num_workers": 2, "min_workers": 1}, "at least 2 workers, there is 1"),
        ({"drafter": shape(num_heads=3)}, "train.runs.trunk: num_kv_heads must divide num_heads 3, got 2"),
        ({"drafter": shape(head_dim=-4)}, "train.runs.trunk: head_dim of a drafter must be at least 1, got -4"),
        ({"drafter": shape(num_candidates=0)}, "train.runs.trunk: num_candidates must be at least 1, got 0"),
        ({"drafter": shape(num_candidates=265)}, "train.runs.trunk: num_candidates must be at most the target's 264 "),
        (
            {"drafter": shape(num_candidates=33), "gpus_per_worker": 1.0},
            "train.runs.trunk: num_candidates must be in 1..32 on a GPU, got 33",
        ),
        ({"drafter": shape(block_size=1)}, "train.runs.trunk: block_size must be at least 2 in_place, got 1"),
        ({"runs": with_head(hidden_size=17)}, "train.runs.lilicorr: num_heads must divide .* 17, got 2"),
        ({"runs": with_head(num_heads=0)}, "train.runs.lilicorr: num_heads must divide .* 16, got 0"),
        ({"runs": with_head(factor_dim=-1)}, "train.runs.lilicorr.head_config.factor_dim must not be negative, got -1"),
        ({"runs": with_head(hidden_size=0, token_scale=3.0)}, "train.runs.lilicorr: token_scale must .* hidden_size 0"),
        (
            {"runs": with_head(margin_blend=5)},
            r"train.runs.lilicorr: margin_blend of the head must be in \[0, 1\], got 5",
        ),
        ({"runs": with_head(ramp_fraction=-0.5)}, "train.runs.lilicorr: ramp_fraction of the head must be in"),
        ({"runs": with_head(head_weight=-0.25)}, "train.runs.lilicorr: head_weight of the head must not be negative"),
        ({"runs": with_head(decay=0)}, "train.runs.lilicorr: decay of the head must be a number above 0, got 0"),
        ({"runs": with_head(dpace_alpha=1.5)}, "train.runs.lilicorr: dpace_alpha of the head must be in"),
        ({"runs": with_head(walk="long")}, "train.runs.lilicorr: walk must be one of "),
        (
            {"drafter": shape(init="target", intermediate_size=8)},
            r"train.runs.trunk cannot start from the target's layers \(train.drafter.init\): mlp.gate_proj.weight of ",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(
    config: PipelineConfig, in_process: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train.run(with_train(config, **changes))
    assert not in_process


def test_a_start_that_does_not_fit_is_refused_before_anything_starts(
    config: PipelineConfig, in_process: list[str], tmp_path: Path
) -> None:
    """By its fields alone: the weights are not there. The length that it was made for may be another."""
    folder, target = tmp_path / "published", load_target(config.target, layer_ids=(0, 2))
    drafter = shape(target_layer_ids=(0, 2))
    spec = block_spec(drafter, target.config, target.mask_token_id)
    published = build_draft_model(drafter_shape(drafter, target.config), spec, "argmax", {}, target)
    save_draft_model(folder, published, {}, "float32")
    (folder / "model.safetensors").unlink()
    edit_config(folder, with_value("max_position_embeddings", 77))
    warm = {"warm": replace(RUNS["lilicorr"], start_from=str(folder))}
    wrong = [
        (
            {},
            rf"train.runs.warm.start_from: cannot .*{folder}: its target_layer_ids is \(0, 2\), this run's is \(1, 3\)",
        ),
        ({"block_size": 5, "target_layer_ids": (0, 2)}, "its block_size is 4, this run's is 5"),
        ({"num_layers": 1, "target_layer_ids": (0, 2)}, "its num_layers is 2, this run's is 1"),
    ]
    for changes, message in wrong:
        changed = with_train(config, runs=warm, drafter=shape(**changes))
        with pytest.raises(ValueError, match=message):
            train.run(changed)
        assert re.search(message, dry_run.train(changed)[0])
    fitting = with_train(config, runs=warm, drafter=drafter)
    train.check_runs(fitting, train.read_description(fitting))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="published is not a checkpoint, it has no config.json"):
        train.run(fitting)
    assert not in_process


def test_what_can_be_trained_passes_and_a_dry_run_says_what_cannot(config: PipelineConfig) -> None:
    described = train.read_description(config)
    for changes in (
        {},
        {"drafter": shape(init="target")},
        {"drafter": shape(num_candidates=4), "gpus_per_worker": 1.0},
    ):
        train.check_runs(with_train(config, **changes), described)
    assert dry_run.train(config) == []
    assert dry_run.train(with_train(config, precision="fp8"))[0].startswith("train.precision must be one of ")


def test_a_mask_token_outside_the_vocabulary_is_refused(config: PipelineConfig) -> None:
    described = train.read_description(config) | {"mask_token_id": 264}
    with pytest.raises(ValueError, match="mask token id 264 is outside the target's vocabulary of 264"):
        train.check_runs(config, described)
