"""Whether every run of a profile can be trained, found out before a cluster is asked for anything.

Place in the flow: `pipelines/train.py` asks first of all, `--dry-run` as soon as `prepare` is done. Every run's draft
model is built on the meta device, where shapes are worked out and nothing is allocated, and a block goes through its
drafter; the fields of a checkpoint that it starts from are held against it. Paper: section 4.1.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lilicorr.block_mask import choose_attention
from lilicorr.blocks import check_layer_ids
from lilicorr.checkpoint import check_same_drafter, read_fields
from lilicorr.config import PipelineConfig, RunConfig, TrainConfig, from_dict
from lilicorr.corpus import Sampler
from lilicorr.draft_model import DraftModel, check_blocks, run_block_spec
from lilicorr.drafter import captured_layer_ids, copy_target_layers, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.kernels.topk_lse import check_candidates
from lilicorr.sharding import check_sharding
from lilicorr.target import Target, model_config
from lilicorr.tracking import check_trackers
from lilicorr.training import check_precision, num_steps
from pipelines.start import check_start, is_folder

TRAINING_SET = "training_set"  # folder beside those of the runs
INITS = ("random", "target")  # of the drafter


def check_settings(train: TrainConfig) -> None:
    """Raise ValueError that names run and field for what could be trained on no target."""
    if train.drafter.init not in INITS:
        raise ValueError(f"train.drafter.init must be one of {', '.join(INITS)}, got {train.drafter.init!r}")
    check_precision(train)
    choose_attention(train.attention, torch.device("cuda" if train.gpus_per_worker > 0 else "cpu"))
    check_sharding(train.sharding, train.min_workers or train.num_workers)
    check_trackers(train.trackers)
    if train.drafter.target_layer_ids is not None:
        with _named("train.drafter"):
            check_layer_ids(train.drafter.target_layer_ids)
    if not train.runs:
        raise ValueError("train.runs is empty: name at least one run")
    before: list[str] = []
    for name in train.runs:
        _check_run(train, name, before)
        before.append(name)


def check_runs(config: PipelineConfig, described: dict[str, Any]) -> None:
    """Raise ValueError that names run and field for runs that could not be trained on the `described` target."""
    train = config.train
    check_settings(train)
    if not 0 <= described["mask_token_id"] < described["vocab"]:
        raise ValueError(
            f"mask token id {described['mask_token_id']} is outside the target's vocabulary of {described['vocab']}"
        )
    with _named("train.drafter"):
        captured_layer_ids(train.drafter, described["num_layers"])
    target = model_config(config.target)
    for name, run_config in train.runs.items():
        with _named(f"train.runs.{name}"):
            draft_model = _on_meta(train, run_config, target, described["mask_token_id"])
        if run_config.start_from is not None and is_folder(run_config.start_from):
            folder = Path(os.path.expanduser(run_config.start_from))
            with _named(f"train.runs.{name}.start_from"):
                check_same_drafter(folder, read_fields(folder, target.num_hidden_layers)[1], draft_model)
        if train.drafter.init == "target":
            with _named(f"train.runs.{name} cannot start from the target's layers (train.drafter.init)"):
                _start_from_target(draft_model, target)


def _check_run(config: TrainConfig, name: str, before: list[str]) -> None:
    """Raise ValueError for what is wrong with a run apart from its shape; `before` are the runs in front of it."""
    run_config, where = config.runs[name], f"train.runs.{name}"
    if name == TRAINING_SET or not name.replace("-", "_").isidentifier():
        raise ValueError(f"{where}: a run's name is letters, digits, - and _, and not {TRAINING_SET!r}")
    if run_config.head not in HEADS:
        raise ValueError(f"{where}.head must be one of {', '.join(HEADS)}, got {run_config.head!r}")
    head = from_dict(HEADS[run_config.head].Config, run_config.head_config, f"{where}.head_config.")
    for field, value in dataclasses.asdict(head).items():
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{where}.head_config.{field} must not be negative, got {value}")
    check_start(f"{where}.start_from", run_config.start_from, before)
    check_blocks(name, config)
    num_steps(run_config, Sampler(1, 1, 0))


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Put `where` before what is wrong with a shape."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _on_meta(config: TrainConfig, run_config: RunConfig, target: Any, mask_token_id: int) -> DraftModel:
    """The run's draft model without memory, after a block of one row has gone through its drafter."""
    shape = drafter_shape(config.drafter, target)
    spec = run_block_spec(config.drafter, run_config, target, mask_token_id)
    _check_candidates(spec.num_candidates, shape.vocab_size, on_gpu=config.gpus_per_worker > 0)
    with torch.device("meta"):
        table = torch.empty(shape.vocab_size, shape.hidden_size)
        model = DraftModel(shape, spec, run_config.head, run_config.head_config, table, table)
        features = torch.empty(1, 1, shape.num_captured_layers * shape.hidden_size)
        context_kv = model.drafter.context_kv(model.drafter.fuse(features))
        anchors = torch.zeros(1, 1, dtype=torch.long)
        model.drafter(torch.empty(1, 1, spec.block_size, shape.hidden_size), anchors, context_kv)
    return model


def _check_candidates(num_candidates: int, vocab_size: int, on_gpu: bool) -> None:
    """Raise ValueError for more candidates than tokens, or than the kernels of a GPU take."""
    if num_candidates > vocab_size:
        raise ValueError(f"num_candidates must be at most the target's {vocab_size} tokens, got {num_candidates}")
    if on_gpu:
        check_candidates(num_candidates)


def _start_from_target(draft_model: DraftModel, config: Any) -> None:
    """Copy the layers of a target that has shapes only."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = draft_model.spec
    copy_target_layers(draft_model.drafter, Target(model, None, spec.target_layer_ids, spec.mask_token_id))
