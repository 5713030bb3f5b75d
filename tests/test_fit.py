"""`checkpoint.fit`: a checkpoint that was not made for a target is refused by name, before any weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lilicorr.checkpoint import check_fits, save_draft_model
from lilicorr.config import TargetConfig
from lilicorr.target import Target
from test_checkpoint import edit_config, make

Config = dict[str, Any]
SOURCE = "someone/target-1b"
TARGET_INFO = {"target": {"source": SOURCE, "model_type": "qwen3"}}


@pytest.fixture
def target(target_factory: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> Target:
    """One whose configuration is found under any name."""
    target = target_factory(dtype=torch.float32)
    monkeypatch.setattr("lilicorr.checkpoint.fit.model_config", lambda _config: target.config)
    return target


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    """A checkpoint for it, whose weights nobody can read."""
    save_draft_model(tmp_path / "final", make(target, "argmax"), TARGET_INFO, "float32")
    (tmp_path / "final" / "model.safetensors").write_bytes(b"")
    return tmp_path / "final"


def everywhere(name: str, value: Any) -> Callable[[Config], None]:
    """A field with another value, wherever it stands."""

    def change(config: Config) -> None:
        for place in (config, config["dflash_config"]):
            if name in place:
                place[name] = value

    return change


WRONG = [
    (everywhere("block_size", 6), "config.json: block_size is 6, lilicorr.json beside it says 5"),
    (
        everywhere("layout", "anchor_first"),
        "layout is anchor_first, lilicorr.json beside it says in_place",
    ),
    (everywhere("layout", "sideways"), "layout .* must be in_place or anchor_first, got 'sideways'"),
    (everywhere("mask_token_id", 67), "mask_token_id 67 is outside the target's 67 embeddings"),
    (everywhere("vocab_size", 100), "vocab_size is 100, the target's embedding has 67"),
    (everywhere("hidden_size", 64), "hidden_size is 64, the target's is 32"),
    (everywhere("num_target_layers", 8), "num_target_layers is 8, the target has 6"),
    (everywhere("target_layer_ids", [1, 6]), "target_layer_ids \\[6\\] are past the target's 6 layers"),
    (everywhere("architectures", ["GPT"]), "architectures must be one of"),
]


def test_one_that_fits_is_taken_from_any_name_of_the_target(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "a copy"
    copied.mkdir()
    for config in (TargetConfig(SOURCE), TargetConfig(SOURCE, mask_token_id=66), TargetConfig(str(copied))):
        check_fits(folder, config)


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:24] for _, message in WRONG])
def test_what_does_not_fit_is_refused_by_name(folder: Path, change: Callable[[Config], None], message: str) -> None:
    edit_config(folder, change)
    with pytest.raises(ValueError, match=message):
        check_fits(folder, TargetConfig(SOURCE))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("source", "someone/target-2b", "target.source is someone/target-2b, the target is someone/target-1b; one of"),
        ("model_type", "llama", "target.model_type is llama, the target is a qwen3"),
    ],
)
def test_one_of_another_target_of_the_same_sizes_is_refused(folder: Path, field: str, value: str, message: str) -> None:
    info = json.loads((folder / "lilicorr.json").read_text())
    info["target"][field] = value
    (folder / "lilicorr.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=message):
        check_fits(folder, TargetConfig(SOURCE))


def test_a_mask_token_that_is_set_is_the_checkpoints(folder: Path) -> None:
    with pytest.raises(ValueError, match="mask_token_id is 66, the target's is set to 65"):
        check_fits(folder, TargetConfig(SOURCE, mask_token_id=65))


def test_a_folder_that_is_no_draft_model_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="is not a draft model: config.json is missing"):
        check_fits(folder, TargetConfig(SOURCE))
