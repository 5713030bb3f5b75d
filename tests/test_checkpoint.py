"""Checkpoints come back as they were saved, spell everything as the public servers read it, and fail by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lilicorr.blocks import BlockSpec
from lilicorr.checkpoint import checkpoint_tensors, load_draft_model, read_info, save_draft_model
from lilicorr.config import DrafterConfig
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import DrafterShape, block_spec, drafter_shape
from lilicorr.target import Target

HEAD = {"hidden_size": 16, "num_heads": 2, "factor_dim": 12, "vector_eps": 2e-4, "logit_scale": 5.0}
DRAFTER = DrafterConfig(num_layers=2, block_size=5, num_candidates=3)


@pytest.fixture
def target(target_factory: Callable[..., Target]) -> Target:
    return target_factory(dtype=torch.float32)


def make(target: Target, head: str = "lilicorr", vocab_ids: torch.Tensor | None = None) -> DraftModel:
    """A draft model whose every parameter is random, so that a mixed-up tensor shows."""
    shape = drafter_shape(DRAFTER, target.config)
    spec = block_spec(DRAFTER, target.config, target.mask_token_id)
    draft_model = build_draft_model(shape, spec, head, HEAD if head == "lilicorr" else {}, target, vocab_ids)
    torch.manual_seed(1)
    for parameter in draft_model.parameters():
        torch.nn.init.normal_(parameter)
    return draft_model


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("head", ["argmax", "lilicorr"])
@pytest.mark.parametrize("restricted", [False, True])
def test_what_is_saved_comes_back(target: Target, tmp_path: Path, head: str, restricted: bool) -> None:
    vocab_ids = torch.tensor([0, 3, 4, 20, 65]) if restricted else None
    saved = make(target, head, vocab_ids)
    save_draft_model(tmp_path / "final", saved, {"target": "t", "eos_token_id": 65, "num_blocks": 7}, "float32")
    loaded = load_draft_model(tmp_path / "final", target)
    spec = saved.spec if head == "lilicorr" else replace(saved.spec, num_candidates=8)  # DFlash keeps no K
    assert loaded.shape == saved.shape and loaded.spec == spec and loaded.head_name == head
    tensors = checkpoint_tensors(loaded)
    assert tensors.keys() == checkpoint_tensors(saved).keys()
    for name, tensor in checkpoint_tensors(saved).items():
        assert torch.equal(tensors[name], tensor), name
    assert (loaded.vocab_ids is None) == (not restricted)
    if restricted:
        assert torch.equal(loaded.vocab_ids, vocab_ids)
    if head == "lilicorr":
        assert loaded.head.config == saved.head.config
    block = {"block_size": 5, "layout": "in_place", "drafted_width": 4}
    assert read_info(tmp_path / "final") == {"target": "t", "eos_token_id": 65, "num_blocks": 7, "block": block}
    assert not loaded.training


def test_bfloat16_rounds_once(target: Target, tmp_path: Path) -> None:
    saved = make(target)
    save_draft_model(tmp_path / "final", saved, {}, "bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "final" / "model.safetensors").values()} == {torch.bfloat16}
    loaded = checkpoint_tensors(load_draft_model(tmp_path / "final", target, dtype=torch.float64))
    for name, tensor in checkpoint_tensors(saved).items():
        assert torch.equal(loaded[name], tensor.bfloat16().double()), name
    with pytest.raises(ValueError, match="float32, bfloat16, got 'float16'"):
        save_draft_model(tmp_path / "other", saved, {}, "float16")


def test_the_config_is_what_servers_read(target: Target, tmp_path: Path) -> None:
    save_draft_model(tmp_path / "final", make(target), {"bos_token_id": 1, "eos_token_id": 65}, "float32")
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["architectures"] == ["LiLiCorrDraftModel"]
    assert config["dflash_config"] == {
        "block_size": 5,
        "layout": "in_place",
        "mask_token_id": 66,
        "target_layer_ids": [1, 3],
        "lilicorr_candidate_topk": 3,
        "lilicorr_hidden_size": 16,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 2,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": 12,
        "lilicorr_vector_eps": 2e-4,
        "lilicorr_logit_scale": 5.0,
    }
    assert config["block_size"] == 5 and config["num_target_layers"] == 6 and config["num_hidden_layers"] == 2
    assert config["rope_theta"] == 10_000.0 and config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config["vocab_size"] == 67 and config["hidden_size"] == 32 and config["dtype"] == "float32"
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 65)
    save_draft_model(tmp_path / "plain", make(target, "argmax"), {}, "float32")
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert plain["architectures"] == ["DFlashDraftModel"]
    assert plain["dflash_config"] == {
        "block_size": 5,
        "layout": "in_place",
        "mask_token_id": 66,
        "target_layer_ids": [1, 3],
    }


def test_a_drafter_can_be_read_without_its_head(target: Target, tmp_path: Path) -> None:
    saved = make(target)
    save_draft_model(tmp_path / "final", saved, {}, "float32")
    loaded = load_draft_model(tmp_path / "final", target, head="argmax")
    assert loaded.head_name == "argmax" and not list(loaded.head_parameters())
    for name, tensor in saved.drafter.state_dict().items():
        assert torch.equal(loaded.drafter.state_dict()[name], tensor), name
    exact = load_draft_model(tmp_path / "final", target, head_config={"walk": "exact"})
    assert exact.head.config.walk == "exact" and exact.head.config.logit_scale == 5.0


def test_other_spellings_are_read(target: Target, tmp_path: Path) -> None:
    saved = make(target)
    save_draft_model(tmp_path / "final", saved, {}, "float32")

    def old_schema(config: dict[str, Any]) -> None:
        del config["rope_parameters"], config["dflash_config"]["block_size"]
        config["target_layer_ids"] = config["dflash_config"].pop("target_layer_ids")

    def prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    edit_config(tmp_path / "final", old_schema)
    edit_tensors(tmp_path / "final", prefix)
    loaded = load_draft_model(tmp_path / "final", target)
    assert loaded.spec == saved.spec
    assert torch.equal(loaded.drafter.fc.weight, saved.drafter.fc.weight)


def without(name: str, block: bool = False) -> Callable[[dict[str, Any]], Any]:
    return lambda config: (config["dflash_config"] if block else config).pop(name)


def with_value(name: str, value: Any, block: bool = False) -> Callable[[dict[str, Any]], Any]:
    return lambda config: (config["dflash_config"] if block else config).update({name: value})


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "draft_vocab.npy"])
def test_a_truncated_or_missing_file_is_named(target: Target, tmp_path: Path, name: str) -> None:
    save_draft_model(tmp_path / "final", make(target, vocab_ids=torch.arange(50)), {}, "float32")
    path = tmp_path / "final" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=name):
        load_draft_model(tmp_path / "final", target)
    path.unlink()
    with pytest.raises(ValueError, match=name):
        load_draft_model(tmp_path / "final", target)


def test_a_head_the_checkpoint_cannot_give_is_refused(target: Target, tmp_path: Path) -> None:
    save_draft_model(tmp_path / "plain", make(target, "argmax"), {}, "float32")
    with pytest.raises(ValueError, match="head must be one of argmax, domino, dspark, lilicorr, got 'medusa'"):
        load_draft_model(tmp_path / "plain", target, head="medusa")
    with pytest.raises(ValueError, match="holds the head argmax, which cannot be read as lilicorr"):
        load_draft_model(tmp_path / "plain", target, head="lilicorr")
    save_draft_model(tmp_path / "final", make(target), {}, "float32")
    with pytest.raises(ValueError, match="head_config.logit_scale = 8.0, but it was trained with 5.0"):
        load_draft_model(tmp_path / "final", target, head_config={"logit_scale": 8.0})
    with pytest.raises(ValueError, match="is not a draft model: config.json is missing"):
        load_draft_model(tmp_path, target)


def test_a_failed_save_leaves_the_former_checkpoint(target: Target, tmp_path: Path) -> None:
    saved = make(target)
    save_draft_model(tmp_path / "final", saved, {}, "float32")
    with pytest.raises(TypeError):
        save_draft_model(tmp_path / "final", saved, {"target": object()}, "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    load_draft_model(tmp_path / "final", target)


def test_tensors_of_the_papers_checkpoints() -> None:
    shape = DrafterShape(4096, 5, 32, 8, 128, 12_288, 5, 151_936, 36, 1e-6, 1e6, 40_960)
    spec = BlockSpec(16, 8, 151_669, (1, 9, 17, 25, 33))
    with torch.device("meta"):
        table = torch.empty(151_936, 4096)
        models = {name: DraftModel(shape, spec, name, {}, table, table) for name in ("argmax", "lilicorr")}
    counts = {name: len(checkpoint_tensors(model)) for name, model in models.items()}
    assert counts == {"argmax": 58, "lilicorr": 104}
    names = set(checkpoint_tensors(models["lilicorr"]))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.q_norm.weight"} <= names
    assert {"lilicorr.token_proj.weight", "lilicorr.feature_mlp.0.weight", "lilicorr.feature_mlp.3.bias"} <= names
    assert {"lilicorr.layers.1.attn.in_proj_bias", "lilicorr.layers.0.mlp.2.weight"} <= names


def test_a_config_can_be_fed_back(target: Target, tmp_path: Path) -> None:
    """Saving what was loaded gives the same files."""
    save_draft_model(tmp_path / "one", make(target, vocab_ids=torch.arange(9)), {"target": "t"}, "float32")
    save_draft_model(tmp_path / "two", load_draft_model(tmp_path / "one", target), {"target": "t"}, "float32")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    assert np.load(tmp_path / "one" / "draft_vocab.npy").tolist() == list(range(9))
