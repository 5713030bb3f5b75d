"""`checkpoint.fit`: a checkpoint that was not made for a target is refused by name, before any weights are read, and
weights that cannot take the place of others are refused before those are touched."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lilicorr.checkpoint import (
    check_fits,
    checkpoint_tensors,
    load_draft_model,
    replacement_weights,
    save_draft_model,
    write_weights,
)
from lilicorr.config import TargetConfig, YarnConfig
from lilicorr.draft_model import build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.target import Target
from test_checkpoint import DRAFTER, HEAD, edit_config, make

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


def theta_of_another_target(config: Config) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1e6


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
    (theta_of_another_target, "rope_theta is 1000000.0, the target's is 10000.0"),
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


def test_weights_of_the_same_kind_take_the_place_of_others(target: Target, tmp_path: Path) -> None:
    used, new = make(target), make(target)
    for parameter in new.parameters():
        torch.nn.init.normal_(parameter)
    storages = {name: tensor.data_ptr() for name, tensor in checkpoint_tensors(used).items()}
    save_draft_model(tmp_path / "new", new, TARGET_INFO, "bfloat16")
    tensors = replacement_weights(tmp_path / "new", target, used)
    assert str(tmp_path / "new") not in Path("/proc/self/maps").read_text()
    write_weights(used, tensors)
    for name, tensor in checkpoint_tensors(used).items():
        assert torch.equal(tensor, checkpoint_tensors(new)[name].to(torch.bfloat16).to(tensor.dtype)), name
        assert tensor.data_ptr() == storages[name] and tensor.dtype == torch.float32


OTHER_KINDS = [
    ({"block_size": 6}, {}, {}, "block_size is 6, of the draft model in use it is 5"),
    ({"num_candidates": 2}, {}, {}, "num_candidates is 2, of the draft model in use it is 3"),
    ({"num_layers": 1, "num_captured_layers": 2}, {}, {}, "num_layers is 1, of the draft model in use it is 2"),
    ({}, {"factor_dim": 4}, {}, "head_config.factor_dim is 4, of the draft model in use it is 12"),
    ({}, {}, {"vocab_ids": [0, 1, 2, 5]}, "draft_vocab_size is 4, of the draft model in use it is None"),
]


@pytest.mark.parametrize("drafter, head, others, message", OTHER_KINDS)
def test_a_draft_model_of_another_kind_is_no_replacement(
    target: Target, tmp_path: Path, drafter: Config, head: Config, others: Config, message: str
) -> None:
    used, config = make(target), dataclasses.replace(DRAFTER, **drafter)
    ids = torch.tensor(others["vocab_ids"]) if others else None
    shape = drafter_shape(config, target.config)
    spec = block_spec(config, target.config, target.mask_token_id)
    other = build_draft_model(shape, spec, "lilicorr", HEAD | head, target, ids)
    save_draft_model(tmp_path / "other", other, TARGET_INFO, "float32")
    before = {name: tensor.clone() for name, tensor in checkpoint_tensors(used).items()}
    with pytest.raises(ValueError, match=message):
        replacement_weights(tmp_path / "other", target, used)
    assert all(torch.equal(tensor, before[name]) for name, tensor in checkpoint_tensors(used).items())


def test_another_draft_vocabulary_of_the_same_size_is_no_replacement(target: Target, tmp_path: Path) -> None:
    used, other = (make(target, "argmax", torch.tensor(ids)) for ids in ([0, 1, 2, 5], [0, 1, 2, 6]))
    save_draft_model(tmp_path / "other", other, TARGET_INFO, "float32")
    with pytest.raises(ValueError, match=r"draft_vocab\.npy holds other ids than the draft model in use predicts"):
        replacement_weights(tmp_path / "other", target, used)


def test_stretched_positions_are_no_difference_where_the_server_stretches_them(target: Target, tmp_path: Path) -> None:
    yarn = YarnConfig(2.0, 64)
    save_draft_model(tmp_path / "final", make(target), TARGET_INFO, "float32")
    used = load_draft_model(tmp_path / "final", target, yarn=yarn)
    assert replacement_weights(tmp_path / "final", target, used, yarn).keys() == checkpoint_tensors(used).keys()
    with pytest.raises(ValueError, match="yarn is None, of the draft model in use it is"):
        replacement_weights(tmp_path / "final", target, used)
