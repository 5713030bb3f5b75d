"""Every format comes back as it was written, on tiny draft models and, by names and shapes, on those of real sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lilicorr.blocks import ANCHOR_FIRST, IN_PLACE, BlockSpec
from lilicorr.checkpoint import (
    Checkpoint,
    captured_layers,
    checkpoint_tensors,
    load_draft_model,
    read_checkpoint,
    write_checkpoint,
)
from lilicorr.checkpoint.__main__ import inspect
from lilicorr.checkpoint.description import describe_model
from lilicorr.checkpoint.format import FORMATS, NATIVE, SPECULATORS, TABLES, formats_of, with_tables
from lilicorr.checkpoint.store import decode, encode
from lilicorr.config import DrafterConfig, YarnConfig
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import DrafterShape, block_spec, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.target import Target
from test_checkpoint import edit_config
from test_heads import SMALL

DRAFTER = DrafterConfig(num_layers=2, block_size=5, num_candidates=4)
INFO = {"target": {"source": "a/target", "architectures": ["Qwen3ForCausalLM"]}, "max_anchors": 12, "eos_token_id": 65}
CASES = [(form, head) for head in ("argmax", "domino", "dspark", "lilicorr") for form in formats_of(head)]


@pytest.fixture
def target(target_factory: Callable[..., Target]) -> Target:
    return target_factory(dtype=torch.float32)


def layout_in(form: str, head: str) -> str:
    """A layout that the format can say."""
    allowed = FORMATS.get(form, {}).get(head)
    return (allowed.allowed if allowed else {}).get("layout", HEADS[head].layouts)[0]


def make(target: Target, form: str, head: str, vocab_ids: torch.Tensor | None = None, **changes: Any) -> Checkpoint:
    """A checkpoint of which every parameter is random, with the target's tables beside it."""
    spec = block_spec(DRAFTER, target.config, target.mask_token_id, layout_in(form, head))
    settings = (SMALL[head] if head != "lilicorr" else {"hidden_size": 16, "num_heads": 2, "factor_dim": 12}) | changes
    model = build_draft_model(drafter_shape(DRAFTER, target.config), spec, head, settings, target, vocab_ids)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return checkpoint_of(model, vocab_ids)


def checkpoint_of(model: DraftModel, vocab_ids: torch.Tensor | None = None) -> Checkpoint:
    tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
    tables = {name: getattr(model, attribute).detach().clone() for name, attribute in TABLES.items()}
    return Checkpoint(describe_model(model, "float32"), tensors, tables, vocab_ids, INFO)


def assert_same(found: Checkpoint, written: Checkpoint) -> None:
    """Equal in fields and tensors; only a LiLiCorr checkpoint keeps a number of candidates."""
    expected = written.description
    if expected.head != "lilicorr":
        expected = replace(expected, spec=replace(expected.spec, num_candidates=8))
    assert found.description == expected
    assert found.tensors.keys() == written.tensors.keys()
    for name, tensor in written.tensors.items():
        same = found.tensors[name].shape == tensor.shape if tensor.is_meta else torch.equal(found.tensors[name], tensor)
        assert same, name
    if written.vocab_ids is not None:
        assert torch.equal(found.vocab_ids, written.vocab_ids)


def test_the_table_has_what_the_documentation_says() -> None:
    documented = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    for form, head in CASES:
        assert f"`{form}`" in documented, f"{form} of {head}"
    assert len(CASES) == 27


@pytest.mark.parametrize(("form", "head"), CASES)
def test_what_is_written_comes_back(target: Target, tmp_path: Path, form: str, head: str) -> None:
    written = make(target, form, head)
    write_checkpoint(tmp_path / "one", written, form)
    found = read_checkpoint(tmp_path / "one")
    assert_same(found, written)
    assert found.info["target"]["source"] == "a/target" and found.info["max_anchors"] == 12
    model = load_draft_model(tmp_path / "one", target)
    assert model.head_name == head and model.spec.layout == written.description.spec.layout
    write_checkpoint(tmp_path / "two", replace(found, tables=written.tables), form)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    (tmp_path / "one" / "lilicorr.json").unlink()  # as other projects leave it
    assert_same(read_checkpoint(tmp_path / "one", target), written)
    edit_config(tmp_path / "one", lambda c: c.pop("num_target_layers"))  # nor do all of them say this
    assert captured_layers(tmp_path / "one") == written.description.spec.target_layer_ids == (1, 3)


