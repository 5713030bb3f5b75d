"""The format of vLLM's `speculators` library, translated into our fields and back.

Place in the flow: `format` writes it and `store` reads it through here. Unlike every other one it keeps the drafter's
transformer in a part of its own, leaves out what equals the defaults of a Qwen3 model, counts captured layers from
one, holds the number of drafted tokens beside the block size, and has tensors for a draft vocabulary: `t2d` [V], true
for the target ids that are drafted, and `d2t` [D], what to add to a draft id to get the target's.

It knows DFlash and DSpark. Fields and tensors as of speculators 0.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config

from lilicorr.blocks import ANCHOR_FIRST, IN_PLACE
from lilicorr.checkpoint.description import Description, block_fields, layer_fields, target_of
from lilicorr.checkpoint.field import Fields, object_at
from lilicorr.config import BUILT_IN
from lilicorr.heads import HEADS

TYPE = "speculators_model_type"  # only such a config.json has it
HEAD_TYPES = {"argmax": "dflash", "dspark": "dspark"}
ARCHITECTURES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
MODELS = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}  # which is what its models save instead
MAPS = ("t2d", "d2t")
LM_HEAD = "lm_head.weight"
DSPARK_FIELDS = tuple(HEADS["dspark"].format.config_fields)
OWN_FIELDS = {
    *(TYPE, "speculators_version", "speculators_config", "transformer_layer_config", "architectures", "block_size"),
    *("draft_vocab_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id", "num_target_layers"),
    *("sliding_window_non_causal", "sample_from_anchor", "torch_dtype", "tie_word_embeddings", "use_cache", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
# What a transformers configuration leaves out where it equals its default.
DEFAULTED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
)


def problem(description: Description) -> str | None:
    """Why the format cannot say what `description` does, None where it can."""
    last = description.shape.num_target_layers - 1
    if last in description.spec.target_layer_ids:
        return f"speculators cannot say that layer {last}, the target's last, is captured"
    if description.head == "dspark" and description.num_draft_ids is not None:
        return "a DSpark head over a draft vocabulary is not supported in the speculators format"
    return None


def encode_config(description: Description, info: dict[str, Any]) -> dict[str, Any]:
    """`config.json` in this format; `info["target"]` names the target, if others know it by that name."""
    kind, spec, shape = HEAD_TYPES[description.head], description.spec, description.shape
    block, layer, target = block_fields(description), layer_fields(description, info), target_of(info)
    draft = description.num_draft_ids
    method = {"proposal_type": "greedy", "speculative_tokens": spec.num_slots}
    return {
        "architectures": [ARCHITECTURES[kind]],
        TYPE: kind,
        "dtype": description.dtype,
        "num_target_layers": layer.pop("num_target_layers"),
        "block_size": spec.block_size,
        "draft_vocab_size": shape.vocab_size if draft is None else draft,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in spec.target_layer_ids],
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.layout == ANCHOR_FIRST,
        "sliding_window_non_causal": True,  # of sliding windows, which are not here; vLLM takes it for every layer
        **({name: block[name] for name in DSPARK_FIELDS} if kind == "dspark" else {}),
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": None if target.get("source") in BUILT_IN else target.get("source"),
                "architectures": target.get("architectures") or [],
            },
        },
    }


def decode_config(path: Path, top: dict[str, Any], num_target_layers: int | None) -> Fields:
    """The fields of such a config.json in our spelling.

    `num_target_layers` where the caller knows it: only checkpoints written here say it themselves. Raises ValueError
    that names the field for what is missing, unknown or contradictory.
    """
    config = Fields(path, {key: value for key, value in top.items() if key != "transformer_layer_config"})
    kind = config.get(TYPE, str)
    if kind not in MODELS or config.get("architectures", list) not in ([ARCHITECTURES[kind]], [MODELS[kind]]):
        raise ValueError(
            f"{path}: {TYPE} must be one of {', '.join(ARCHITECTURES)} with its architecture "
            f"{' or '.join(ARCHITECTURES.values())}, got {kind!r} with {config.get('architectures', list)}"
        )
    own = OWN_FIELDS | (set(DSPARK_FIELDS) if kind == "dspark" else set())
    config.refuse_unknown(own | PretrainedConfig().to_dict().keys(), ())
    layer = _layer(Fields(path, top).get("transformer_layer_config", dict), Qwen3Config().to_dict())
    ids = config.integers("aux_hidden_state_layer_ids")
    block: dict[str, Any] = {
        "block_size": config.get("block_size"),
        "layout": ANCHOR_FIRST if config.get("sample_from_anchor", bool) else IN_PLACE,
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": [layer_id - 1 for layer_id in ids],
    }
    if kind == "dspark":
        block |= {"projector_type": "dspark"} | {
            name: config.get(name, type(getattr(HEADS["dspark"].Config(), name))) for name in DSPARK_FIELDS
        }
    if config.get("draft_vocab_size") != layer["vocab_size"]:
        block["draft_vocab_size"] = config.get("draft_vocab_size")
    _check_drafted(config, block)
    for name in ("dtype", "torch_dtype"):
        if config.has(name):
            layer[name] = config.get(name, str)
    layers = config.get("num_target_layers") if config.has("num_target_layers") else num_target_layers
    architecture = HEADS["dspark" if kind == "dspark" else "argmax"].format.architecture
    outer = {"architectures": [architecture], "dflash_config": block, "num_target_layers": layers}
    return Fields(path, layer | outer)


def vllm_reads(top: dict[str, Any], description: Description) -> bool:
    """Whether vLLM drafts as trained with such a config.json as it stands.

    It translates the format itself, puts no defaults in, and knows DFlash in place only. There a false
    `sliding_window_non_causal`, which in the format is of sliding windows alone, makes the attention of every layer
    causal (vLLM 0.33.0, `transformers_utils/configs/speculators/algos.py`).
    """
    if not top["transformer_layer_config"].keys() >= set(DEFAULTED):
        return False
    as_trained = description.spec.layout == IN_PLACE and top.get("sliding_window_non_causal", True)
    return description.head == "dspark" or bool(as_trained)


def _layer(stated: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The drafter's transformer with what was left out as a default; the number of layers makes the list of kinds."""
    layer = {name: defaults[name] for name in DEFAULTED} | stated
    if not any(layer.get(name) for name in ("rope_theta", "rope_parameters", "rope_scaling")):
        layer["rope_parameters"] = defaults["rope_parameters"]
    return {name: value for name, value in layer.items() if name != "architectures"}


