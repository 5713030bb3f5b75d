"""The training stage with sharded layers: two workers, without Ray, leave what one leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_train import entries
from training_runs import RUNS, with_train

from lilicorr.checkpoint import read_checkpoint
from lilicorr.config import PipelineConfig
from pipelines import train


def sharded_rank(rank: int, folder: Path, job: train.Job) -> None:
    """One of two workers of a run, without Ray."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    train.train_run(job, torch.device("cpu"), lambda metrics: None)
    dist.destroy_process_group()


def test_sharded_workers_leave_what_one_leaves(
    config: PipelineConfig,
    in_process: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States, measured acceptance and the final checkpoint need the whole model, of which each worker has a part."""
    runs = {"trunk": RUNS["trunk"]}
    one = train.run(with_train(config, runs=runs, eval_steps=2))["runs"]["trunk"]
    expected = entries(config, "trunk")
    again = replace(config, profile="sharded")
    (tmp_path / "sharded").mkdir()
    for name in ("prepare", "regenerate"):
        (tmp_path / "sharded" / name).symlink_to(config.directory / name)

    def fit(job: train.Job) -> None:
        mp.start_processes(sharded_rank, args=(tmp_path, job), nprocs=2, start_method="fork")

    monkeypatch.setattr(train, "fit", fit)
    changes = {"runs": runs, "eval_steps": 2, "sharding": "fsdp2", "num_workers": 2}
    two = train.run(with_train(again, **changes))["runs"]["trunk"]
    assert (two["identity"], two["steps"], two["num_blocks"]) == (one["identity"], 5, one["num_blocks"])
    found = entries(again, "trunk")
    assert [entry["step"] for entry in found] == [entry["step"] for entry in expected]
    for key in ("loss", "tau"):
        values, wanted = ([entry[key] for entry in log if key in entry] for log in (found, expected))
        assert values == pytest.approx(wanted, rel=1e-3) and len(values) >= 3
    folders = [one.directory / "train" / "trunk" for one in (config, again)]
    shapes = [{name: t.shape for name, t in read_checkpoint(folder / "final").tensors.items()} for folder in folders]
    assert shapes[0] == shapes[1]
    assert sorted(path.name for path in (folders[1] / "checkpoints").iterdir()) == ["step_2", "step_4"]