@pytest.mark.parametrize(("form", "head"), CASES)
@pytest.mark.parametrize(("hidden", "intermediate"), [(4096, 12288), (2560, 9728)], ids=["8b", "4b"])
def test_real_sizes(tmp_path: Path, form: str, head: str, hidden: int, intermediate: int) -> None:
    """Without a weight: names, shapes and fields go there and back."""
    shape = DrafterShape(hidden, 5, 32, 8, 128, intermediate, 5, 151_936, 36, 1e-6, 1e6, 40_960)
    spec = BlockSpec(16, 8, 151_669, (1, 9, 17, 25, 33), layout_in(form, head))
    with torch.device("meta"):
        table = torch.empty(151_936, hidden)
        written = checkpoint_of(DraftModel(shape, spec, head, {}, table, table))
    config, tensors = encode(written, form)
    tables = set(TABLES) if with_tables(form, head) else set()
    assert len(tensors) == len(written.tensors) + len(tables) and tables <= tensors.keys()
    assert_same(decode(tmp_path, json.loads(json.dumps(config)), tensors), written)


@pytest.mark.parametrize("form", [NATIVE, SPECULATORS])
def test_a_draft_vocabulary_comes_back(target: Target, tmp_path: Path, form: str) -> None:
    written = make(target, form, "argmax", torch.tensor([0, 3, 4, 20, 65]))
    write_checkpoint(tmp_path / "final", written, form)
    assert_same(read_checkpoint(tmp_path / "final", target), written)
    assert load_draft_model(tmp_path / "final", target).vocab_ids.tolist() == [0, 3, 4, 20, 65]
    if form == SPECULATORS:
        tensors = load_file(tmp_path / "final" / "model.safetensors")
        assert tensors["d2t"].tolist() == [0, 2, 2, 17, 61] and tensors["t2d"].nonzero()[:, 0].tolist() == [
            0,
            3,
            4,
            20,
            65,
        ]
        assert torch.equal(tensors["lm_head.weight"], target.lm_head[[0, 3, 4, 20, 65]])