def _check_drafted(config: Fields, block: dict[str, Any]) -> None:
    """Refuse a number of drafted tokens that the blocks do not hold: servers take it from here."""
    slots = block["block_size"] - (block["layout"] == IN_PLACE)
    methods = config.object("speculators_config").get("proposal_methods")
    if not methods:
        raise ValueError(f"{config.path}: field speculators_config.proposal_methods is missing")
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise ValueError(f"{config.path}: speculators_config.proposal_methods must be objects, got {methods!r}")
    for method in methods:
        drafted = method.get("speculative_tokens")
        if type(drafted) is not int or drafted > slots:
            raise ValueError(
                f"{config.path}: speculative_tokens of {method.get('proposal_type')} must be at most {slots}, what a "
                f"block of {block['block_size']} drafts, got {drafted!r}"
            )


def target_name(path: Path, top: dict[str, Any]) -> dict[str, Any]:
    """What the format says of the target, as `info["target"]`."""
    verifier = object_at(path, object_at(path, top, "speculators_config"), "verifier")
    return {"source": verifier.get("name_or_path"), "architectures": verifier.get("architectures") or []}


def map_tensors(vocab_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`t2d` and `d2t` of the drafted target ids [D], ascending."""
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[vocab_ids.cpu()] = True
    return {"t2d": drafted, "d2t": vocab_ids.cpu() - torch.arange(len(vocab_ids))}


def read_maps(path: Path, tensors: dict[str, Tensor], size: int | None, vocab_size: int) -> Tensor | None:
    """Take `t2d` and `d2t` out of `tensors` and return the ids that they name, None for the whole vocabulary."""
    maps = {name: tensors.pop(name) for name in MAPS if name in tensors}
    if (size is not None) != (len(maps) == len(MAPS)) or len(maps) == 1:
        found = ", ".join(maps) or "neither"
        raise ValueError(f"{path}: a draft vocabulary of {size} needs t2d and d2t or none of them, found {found}")
    if size is None:
        return None
    drafted, offsets = maps["t2d"], maps["d2t"]
    if drafted.shape != (vocab_size,) or offsets.shape != (size,):
        raise ValueError(
            f"{path}: t2d and d2t have shapes {list(drafted.shape)} and {list(offsets.shape)}, must be "
            f"[{vocab_size}] and [{size}]"
        )
    ids = torch.arange(size) + offsets
    if not torch.equal(ids, drafted.nonzero()[:, 0]):
        raise ValueError(f"{path}: t2d and d2t name different ids")
    return ids
