"""A run directory as training finds it, the runs that its tests train there, and ways to change them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_shards import turn, write_regeneration
from lilicorr.config import DrafterConfig, PipelineConfig, RunConfig, TargetConfig, TrainConfig
from lilicorr.prompts import Conversation, write_conversations
from lilicorr.provenance import write_json
from lilicorr.tiny import tiny_target_folder
from pipelines import train
from pipelines.prepare import describe_target

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


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the outputs of the stages before: a random target and 12 conversations of random bytes."""
    folder = tmp_path_factory.mktemp("inputs") / "test"
    target = TargetConfig(source=str(tiny_target_folder(folder.parent / "target")))
    write_json(folder / "prepare" / "target.json", describe_target(target))
    messages = [{"role": "user", "content": "What is a lattice?"}]
    held_out = [Conversation(cid, messages, "test", "test", cid) for cid in ("a", "b")]
    write_conversations(folder / "prepare" / "held_out.parquet", held_out)
    ids = torch.randint(0, 256, (12, 30), generator=torch.Generator().manual_seed(0)).tolist()
    turns = [turn(f"c{i:02d}", 0, row[:8], row[8 : 14 + i]) for i, row in enumerate(ids)]
    write_regeneration(folder / "regenerate", turns, shard_size=5)
    return folder


@pytest.fixture
def config(inputs: Path, tmp_path: Path) -> PipelineConfig:
    """The config of those inputs, in a run directory of its own."""
    (tmp_path / "test").mkdir()
    for name in ("prepare", "regenerate"):
        (tmp_path / "test" / name).symlink_to(inputs / name)
    settings = TrainConfig(
        runs=RUNS,
        drafter=shape(),
        batch_size=4,
        micro_batch_size=2,
        max_length=64,
        max_anchors=8,
        precision="float32",
        checkpoint_steps=2,
        log_steps=1,
        gpus_per_worker=0.0,
    )
    target = TargetConfig(source=str(inputs.parent / "target"))
    return PipelineConfig(profile="test", run_dir=str(tmp_path), target=target, train=settings)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train in this process instead of on Ray; the names of the runs that were trained, in order."""
    trained: list[str] = []

    def fit(job: train.Job) -> None:
        trained.append(job.name)
        train.train_run(job, torch.device("cpu"), lambda metrics: None)

    monkeypatch.setattr(train, "fit", fit)
    return trained
