"""Checkpoints with one thing wrong: every one is refused, with a message that names what it is."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lilicorr.checkpoint import captured_layers, load_draft_model, read_checkpoint, write_checkpoint
from lilicorr.checkpoint.format import NATIVE, SPECULATORS
from lilicorr.target import Target
from test_checkpoint import edit_config, edit_tensors, with_value, without
from test_convert import make

Damage = Callable[[Path], Any]


@pytest.fixture
def target(target_factory: Callable[..., Target]) -> Target:
    return target_factory(dtype=torch.float32)


def field(name: str, *value: Any, block: bool = False) -> Damage:
    """A field with another value, or without one."""
    change = with_value(name, *value, block) if value else without(name, block)
    return lambda folder: edit_config(folder, change)


def nested(name: str, *value: Any) -> Damage:
    """The same of a field in `dflash_config`."""
    return field(name, *value, block=True)


def config(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda folder: edit_config(folder, change)


def tensor(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    return lambda folder: edit_tensors(folder, change)


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensor(lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))


def cut(name: str, end: int) -> Damage:
    """A file that ends too early."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:end])


def renamed(old: str, new: str) -> Damage:
    return tensor(lambda tensors: tensors.update({new: tensors.pop(old)}))


def two_lines(folder: Path) -> None:
    """Two tensors that share bytes: the header says another place than its own."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["norm.weight"]["data_offsets"] = header["hidden_norm.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def everywhere(name: str, value: Any) -> Damage:
    """A field changed in both places, so that it contradicts nothing in its own file."""
    return config(lambda c: [place.update({name: value}) for place in (c, c["dflash_config"])])


def weight_map(value: Any) -> Damage:
    """An index in place of the weights."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))

    return damage


def noted(name: str, value: Any) -> Damage:
    """A field of `lilicorr.json` with another value."""

    def damage(folder: Path) -> None:
        path = folder / "lilicorr.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return damage


def theta_of_another_target(config: dict[str, Any]) -> None:
    """In both schemas, so that only the target tells."""
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1e6


def yarn(**changes: Any) -> Damage:
    """YaRN with a value that cannot be."""
    return field("rope_scaling", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128} | changes)


