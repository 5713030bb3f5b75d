"""pipelines/prepare.py: what it says of the target."""

from __future__ import annotations

from pathlib import Path

import pytest

from lilicorr import target as targets
from lilicorr.config import TargetConfig
from lilicorr.tiny import tiny_target_folder
from pipelines.prepare import describe_target


def test_a_branch_is_described_by_the_commit_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TargetConfig(source=str(tiny_target_folder(tmp_path / "target")), revision="main")
    assert describe_target(config)["revision"] == "main"  # a folder has no commits
    model = targets.model_config(config)
    model._commit_hash = "0123abcd"
    monkeypatch.setattr(targets, "model_config", lambda _: model)
    assert describe_target(config)["revision"] == "0123abcd"
