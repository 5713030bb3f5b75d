"""The checkpoint formats of Domino and DSpark, other trainers' spellings of them, layouts, and YaRN in both schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lilicorr.blocks import ANCHOR_FIRST, IN_PLACE
from lilicorr.checkpoint import checkpoint_tensors, load_draft_model, save_draft_model
from lilicorr.config import YarnConfig
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.target import Target
from test_checkpoint import DRAFTER, edit_config, edit_tensors, with_value, without
from test_heads import SMALL

GATED = {"markov_head_type": "gated", "markov_rank": 8}
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def target(target_factory: Callable[..., Target]) -> Target:
    return target_factory(dtype=torch.float32)


def make(target: Target, head: str, layout: str | None = None, **changes: Any) -> DraftModel:
    """A draft model whose every parameter is random."""
    spec = block_spec(DRAFTER, target.config, target.mask_token_id, layout or HEADS[head].layouts[0])
    model = build_draft_model(drafter_shape(DRAFTER, target.config), spec, head, SMALL[head] | changes, target)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def save(target: Target, folder: Path, head: str, layout: str | None = None, **changes: Any) -> DraftModel:
    model = make(target, head, layout, **changes)
    save_draft_model(folder, model, {"max_anchors": 12}, "float32")
    return model


def assert_same(loaded: DraftModel, saved: DraftModel) -> None:
    assert loaded.head_name == saved.head_name and loaded.spec.layout == saved.spec.layout
    ours = checkpoint_tensors(loaded)
    assert ours.keys() == checkpoint_tensors(saved).keys()
    for name, tensor in checkpoint_tensors(saved).items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    ("head", "layout", "changes"),
    [
        ("argmax", ANCHOR_FIRST, {}),
        ("domino", ANCHOR_FIRST, {"pure_draft_prefix_len": 2}),
        ("domino", IN_PLACE, {}),
        ("dspark", ANCHOR_FIRST, {}),
        ("dspark", ANCHOR_FIRST, {"markov_head_type": "gated", "confidence_head_with_markov": False}),
        ("dspark", ANCHOR_FIRST, {"markov_head_type": "rnn", "enable_confidence_head": False}),
    ],
)
def test_what_is_saved_comes_back(target: Target, tmp_path: Path, head: str, layout: str, changes: dict) -> None:
    saved = save(target, tmp_path / "one", head, layout, **changes)
    loaded = load_draft_model(tmp_path / "one", target)
    assert_same(loaded, saved)
    assert loaded.head.config == saved.head.config
    assert loaded.spec == replace(saved.spec, num_candidates=8)
    save_draft_model(tmp_path / "two", loaded, {"max_anchors": 12}, "float32")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    plain = load_draft_model(tmp_path / "one", target, head="argmax")
    assert plain.spec.layout == layout and not list(plain.head_parameters())
    for name, tensor in saved.drafter.state_dict().items():
        assert torch.equal(plain.drafter.state_dict()[name], tensor), name


def test_the_fields_of_domino(target: Target, tmp_path: Path) -> None:
    save(target, tmp_path / "final", "domino")
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["emb_dim"] == 8
    assert config["dflash_config"] == {
        "block_size": 5,
        "layout": "anchor_first",
        "mask_token_id": 66,
        "target_layer_ids": [1, 3],
        "projector_type": "domino",
        "shift_label": True,
        "emb_dim": 8,
        "gru_hidden_dim": 12,
        "pure_draft_prefix_len": 1,
    }
    names = set(load_file(tmp_path / "final" / "model.safetensors"))
    assert {name for name in names if not name.startswith(("layers.", "fc.", "norm.", "hidden_norm."))} == {
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    }


def test_the_fields_of_dspark(target: Target, tmp_path: Path) -> None:
    save(target, tmp_path / "final", "dspark", **GATED)
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    head = {"markov_rank": 8, "markov_head_type": "gated"}
    head |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    block = {"block_size": 5, "mask_token_id": 66, "target_layer_ids": [1, 3]}
    assert config["architectures"] == ["Qwen3DSparkModel"]
    for name, value in (head | block | {"num_anchors": 12, "num_target_layers": 6}).items():
        assert config[name] == value, name
    nested = {"layout": "anchor_first", "shift_label": True, "projector_type": "dspark"}
    assert config["dflash_config"] == head | block | nested
    tensors = load_file(tmp_path / "final" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.embed)
    assert torch.equal(tensors["lm_head.weight"], target.lm_head)
    names = {name for name in tensors if name.startswith(("markov_head.", "confidence_head."))}
    assert names == {f"markov_head.markov_{matrix}.weight" for matrix in ("w1", "w2")} | {
        f"{module}.{part}"
        for module in ("markov_head.gate_proj", "confidence_head.proj")
        for part in ("weight", "bias")
    }


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def drop_tables(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]


def nested_only(config: dict[str, Any]) -> None:
    """SpecForge: everything in dflash_config, the projector type instead of an architecture of its own."""
    for name in config["dflash_config"]:
        config.pop(name, None)
    config["architectures"] = ["DFlashDraftModel"]
    del config["dflash_config"]["layout"]


def model_optimizer(config: dict[str, Any]) -> None:
    nested_only(config)
    del config["dflash_config"]["confidence_head_with_markov"]
    config["dflash_config"]["use_confidence_head"] = config["dflash_config"].pop("enable_confidence_head")


def deepspec(config: dict[str, Any]) -> None:
    """DeepSpec: everything at the top, no layout, no projector type."""
    del config["dflash_config"]


DOMINO_SPELLINGS = [
    (lambda c: c.update(architectures=["DominoDraftModel"]), lambda t: None),
    (nested_only, rename("", "model.")),
    (lambda c: c["dflash_config"].pop("layout"), rename("prefix_gru.", "logit_head.prefix_gru.")),
]
DSPARK_SPELLINGS = [
    (deepspec, lambda t: None),
    (deepspec, drop_tables),
    (nested_only, rename("markov_head.", "logit_head.markov_head.")),
    (
        model_optimizer,
        lambda t: [
            change(t) for change in (rename("markov_head.", ""), rename("confidence_head.proj", "confidence_proj"))
        ],
    ),
]


@pytest.mark.parametrize(
    ("head", "config", "tensors"),
    [*(("domino", *pair) for pair in DOMINO_SPELLINGS), *(("dspark", *pair) for pair in DSPARK_SPELLINGS)],
)
def test_other_trainers_spellings_are_read(
    target: Target, tmp_path: Path, head: str, config: Change, tensors: Change
) -> None:
    saved = save(target, tmp_path / "final", head, **(GATED if head == "dspark" else {}))
    edit_config(tmp_path / "final", config)
    edit_tensors(tmp_path / "final", tensors)
    assert_same(load_draft_model(tmp_path / "final", target), saved)


DAMAGE = [
    ("domino", without("emb_dim", True), lambda t: None, None),  # still at the top
    ("domino", with_value("emb_dim", 4), lambda t: None, "emb_dim is 8 in dflash_config and 4 outside"),
    ("domino", with_value("gru_hidden_dim", 9, True), lambda t: None, r"weight has shape"),
    (
        "domino",
        without("pure_draft_prefix_len", True),
        lambda t: None,
        "field dflash_config.pure_draft_prefix_len is miss",
    ),
    ("domino", with_value("shift_label", 1, True), lambda t: None, "field shift_label must be bool, got 1"),
    (
        "domino",
        with_value("shift_label", False, True),
        lambda t: None,
        "layout is anchor_first and in_place by different",
    ),
    (
        "domino",
        with_value("projector_type", "eagle", True),
        lambda t: None,
        "must be argmax or domino or dspark, got 'eagle'",
    ),
    (
        "domino",
        lambda c: [c["dflash_config"].pop(n) for n in ("layout", "shift_label")],
        lambda t: None,
        "layout or shift_label",
    ),
    ("domino", lambda c: None, lambda t: t.pop("embed_proj.0.weight"), "1 tensors are missing: embed_proj.0.weight"),
    ("domino", lambda c: None, lambda t: t.update(extra=torch.zeros(1)), "1 tensors are surplus: extra"),
    (
        "dspark",
        with_value("layout", "in_place", True),
        lambda t: None,
        "layout is anchor_first and in_place by different",
    ),
    (
        "dspark",
        with_value("markov_head_type", "rnn", True),
        lambda t: None,
        "markov_head_type is 'rnn' in dflash_config and 'v",
    ),
    (
        "dspark",
        lambda c: [p.pop("markov_rank") for p in (c, c["dflash_config"])],
        lambda t: None,
        "markov_rank is missing",
    ),
    ("dspark", lambda c: None, lambda t: t.pop("confidence_head.proj.bias"), "missing: confidence_head.proj.bias"),
    ("dspark", lambda c: None, lambda t: t["lm_head.weight"].add_(1), "lm_head.weight is not the target's own table"),
    ("argmax", with_value("layout", "sideways", True), lambda t: None, "in_place or anchor_first, got 'sideways'"),
    (
        "lilicorr",
        with_value("layout", "anchor_first", True),
        lambda t: None,
        "head lilicorr must be in_place, got 'anchor_f",
    ),
    ("lilicorr", with_value("sample_from_anchor", True, True), lambda t: None, "layout is anchor_first and in_place"),
]


@pytest.mark.parametrize(("head", "config", "tensors", "message"), DAMAGE, ids=[str(d[3])[:40] for d in DAMAGE])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    target: Target, tmp_path: Path, head: str, config: Change, tensors: Change, message: str | None
) -> None:
    saved = save(target, tmp_path / "final", head)
    edit_config(tmp_path / "final", config)
    edit_tensors(tmp_path / "final", tensors)
    if message is None:
        assert_same(load_draft_model(tmp_path / "final", target), saved)
        return
    with pytest.raises(ValueError, match=message):
        load_draft_model(tmp_path / "final", target)


def test_a_dspark_checkpoint_in_place_and_a_dflash_one_without_a_layout(target: Target, tmp_path: Path) -> None:
    save(target, tmp_path / "dspark", "dspark")
    edit_config(tmp_path / "dspark", lambda c: c["dflash_config"].update(layout="in_place", shift_label=False))
    with pytest.raises(ValueError, match="layout of the head dspark must be anchor_first, got 'in_place'"):
        load_draft_model(tmp_path / "dspark", target)
    save(target, tmp_path / "dflash", "argmax")
    edit_config(tmp_path / "dflash", without("layout", True))
    assert load_draft_model(tmp_path / "dflash", target).spec.layout == IN_PLACE


YARN = YarnConfig(factor=4.0, original_max_position_embeddings=128, attention_factor=1.25)


def test_yarn_is_written_in_both_schemas_and_read_from_either(target: Target, tmp_path: Path) -> None:
    save(target, tmp_path / "plain", "argmax")
    stretched = load_draft_model(tmp_path / "plain", target, yarn=YARN)
    assert stretched.shape.yarn == YARN and stretched.drafter.layers[1].self_attn.rotary.scale == 1.25
    save_draft_model(tmp_path / "yarn", stretched, {}, "float32")
    config = json.loads((tmp_path / "yarn" / "config.json").read_text())
    for schema in ("rope_scaling", "rope_parameters"):
        assert config[schema]["rope_type"] == "yarn" and config[schema]["factor"] == 4.0
        assert config[schema]["original_max_position_embeddings"] == 128
    assert config["rope_scaling"]["type"] == "yarn" and config["rope_theta"] == 10_000.0
    assert load_draft_model(tmp_path / "yarn", target).shape.yarn == YARN
    other = YarnConfig(factor=2.0, original_max_position_embeddings=128)
    assert load_draft_model(tmp_path / "yarn", target, yarn=other).shape.yarn == other
    for schema in ("rope_scaling", "rope_parameters"):
        save_draft_model(tmp_path / schema, stretched, {}, "float32")
        edit_config(tmp_path / schema, without(schema))
        assert load_draft_model(tmp_path / schema, target).shape.yarn == YARN
    edit_config(tmp_path / "yarn", lambda c: c["rope_scaling"].update(factor=8.0))
    with pytest.raises(ValueError, match="rope_parameters say .*factor=4.0.*, rope_scaling says .*factor=8.0"):
        load_draft_model(tmp_path / "yarn", target)


def test_equal_mscales_mean_no_temperature(target: Target, tmp_path: Path) -> None:
    """The documented example of the published exporter."""
    save(target, tmp_path / "final", "argmax")
    example = {
        "type": "yarn",
        "factor": 48.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
    }

    def change(config: dict[str, Any]) -> None:
        config["rope_scaling"] = example | {"mscale": 1.0, "mscale_all_dim": 1.0}
        del config["rope_parameters"]

    edit_config(tmp_path / "final", change)
    yarn = load_draft_model(tmp_path / "final", target).shape.yarn
    assert yarn == YarnConfig(48.0, 4096, 1.0, 1.0, attention_factor=1.0)
    edit_config(tmp_path / "final", lambda c: c["rope_scaling"].update(mscale_all_dim=0.5))
    with pytest.raises(ValueError, match="mscale = 1.0 with mscale_all_dim = 0.5 is not supported"):
        load_draft_model(tmp_path / "final", target)
