"""Evaluation as a task of a Ray cluster: the same results, errors in one line, and the next one goes on from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lilicorr.config import DrafterConfig, EvaluateConfig, PipelineConfig, SystemConfig, TargetConfig, TrainConfig
from lilicorr.prompts import Conversation, write_conversations
from lilicorr.provenance import write_json
from lilicorr.tiny import tiny_target_folder
from pipelines import evaluate
from pipelines.errors import one_line_errors
from pipelines.prepare import describe_target


@pytest.mark.ray
def test_a_task_measures_and_another_driver_goes_on(
    tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetConfig(source=str(tiny_target_folder(tmp_path / "target")))
    settings = EvaluateConfig(("held_out",), {"autoregressive": SystemConfig()}, max_new_tokens=4, bootstrap_samples=9)
    train = TrainConfig(drafter=DrafterConfig(num_layers=1))  # as many layers of the target are captured
    config = PipelineConfig(profile="p", run_dir=str(tmp_path), target=target, train=train, evaluate=settings)
    with pytest.raises(SystemExit, match="^error: .*held_out.parquet"), one_line_errors():
        evaluate.measure_on_cluster(config, 0.0)
    write_json(config.directory / "prepare" / "target.json", describe_target(target))
    messages = [{"role": "user", "content": "What is a lattice?"}]
    held_out = [Conversation(cid, messages, "test", "test", cid) for cid in ("a", "b")]
    write_conversations(config.directory / "prepare" / "held_out.parquet", held_out)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--profile", "p"])
    assert evaluate.measure_on_cluster(config, 0.0) == {"tau": {"autoregressive": {"held_out": 1.0}}}
    path = config.directory / "evaluate" / "results.json"
    first = json.loads(path.read_text(encoding="utf-8"))
    assert first["provenance"]["command"] == "python evaluate.py --profile p"
    evaluate.measure(config)
    assert json.loads(path.read_text(encoding="utf-8"))["systems"] == first["systems"]  # with the times of the task
