"""What the training stage refuses before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from training_runs import shape, with_head, with_train

from lilicorr.config import DrafterConfig, PipelineConfig, RunConfig
from pipelines import inputs as dry_run
from pipelines import train


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
        ({"runs": {"a": RunConfig(steps=1, start_from="./no/where")}}, "a.start_from: .*no/where is not a checkpoint"),
        ({"runs": {"a": RunConfig(steps=1, head_config={"widht": 3})}}, "unknown key train.runs.a.head_config.widht"),
        ({"runs": {"training_set": RunConfig(steps=1)}}, "train.runs.training_set: a run's name"),
        ({"runs": {"../a": RunConfig(steps=1)}}, r"train.runs.\.\./a: a run's name"),
        ({"drafter": DrafterConfig(num_layers=6)}, "6 distinct layers cannot be captured"),
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
