"""pipelines/prepare.py: what it says of the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

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


def test_of_several_templates_the_default_one_counts(tmp_path: Path) -> None:
    config = TargetConfig(source=str(tiny_target_folder(tmp_path / "target")))
    alone = describe_target(config)
    tokenizer = AutoTokenizer.from_pretrained(config.source)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(config.source)
    assert isinstance(AutoTokenizer.from_pretrained(config.source).chat_template, dict)
    assert describe_target(config)["template_hash"] == alone["template_hash"]


def test_a_folder_is_described_by_what_it_holds(tmp_path: Path) -> None:
    """A target that was moved goes on with the work that was done with it."""
    first = tiny_target_folder(tmp_path / "target")
    second = shutil.copytree(first, tmp_path / "elsewhere" / "model")
    described, again = (describe_target(TargetConfig(source=str(folder))) for folder in (first, second))
    assert described == again and described["source"] is None and described["files_hash"]
    assert str(tmp_path) not in json.dumps(described)
    (second / "notes.txt").write_text("x")
    assert describe_target(TargetConfig(source=str(second))) != described
    assert describe_target(TargetConfig())["source"] == "embedded"
