"""The runs that the tests of the training stage train, and ways to change them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lilicorr.config import DrafterConfig, PipelineConfig, RunConfig

HEAD = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "factor_dim": 16}
RUNS = {
    "trunk": RunConfig(head="argmax", steps=5, schedule="constant"),
    "lilicorr": RunConfig(head="lilicorr", head_config=HEAD, start_from="trunk", steps=6),
}


def shape(**changes: Any) -> DrafterConfig:
    """The drafter of these tests, changed."""
    return DrafterConfig(**({"num_layers": 2, "block_size": 4, "num_candidates": 3} | changes))


def with_head(**changes: Any) -> dict[str, RunConfig]:
    """The runs of these tests, the head changed."""
    return RUNS | {"lilicorr": replace(RUNS["lilicorr"], head_config=HEAD | changes)}


def with_train(config: PipelineConfig, **changes: Any) -> PipelineConfig:
    return replace(config, train=replace(config.train, **changes))