LILICORR = [
    # fields that are missing
    (field("architectures"), "field architectures is missing"),
    (field("head_dim"), "field head_dim is missing"),
    (field("num_key_value_heads"), "field num_key_value_heads is missing"),
    (field("rms_norm_eps"), "field rms_norm_eps is missing"),
    (field("num_target_layers"), "field num_target_layers is missing"),
    (field("max_position_embeddings"), "field max_position_embeddings is missing"),
    (config(lambda c: [c.pop(n) for n in ("rope_theta", "rope_parameters")]), "field rope_theta is missing"),
    (nested("mask_token_id"), "field mask_token_id is missing"),
    (nested("target_layer_ids"), "field target_layer_ids is missing"),
    (nested("lilicorr_logit_scale"), "field dflash_config.lilicorr_logit_scale is missing"),
    (nested("lilicorr_vector_eps"), "field dflash_config.lilicorr_vector_eps is missing"),
    (nested("lilicorr_candidate_topk"), "field dflash_config.lilicorr_candidate_topk is missing"),
    # fields that are wrong
    (field("architectures", ["Qwen3ForCausalLM"]), "architectures must be one of DFlashDraftModel, .* got .'Qwen3ForC"),
    (field("head_dim", "8"), "field head_dim must be int, got '8'"),
    (field("rms_norm_eps", True), "field rms_norm_eps must be float, got True"),
    (nested("lilicorr_logit_scale", "8"), "field lilicorr_logit_scale must be float, got '8'"),
    (nested("lilicorr_candidate_topk", 6), r"lilicorr.rank_embedding has shape \[1, 1, 1, 4, 16\], must be .*6, 16"),
    (nested("lilicorr_num_heads", 3), "num_heads must divide the head's hidden_size 16, got 3"),
    (nested("lilicorr_num_layers", 3), "tensors are missing: lilicorr.layers.2"),
    (nested("lilicorr_hidden_size", 0), "tensors are surplus: lilicorr.token_proj"),
    (nested("lilicorr_factor_dim", 11), "has shape .*12"),
    (nested("lilicorr_mlp_ratio", 4.0), r"lilicorr.layers.\d.mlp.\w+_proj.\w+ has shape"),
    (field("block_size", 16), "block_size is 5 in dflash_config and 16 outside"),
    (everywhere("block_size", 6), r"lilicorr.relative_slot_bias has shape \[2, 9\], must be \[2, 11\]"),
    (everywhere("block_size", 1), "block_size must be at least 2 in_place, got 1"),
    (nested("layout", "anchor_first"), "layout of the head lilicorr must be in_place, got 'anchor_first'"),
    (nested("sample_from_anchor", True), "layout is anchor_first and in_place by different fields"),
    (nested("mask_token_id", 67), "mask_token_id 67 is outside the target's 67"),
    (nested("mask_token_id", -1), "mask_token_id -1 is outside the target's 67"),
    (nested("target_layer_ids", [1, 6]), r"target_layer_ids \[6\] are past the target's 6 layers"),
    (nested("target_layer_ids", [3, 1]), "target_layer_ids must be ascending"),
    (nested("target_layer_ids", [1, "3"]), "target_layer_ids must be integers"),
    (nested("target_layer_ids", [True, 3]), "target_layer_ids must be integers"),
    (nested("target_layer_ids", []), "target_layer_ids must be ascending"),
    (nested("target_layer_ids", [1, 2, 3]), r"fc.weight has shape \[32, 64\], must be \[32, 96\]"),
    (field("hidden_size", 64), "hidden_size is 64, the target's is 32"),
    (field("vocab_size", 68), "vocab_size is 68, the target's embedding has 67"),
    (field("num_target_layers", 36), "num_target_layers is 36, the target has 6"),
    (field("rope_theta", 1e6), "rope_theta is 10000.0 and 1000000.0, the target's is 10000.0"),
    (config(theta_of_another_target), "rope_theta is 1000000.0, the target's is 10000.0"),
    (field("num_hidden_layers", 3), "layer_types must be full_attention for each of the 3 layers"),
    (field("num_attention_heads", 8), r"layers.0.self_attn.o_proj.weight has shape \[32, 32\], must be \[32, 64\]"),
    (field("intermediate_size", 63), r"layers.0.mlp.\w+.weight has shape"),
    (field("dtype", "bfloat16"), "is float32, config.json says bfloat16"),
    (field("dtype", "int8"), "dtype must be one of float32, bfloat16, float16, got int8"),
    (config(lambda c: c.update(dflash_config=[1])), r"field dflash_config must be an object, got \[1\]"),
    (field("rope_scaling", "yarn"), "field rope_scaling must be an object, got 'yarn'"),
    (field("rope_parameters", 1e4), "field rope_parameters must be an object, got 10000.0"),
    (field("rope_theta", [1e4]), r"field rope_theta must be a number above 0, got \[10000.0\]"),
    (field("rope_theta", -1), "field rope_theta must be a number above 0, got -1"),
    (field("hidden_size", -32), "hidden_size is -32, the target's is 32"),
    (field("vocab_size", -1), "vocab_size is -1, the target's embedding has 67"),
    (field("num_key_value_heads", 0), "field num_key_value_heads must be above 0, got 0"),
    (field("num_key_value_heads", 3), "num_kv_heads must divide num_heads 4, got 3"),
    (field("head_dim", -8), "field head_dim must be above 0, got -8"),
    (field("intermediate_size", -64), "field intermediate_size must be above 0, got -64"),
    (field("rms_norm_eps", 0), "field rms_norm_eps must be above 0, got 0"),
    (nested("lilicorr_hidden_size", -16), "hidden_size -16 and num_layers 2 of the head must not be negative"),
    (nested("lilicorr_factor_dim", -1), "factor_dim of the head must be a number above 0, got -1"),
    (nested("lilicorr_mlp_ratio", -1.0), "mlp_ratio of the head must be a number above 0, got -1.0"),
    (nested("lilicorr_logit_scale", 0.0), "logit_scale of the head must be a number above 0, got 0.0"),
    (nested("lilicorr_logit_scale", float("nan")), "logit_scale of the head must be a number above 0, got nan"),
    (nested("lilicorr_vector_eps", -1e-4), "vector_eps of the head must be a number above 0, got -0.0001"),
    (nested("draft_vocab_size", 0), "field draft_vocab_size must be above 0, got 0"),
    (yarn(factor=0.5), "rope_scaling.factor must be at least 1, got 0.5"),
    (yarn(factor=float("nan")), "rope_scaling.factor must be at least 1, got nan"),
    (yarn(factor=float("inf")), "rope_scaling.factor must be finite, got inf"),
    (yarn(original_max_position_embeddings=0), "original_max_position_embeddings must be at least 1, got 0"),
    (yarn(attention_factor=0.0), "rope_scaling.attention_factor must be above 0, got 0.0"),
    (yarn(attention_factor=float("nan")), "rope_scaling.attention_factor must be above 0, got nan"),
    (yarn(beta_fast=0), "rope_scaling.beta_fast must be above 0, got 0.0"),
    (yarn(beta_slow=-1), "rope_scaling.beta_slow must be above 0, got -1.0"),
    # fields that ask for what is not here
    (field("rope_scaling", {"type": "yarn"}), "field rope_scaling.factor is missing"),
    (field("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}), "rope_type = 'linear' is not supported"),
    (field("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor is unknown"),
    (field("layer_types", ["full_attention", "sliding_attention"]), "layer_types must be full_attention for each of"),
    (field("model_type", "llama"), "model_type = 'llama' is not supported"),
    (field("hidden_act", "gelu"), "hidden_act = 'gelu' is not supported"),
    (field("attention_bias", True), "attention_bias = True is not supported"),
    (field("sliding_window", 128), "sliding_window = 128 is not supported"),
    (field("quantization_config", {"bits": 4}), "quantization_config = .* is not supported"),
    (nested("conv_kernel_size", 3), "conv_kernel_size = 3 is not supported"),
    (nested("causal", True), "causal = True is not supported"),
    (nested("final_logit_softcapping", 30.0), "final_logit_softcapping = 30.0 is not supported"),
    (nested("output_multiplier", 0.5), "output_multiplier = 0.5 is not supported"),
    (nested("lilicorr_temperature", 0.5), "field dflash_config.lilicorr_temperature is unknown"),
    (field("router_experts", 8), "field router_experts is unknown"),
    (nested("draft_vocab_size", 5), "draft_vocab_size is 5, but draft_vocab.npy is missing"),
    # tensors
    (tensor(lambda t: t.pop("norm.weight")), "1 tensors are missing: norm.weight"),
    (tensor(lambda t: t.pop("lilicorr.same_slot_bias")), "1 tensors are missing: lilicorr.same_slot_bias"),
    (tensor(lambda t: t.pop("layers.1.self_attn.k_norm.weight")), "missing: layers.1.self_attn.k_norm.weight"),
    (tensor(lambda t: t.update({"embed_tokens.weight": torch.zeros(1)})), "1 tensors are surplus: embed_tokens.weight"),
    (tensor(lambda t: t.update({"lilicorr.conv.weight": torch.zeros(1)})), "1 tensors are surplus: lilicorr.conv.weig"),
    (renamed("fc.weight", "fc.weights"), "1 tensors are missing: fc.weight"),
    (renamed("lilicorr.out_head.bias", "out_head.bias"), "1 tensors are missing: lilicorr.out_head.bias"),
    (
        tensor(lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()})),
        "holds fc.weight twice, once as model.fc",
    ),
    (replaced("fc.weight", lambda t: t.T), r"fc.weight has shape \[64, 32\], must be \[32, 64\]"),
    (replaced("fc.weight", lambda t: t[:, :32]), r"fc.weight has shape \[32, 32\], must be \[32, 64\]"),
    (replaced("layers.0.mlp.down_proj.weight", lambda t: t.T), "layers.0.mlp.down_proj.weight has shape"),
    (replaced("lilicorr.slot_embedding", lambda t: t[0]), "lilicorr.slot_embedding has shape"),
    (replaced("norm.weight", lambda t: t.bfloat16()), "norm.weight is bfloat16, config.json says float32"),
    (
        replaced("fc.weight", lambda t: t.to(torch.float8_e4m3fn)),
        "fc.weight is float8_e4m3fn, config.json says float32",
    ),
    (replaced("lilicorr.rank_embedding", lambda t: t.double()), "lilicorr.rank_embedding is float64, config.json says"),
    (replaced("fc.weight", lambda t: t.log()), "fc.weight has values that are not finite"),
    (replaced("norm.weight", lambda t: t / 0), "norm.weight has values that are not finite"),
    # files
    (cut("model.safetensors", -9), "model.safetensors is damaged or cut off"),
    (cut("model.safetensors", 100), "model.safetensors is damaged or cut off"),
    (two_lines, "model.safetensors is damaged or cut off"),
    (cut("config.json", -9), "config.json is not JSON"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json must hold an object, found list"),
    (lambda folder: (folder / "config.json").write_bytes(b'{"block_size": "\xff"}'), "config.json is not JSON"),
    (lambda folder: (folder / "lilicorr.json").write_text('{"block": 5}'), "field block must be an object, got 5"),
    (noted("target", 5), "lilicorr.json: field target must be an object, got 5"),
    (noted("target", {"source": 5}), "field target.source must be a text, got 5"),
    (noted("template_kwargs", "x"), "field template_kwargs must be an object, got 'x'"),
    (noted("corpus", [1]), r"field corpus must be an object, got \[1\]"),
    (noted("corpus", {"rows": "9"}), "field rows must be an integer of at least 0, got '9'"),
    (noted("loss", 10**400), "field loss must be a number of at least 0, got 1000"),
    (noted("tau", float("nan")), "field tau must be a number of at least 0, got nan"),
    (noted("tau", True), "field tau must be a number of at least 0, got True"),
    (noted("num_blocks", -5), "field num_blocks must be an integer of at least 0, got -5"),
    (noted("num_blocks", 1e300), "field num_blocks must be an integer of at least 0, got 1e"),
    (noted("template_kwargs", {"enable_thinking": []}), "field template_kwargs.enable_thinking must be true or false"),
    (noted("taus", {"aime": {"tau": 3, "speedup": float("inf")}}), "field speedup of aime must be a number of at"),
    (noted("taus", {"aime": {"tau": 3, "ci95": [1, float("nan")]}}), "the interval of aime must be two numbers"),
    (noted("taus", [1]), r"field taus must be an object, got \[1\]"),
    (noted("taus", {"aime": 3}), "field aime must be an object, got 3"),
    (noted("taus", {"aime": {"tau": None}}), "field tau of aime is missing"),
    (noted("taus", {"aime": {"tau": 3, "ci95": 4}}), "the interval of aime must be two numbers, got 4"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    (weight_map(["a"]), "field weight_map must be an object"),
    (weight_map({"fc.weight": 1}), "weight_map must hold names of files"),
]


def methods(value: Any) -> Damage:
    return config(lambda c: c["speculators_config"].update(proposal_methods=value))


def nameless(name: str, value: Any) -> Damage:
    """A field of `speculators_config`, in a folder without the file that says the same."""

    def damage(folder: Path) -> None:
        (folder / "lilicorr.json").unlink()
        edit_config(folder, lambda c: c["speculators_config"].update({name: value}))

    return damage


# Of other heads and formats: (format, head, damage, message)
OTHERS = [
    (
        NATIVE,
        "argmax",
        nested("layout", "anchor_first"),
        "layout is anchor_first, lilicorr.json beside it says in_place",
    ),
    (NATIVE, "argmax", nested("layout", "sideways"), "layout of the head argmax must be in_place or anchor_first"),
    (NATIVE, "argmax", everywhere("block_size", 6), "block_size is 6, lilicorr.json beside it says 5"),
    (NATIVE, "argmax", nested("lilicorr_logit_scale", 8.0), "field dflash_config.lilicorr_logit_scale is unknown"),
    ("zlab", "argmax", nested("block_size"), "field block_size is missing"),
    ("zlab_old", "argmax", field("block_size"), "field block_size is missing"),
    ("sglang", "domino", nested("shift_label"), "field layout or shift_label is missing"),
    ("sglang", "domino", nested("gru_hidden_dim"), "field dflash_config.gru_hidden_dim is missing"),
    (
        "specforge_old",
        "domino",
        renamed("logit_head.embed_proj.2.weight", "logit_head.out.weight"),
        "missing: embed_proj",
    ),
    ("deepspec", "dspark", field("markov_rank"), "field dflash_config.markov_rank is missing"),
    ("deepspec", "dspark", field("markov_head_type", "gru"), "markov_head_type must be one of vanilla, gated, rnn"),
    ("deepspec", "dspark", replaced("lm_head.weight", lambda t: t + 1), "lm_head.weight is not the target's own table"),
    ("deepspec", "dspark", replaced("embed_tokens.weight", lambda t: t[1:]), "embed_tokens.weight has shape"),
    ("specforge", "dspark", nested("markov_rank", -8), "markov_rank of the head must be a number above 0, got -8"),
    ("specforge", "domino", nested("gru_hidden_dim", 0), "gru_hidden_dim of the head must be a number above 0, got 0"),
    ("modelopt", "dspark", nested("use_confidence_head", False), "tensors are surplus: confidence_proj.bias"),
    ("modelopt", "lilicorr", nested("lilicorr_enabled", False), "tensors are surplus: lilicorr."),
    (
        "modelopt",
        "lilicorr",
        renamed("lilicorr.feature_mlp.3.bias", "lilicorr.bias"),
        "lilicorr.feature_mlp.down_proj.bi",
    ),
    ("modelopt", "lilicorr", nested("lilicorr_mlp_ratio", 4.0), r"lilicorr.layers.\d.mlp.\d.\w+ has shape"),
    ("vllm", "lilicorr", renamed("lilicorr.feature_norm.bias", "lilicorr.bias"), "missing: lilicorr.feature_norm.bias"),
    (SPECULATORS, "argmax", field("speculators_model_type", "eagle3"), "speculators_model_type must be one of dflash"),
    (SPECULATORS, "argmax", field("sample_from_anchor"), "field sample_from_anchor is missing"),
    (SPECULATORS, "argmax", field("aux_hidden_state_layer_ids", [2, 7]), r"\[6\] are past the target's 6 layers"),
    (SPECULATORS, "argmax", field("aux_hidden_state_layer_ids", [0, 2]), "target_layer_ids must be ascending.*-1"),
    (SPECULATORS, "argmax", field("aux_hidden_state_layer_ids", ["2", 4]), "aux_hidden_state_layer_ids must be int"),
    (SPECULATORS, "argmax", field("draft_vocab_size", 5), "a draft vocabulary of 5 needs t2d and d2t .* found neither"),
    (SPECULATORS, "argmax", field("norm_before_residual", True), "field norm_before_residual is unknown"),
    (
        SPECULATORS,
        "argmax",
        config(lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=5)),
        "speculative_tokens of greedy must be at most 4, what a block of 5 drafts, got 5",
    ),
    (SPECULATORS, "argmax", field("speculators_config", "greedy"), "field speculators_config must be an object"),
    (SPECULATORS, "argmax", methods(["greedy"]), "proposal_methods must be objects, got .'greedy'"),
    (SPECULATORS, "argmax", methods([{"speculative_tokens": "4"}]), "must be at most 4, .* got '4'"),
    (SPECULATORS, "argmax", nameless("verifier", "a/target"), "field verifier must be an object, got 'a/target'"),
    (SPECULATORS, "dspark", field("markov_rank"), "field markov_rank is missing"),
    (
        SPECULATORS,
        "dspark",
        field("transformer_layer_config", {"rope_theta": 1e4}),
        "hidden_size is 4096, the target's",
    ),
]
EVERY = [*((NATIVE, "lilicorr", *damage) for damage in LILICORR), *OTHERS]


@pytest.mark.parametrize(("form", "head", "damage", "message"), EVERY, ids=[f"{e[1]}: {e[3][:50]}" for e in EVERY])
def test_refused_by_name(target: Target, tmp_path: Path, form: str, head: str, damage: Damage, message: str) -> None:
    folder = tmp_path / "final"
    write_checkpoint(folder, make(target, form, head), form)
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_draft_model(folder, target)
    assert str(folder) in str(error.value)


def test_maps_of_a_draft_vocabulary_must_agree(target: Target, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "final", make(target, SPECULATORS, "argmax", torch.tensor([0, 3, 65])), SPECULATORS)
    edit_tensors(tmp_path / "final", lambda t: t["d2t"].add_(1))
    with pytest.raises(ValueError, match="t2d and d2t name different ids"):
        load_draft_model(tmp_path / "final", target)
    edit_tensors(tmp_path / "final", lambda t: t.pop("t2d"))
    with pytest.raises(ValueError, match="needs t2d and d2t or none of them, found d2t"):
        load_draft_model(tmp_path / "final", target)


def test_the_captured_layers_of_a_damaged_folder_are_refused_by_name(target: Target, tmp_path: Path) -> None:
    """They are read before there is a target, so by another way than the rest."""
    for form, damage, message in (
        (NATIVE, nested("target_layer_ids"), "field target_layer_ids is missing"),
        (NATIVE, nested("target_layer_ids", "1"), "field target_layer_ids must be list, got '1'"),
        (NATIVE, nested("target_layer_ids", [3, 1]), "target_layer_ids must be ascending"),
        (SPECULATORS, field("aux_hidden_state_layer_ids"), "field aux_hidden_state_layer_ids is missing"),
        (NATIVE, lambda folder: (folder / "config.json").unlink(), "is not a draft model: config.json is missing"),
    ):
        folder = tmp_path / message[:30]
        write_checkpoint(folder, make(target, form, "argmax"), form)
        damage(folder)
        with pytest.raises(ValueError, match=message) as error:
            captured_layers(folder)
        assert str(folder) in str(error.value)


def test_a_size_that_no_tensor_has_is_refused_without_a_target_too(target: Target, tmp_path: Path) -> None:
    for name in ("hidden_size", "vocab_size", "num_target_layers"):
        write_checkpoint(tmp_path / name, make(target, NATIVE, "argmax"))
        edit_config(tmp_path / name, with_value(name, -1))
        with pytest.raises(ValueError, match=f"{name}/config.json: field {name} must be above 0, got -1"):
            read_checkpoint(tmp_path / name)


def array_file(ids: Any) -> Damage:
    return lambda folder: np.save(folder / "draft_vocab.npy", np.array(ids))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("draft_vocab.npy", 0), "draft_vocab.npy is damaged or cut off"),
        (cut("draft_vocab.npy", -9), "draft_vocab.npy is damaged or cut off"),
        (array_file([0, 3, 67]), r"draft_vocab.npy must hold 3 ascending ids below 67, found int64 \(3,\)"),
        (array_file([0, 3]), r"must hold 3 ascending ids below 67, found int64 \(2,\)"),
        (array_file([0, 3, 3]), "must hold 3 ascending ids below 67"),
        (array_file([0.5, 3, 4]), "must hold 3 ascending ids below 67, found float64"),
        (array_file([False, True, True]), "must hold 3 ascending ids below 67, found bool"),
        (nested("draft_vocab_size", 0), "field draft_vocab_size must be above 0, got 0"),
    ],
)
def test_a_damaged_draft_vocabulary_is_refused(target: Target, tmp_path: Path, damage: Damage, message: str) -> None:
    write_checkpoint(tmp_path / "final", make(target, NATIVE, "argmax", torch.tensor([0, 3, 65])))
    damage(tmp_path / "final")
    with pytest.raises(ValueError, match=message) as error:
        load_draft_model(tmp_path / "final", target)
    assert str(tmp_path / "final") in str(error.value)