def test_formats_that_cannot_say_it_refuse(target: Target, tmp_path: Path) -> None:
    def refused(form: str, checkpoint: Checkpoint, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            write_checkpoint(tmp_path / "no", checkpoint, form)
        assert not (tmp_path / "no").exists()

    plain, lilicorr, dspark = (make(target, NATIVE, head) for head in ("argmax", "lilicorr", "dspark"))
    refused("gguf", plain, "format must be one of native, zlab, .* got 'gguf'")
    refused(
        "zlab", lilicorr, "zlab has no checkpoints of the head lilicorr; formats that do: native, sglang, vllm, ten"
    )
    refused("vllm", make(target, "domino", "domino"), "vllm has no checkpoints of the head domino")
    turned = replace(plain.description, spec=replace(plain.description.spec, layout=ANCHOR_FIRST))
    refused("zlab", replace(plain, description=turned), "zlab needs layout in_place, got anchor_first")
    refused("deepspec", plain, "deepspec needs layout anchor_first, got in_place")
    refused("deepspec", replace(dspark, tables={}), "holds copies of the target's tables.*name the target")
    few = replace(lilicorr.description, spec=replace(lilicorr.description.spec, num_candidates=6))
    refused("vllm", replace(lilicorr, description=few), "vllm needs lilicorr_candidate_topk 1 or 2 .*, got 6")
    refused("sglang", make(target, "sglang", "domino", pure_draft_prefix_len=2), "pure_draft_prefix_len 1, got 2")
    part = make(target, NATIVE, "argmax", torch.arange(9))
    refused("zlab", part, "zlab knows no draft vocabulary, and this drafter predicts 9 of its target's 67 tokens")
    refused(SPECULATORS, replace(part, tables={}), "drafted rows of the target's output table: name the target")
    refused(SPECULATORS, make(target, NATIVE, "dspark", torch.arange(9)), "DSpark head over a draft vocabulary")
    last = replace(plain.description, spec=replace(plain.description.spec, target_layer_ids=(1, 5)))
    refused(SPECULATORS, replace(plain, description=last), "layer 5, the target's last, is captured")


def test_zlab_spells_the_block_size_in_either_place(target: Target) -> None:
    written = make(target, NATIVE, "argmax")
    newer, older = (encode(written, form)[0] for form in ("zlab", "zlab_old"))
    assert "block_size" not in newer and newer["dflash_config"]["block_size"] == 5
    assert older["block_size"] == 5 and older["dflash_config"] == {"mask_token_id": 66, "target_layer_ids": [1, 3]}
    assert newer["rope_theta"] == 10_000.0 and newer["rope_parameters"]["rope_theta"] == 10_000.0


def test_lilicorr_has_two_spellings(target: Target) -> None:
    """Released servers name the parts of its MLPs; trainers of before, and checkpoints of ours, numbered them."""
    written = make(target, NATIVE, "lilicorr")
    named = {
        f"lilicorr.{name}.{part}" for part in ("weight", "bias") for name in ("feature_norm", "feature_mlp.up_proj")
    }
    named |= {"lilicorr.feature_mlp.down_proj.bias", "lilicorr.layers.1.mlp.up_proj.bias"}
    numbered = {f"lilicorr.feature_mlp.{i}.bias" for i in (0, 1, 3)} | {"lilicorr.layers.1.mlp.2.bias"}
    for form in (NATIVE, "sglang", "vllm", "tensorrt_llm"):
        names = encode(written, form)[1].keys()
        assert named <= names and not numbered & names
    names = encode(written, "modelopt")[1].keys()
    assert numbered <= names and not named & names


def test_dspark_has_three_spellings(target: Target) -> None:
    written = make(target, NATIVE, "dspark", markov_head_type="gated")
    spelled = {form: encode(written, form) for form in ("deepspec", "specforge", "specforge_old", "modelopt")}
    heads = {
        form: {name for name in tensors if not name.startswith(("layers.", "fc.", "norm.", "hidden_norm.", *TABLES))}
        for form, (_, tensors) in spelled.items()
    }
    assert "markov_head.gate_proj.bias" in heads["deepspec"] and heads["deepspec"] == heads["specforge"]
    assert heads["specforge_old"] == {f"logit_head.{name}" for name in heads["deepspec"]}
    assert heads["modelopt"] == {
        *("markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias"),
        *("confidence_proj.weight", "confidence_proj.bias"),
    }
    assert set(TABLES) <= spelled["deepspec"][1].keys() and not set(TABLES) & spelled["modelopt"][1].keys()
    config = spelled["deepspec"][0]
    assert "dflash_config" not in config and config["num_anchors"] == 12 and config["markov_rank"] == 8
    assert spelled["modelopt"][0]["dflash_config"]["use_confidence_head"] is True
    assert spelled["specforge"][0]["architectures"] == ["DSparkDraftModel"]


def test_what_speculators_leave_out_is_a_default_of_qwen3(target: Target, tmp_path: Path) -> None:
    """Its own writer drops the fields that equal those of an empty Qwen3 configuration, and knows no target."""
    shape = DrafterShape(4096, 1, 32, 8, 128, 128, 1, 151_936, 36, 1e-6, 1e4, 40_960)
    spec = BlockSpec(16, 8, 151_669, (9,))
    with torch.device("meta"):
        table = torch.empty(151_936, 4096)
        written = checkpoint_of(DraftModel(shape, spec, "argmax", {}, table, table))
    config, tensors = encode(written, SPECULATORS)
    for name in ("hidden_size", "vocab_size", "head_dim", "rms_norm_eps", "num_attention_heads", "hidden_act"):
        del config["transformer_layer_config"][name]
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        del config["transformer_layer_config"][name]
    assert_same(decode(tmp_path, config, tensors), written)
    del config["num_target_layers"]
    with pytest.raises(ValueError, match="field num_target_layers is missing"):
        decode(tmp_path, config, tensors)
    assert config["aux_hidden_state_layer_ids"] == [10]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 15
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "a/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    small = make(target, SPECULATORS, "dspark")
    write_checkpoint(tmp_path / "small", small, SPECULATORS)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config.pop("num_target_layers") == 6
    config["architectures"] = ["DSparkDraftModel"]
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    assert_same(read_checkpoint(tmp_path / "small", target), small)


@pytest.mark.parametrize(("form", "head"), CASES)
def test_yarn_survives_every_format(target: Target, tmp_path: Path, form: str, head: str) -> None:
    yarn = YarnConfig(factor=4.0, original_max_position_embeddings=128, attention_factor=1.25)
    plain = make(target, form, head)
    shape = replace(plain.description.shape, yarn=yarn)
    stretched = replace(plain, description=replace(plain.description, shape=shape))
    config, tensors = encode(stretched, form)
    assert_same(decode(tmp_path, config, tensors), stretched)


@pytest.mark.parametrize("form", [form for form, head in CASES if head == "dspark"])
@pytest.mark.parametrize("kind", ["gated", "rnn"])
@pytest.mark.parametrize("confidence", [True, False])
def test_every_kind_of_dspark_comes_back(
    target: Target, tmp_path: Path, form: str, kind: str, confidence: bool
) -> None:
    written = make(target, form, "dspark", markov_head_type=kind, enable_confidence_head=confidence)
    config, tensors = encode(written, form)
    assert any("confidence" in name for name in tensors) == confidence
    found = decode(tmp_path, json.loads(json.dumps(config)), tensors, target)
    assert_same(found, written)
    assert found.description.head_config["markov_head_type"] == kind


def test_weights_may_come_in_several_files(target: Target, tmp_path: Path) -> None:
    written = make(target, "zlab", "argmax")
    write_checkpoint(tmp_path / "final", written, "zlab")
    whole = tmp_path / "final" / "model.safetensors"
    names = sorted(load_file(whole))
    files = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, held in files.items():
        save_file({name: load_file(whole)[name] for name in held}, tmp_path / "final" / file)
    whole.unlink()
    index = tmp_path / "final" / "model.safetensors.index.json"
    where = {name: file for file, held in files.items() for name in held}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert_same(read_checkpoint(tmp_path / "final", target), written)
    del where["fc.weight"]
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    with pytest.raises(ValueError, match=r"index.json names \['fc.weight'\]"):
        read_checkpoint(tmp_path / "final")
    (tmp_path / "final" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors is missing"):
        read_checkpoint(tmp_path / "final")


def test_a_dflash_of_deepspec_is_a_dspark_of_rank_0(target: Target, tmp_path: Path) -> None:
    written = make(target, "deepspec", "argmax")
    config, tensors = encode(written, "deepspec")
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["markov_rank"] == 0
    found = decode(tmp_path, config, tensors, target)
    assert found.description.head == "argmax" and found.description.spec.layout == ANCHOR_FIRST
    config["dflash_config"] = {"layout": IN_PLACE}
    assert decode(tmp_path, config, tensors, target).description.spec.layout == IN_PLACE


@pytest.mark.parametrize(("form", "head"), CASES)
def test_a_file_is_known_by_its_spelling(target: Target, tmp_path: Path, form: str, head: str) -> None:
    write_checkpoint(tmp_path / "final", make(target, form, head), form)
    readers = inspect(tmp_path / "final")["as it stands for"].split(", ")
    assert form in readers
    if form == "zlab_old":
        assert "zlab" not in readers
    if form == NATIVE and head == "argmax":
        assert {"zlab", "zlab_old", "sglang", "vllm"} <= set(readers)
    if form == "specforge_old":
        assert readers == ["specforge_old"]
    if (
        form in ("zlab", "zlab_old", "specforge") and head == "argmax"
    ):  # the block size stands in one place or the other
        assert {"sglang", "vllm"} <= set(readers)


@pytest.mark.parametrize(
    ("head", "changes", "reads"),
    [
        ("argmax", {}, True),
        ("argmax", {"sliding_window_non_causal": False}, False),
        ("dspark", {"sliding_window_non_causal": False}, True),
        ("argmax", {"sample_from_anchor": True}, False),
        ("argmax", {"without": "hidden_act"}, False),
    ],
)
def test_vllm_reads_speculators_where_it_drafts_as_trained(
    target: Target, tmp_path: Path, head: str, changes: dict[str, Any], reads: bool
) -> None:
    write_checkpoint(tmp_path / "final", replace(make(target, SPECULATORS, head), info={}), SPECULATORS)
    (tmp_path / "final" / "lilicorr.json").unlink()

    def change(config: dict[str, Any]) -> None:
        config["transformer_layer_config"].pop(changes.pop("without", None), None)
        config |= changes

    edit_config(tmp_path / "final", change)
    readers = inspect(tmp_path / "final")["as it stands for"]
    assert readers == ("speculators, vllm" if reads else "speculators")
