"""Draft models on disk, in the format the public servers read.

Place in the flow: training ends with `save_draft_model`; evaluation, serving and `start_from` begin with
`load_draft_model`. A folder holds `model.safetensors`, `config.json`, `lilicorr.json` (which target it was
trained for, and how) and, where the drafter predicts a part of the vocabulary only, `draft_vocab.npy`.

The drafter's tensors and fields are those of z-lab's DFlash checkpoints; a LiLiCorr checkpoint adds the
`lilicorr.*` tensors and the `lilicorr_*` fields of `dflash_config`. Reading is strict both ways: a tensor or
field that is missing, surplus or does not fit the target is an error that names it.

Paper: section 3 and Table 4 give the shapes; the format is the one of SGLang's and vLLM's loaders.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lilicorr.blocks import BlockSpec
from lilicorr.config import DrafterConfig
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import DrafterShape
from lilicorr.folder import new_folder
from lilicorr.target import Target, rope_theta

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS, CONFIG, INFO, DRAFT_VOCAB = "model.safetensors", "config.json", "lilicorr.json", "draft_vocab.npy"


@dataclass(frozen=True)
class HeadFormat:
    """How a head is spelled in a checkpoint."""

    architecture: str
    prefix: str = ""  # of the head's tensors
    config_fields: dict[str, str] = field(default_factory=dict)  # field of dflash_config -> field of the head's config
    candidates_field: str | None = None  # field of dflash_config that holds K


FORMATS = {
    "argmax": HeadFormat("DFlashDraftModel"),
    "lilicorr": HeadFormat(
        "LiLiCorrDraftModel",
        prefix="lilicorr.",
        config_fields={
            "lilicorr_hidden_size": "hidden_size",
            "lilicorr_num_layers": "num_layers",
            "lilicorr_num_heads": "num_heads",
            "lilicorr_mlp_ratio": "mlp_ratio",
            "lilicorr_factor_dim": "factor_dim",
            "lilicorr_vector_eps": "vector_eps",
            "lilicorr_logit_scale": "logit_scale",
        },
        candidates_field="lilicorr_candidate_topk",
    ),
}


def checkpoint_tensors(draft_model: DraftModel) -> dict[str, Tensor]:
    """The draft model's tensors under the names a checkpoint gives them."""
    form = FORMATS[draft_model.head_name]
    head = draft_model.head.state_dict()
    return draft_model.drafter.state_dict() | {form.prefix + name: tensor for name, tensor in head.items()}


def save_draft_model(
    folder: Path, draft_model: DraftModel, target_info: dict[str, Any], dtype: str = "bfloat16"
) -> None:
    """Write `draft_model` as a checkpoint folder, whole or not at all.

    `target_info` (JSON-able) goes to `lilicorr.json`; its `bos_token_id` and `eos_token_id` also to
    `config.json`. Raises ValueError for an unknown `dtype`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype of a checkpoint must be one of {', '.join(DTYPES)}, got {dtype!r}")
    tensors = {
        name: tensor.detach().to("cpu", DTYPES[dtype]).contiguous()
        for name, tensor in checkpoint_tensors(draft_model).items()
    }
    with new_folder(Path(folder)) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        _write(aside / CONFIG, _config(draft_model, target_info, dtype))
        _write(aside / INFO, target_info)
        if draft_model.vocab_ids is not None:
            np.save(aside / DRAFT_VOCAB, draft_model.vocab_ids.cpu().numpy())


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _config(draft_model: DraftModel, target_info: dict[str, Any], dtype: str) -> dict[str, Any]:
    """`config.json`; RoPE stands in the old and in the new schema, the block size in both places readers look."""
    shape, spec, form = draft_model.shape, draft_model.spec, FORMATS[draft_model.head_name]
    block: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
    }
    if form.candidates_field:
        block[form.candidates_field] = spec.num_candidates
    for name, attribute in form.config_fields.items():
        block[name] = getattr(draft_model.head.config, attribute)
    if draft_model.vocab_ids is not None:
        block["draft_vocab_size"] = len(draft_model.vocab_ids)
    return {
        "architectures": [form.architecture],
        "model_type": "qwen3",
        "dtype": dtype,
        "block_size": spec.block_size,
        "dflash_config": block,
        "num_target_layers": shape.num_target_layers,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * shape.num_layers,
        "max_window_layers": shape.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": target_info.get("bos_token_id"),
        "eos_token_id": target_info.get("eos_token_id"),
    }


class _Fields:
    """The fields of a config.json; what is missing or contradicts itself is an error that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path.parent} is not a draft model: {path.name} is missing")
        try:
            self.top: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        self.block: dict[str, Any] = self.top.get("dflash_config") or {}

    def get(self, name: str, kind: type = int) -> Any:
        """A field of `dflash_config`, else of the top level."""
        places = [place[name] for place in (self.block, self.top) if place.get(name) is not None]
        if not places:
            raise ValueError(f"{self.path}: field {name} is missing")
        if any(value != places[0] for value in places):
            raise ValueError(f"{self.path}: field {name} is {places[0]!r} in dflash_config and {places[1]!r} outside")
        if isinstance(places[0], bool) or not isinstance(places[0], (int, float) if kind is float else kind):
            raise ValueError(f"{self.path}: field {name} must be {kind.__name__}, got {places[0]!r}")
        return places[0]

    def expect(self, name: str, value: Any, owner: str) -> None:
        """Refuse a field that differs from what `owner` says."""
        if self.get(name, type(value)) != value:
            raise ValueError(f"{self.path}: {name} is {self.get(name, type(value))}, {owner} {value}")

    def refuse(self, name: str, *harmless: Any) -> None:
        """Refuse a field whose value would need code that is not here."""
        for place in (self.block, self.top):
            if place.get(name) not in (None, *harmless):
                raise ValueError(f"{self.path}: {name} = {place[name]!r} is not supported")


def load_draft_model(
    folder: Path,
    target: Target,
    head: str | None = None,
    head_config: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> DraftModel:
    """Read a checkpoint folder for `target`, on its device and in its dtype unless `dtype` says otherwise.

    `head` decodes the same drafter with another head: `"argmax"` reads the drafter's part only. `head_config`
    overrides what the checkpoint does not fix (the walk, loss weights). Tensor names may carry `model.`.

    Raises ValueError that names the tensor or field for anything missing, surplus or not fitting the target.
    """
    folder = Path(folder)
    config = _Fields(folder / CONFIG)
    stored = _stored_head(config)
    name = stored if head is None else head
    if name not in FORMATS:
        raise ValueError(f"head must be one of {', '.join(FORMATS)}, got {name!r}")
    if name not in (stored, "argmax"):
        raise ValueError(f"{folder} holds the head {stored}, which cannot be read as {name}")
    shape, spec = _shape(config, target), _spec(config, target, stored)
    fixed = {attribute: _head_field(config, key) for key, attribute in FORMATS[name].config_fields.items()}
    for key, value in (head_config or {}).items():
        if key in fixed and fixed[key] != value:
            raise ValueError(f"{config.path}: head_config.{key} = {value!r}, but it was trained with {fixed[key]!r}")
    vocab_ids = _draft_vocab(folder, config, shape.vocab_size)
    draft_model = build_draft_model(shape, spec, name, (head_config or {}) | fixed, target, vocab_ids)
    _load_tensors(folder / WEIGHTS, draft_model, stored)
    return draft_model.to(target.device, dtype or target.embed.dtype).eval()


def read_info(folder: Path) -> dict[str, Any]:
    """The `target_info` a checkpoint was saved with."""
    path = Path(folder) / INFO
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    return json.loads(path.read_text(encoding="utf-8"))


def _stored_head(config: _Fields) -> str:
    """The head a checkpoint holds, by its architecture."""
    architectures = config.get("architectures", list)
    known = {form.architecture: name for name, form in FORMATS.items()}
    if len(architectures) != 1 or architectures[0] not in known:
        raise ValueError(f"{config.path}: architectures must be one of {', '.join(known)}, got {architectures}")
    name = known[architectures[0]]
    return "argmax" if name == "lilicorr" and config.block.get("lilicorr_enabled") is False else name


def _head_field(config: _Fields, name: str) -> Any:
    """A field of the head, required: a wrong scale would change no shape and load silently."""
    if config.block.get(name) is None:
        raise ValueError(f"{config.path}: field dflash_config.{name} is missing")
    return config.get(name, float)


def _shape(config: _Fields, target: Target) -> DrafterShape:
    """The drafter's shape, after comparing what it shares with the target."""
    config.expect("hidden_size", target.config.hidden_size, "the target's is")
    config.expect("vocab_size", target.embed.shape[0], "the target's embedding has")
    config.expect("num_target_layers", target.config.num_hidden_layers, "the target has")
    config.refuse("attention_bias", False)
    config.refuse("hidden_act", "silu")
    config.refuse("sliding_window")
    config.refuse("use_sliding_window", False)
    config.refuse("rope_scaling")
    config.refuse("conv_kernel_size")
    return DrafterShape(
        hidden_size=config.get("hidden_size"),
        num_layers=config.get("num_hidden_layers"),
        num_heads=config.get("num_attention_heads"),
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        intermediate_size=config.get("intermediate_size"),
        num_captured_layers=len(config.get("target_layer_ids", list)),
        vocab_size=config.get("vocab_size"),
        num_target_layers=config.get("num_target_layers"),
        rms_norm_eps=config.get("rms_norm_eps", float),
        rope_theta=_rope_theta(config, target),
        max_position_embeddings=config.get("max_position_embeddings"),
    )


def _rope_theta(config: _Fields, target: Target) -> float:
    """The RoPE base, from either schema; both must agree with each other and with the target."""
    parameters = config.top.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"{config.path}: rope_parameters.rope_type = {parameters['rope_type']!r} is not supported")
    stated = {place.get("rope_theta") for place in (parameters, config.top)} - {None}
    if not stated:
        raise ValueError(f"{config.path}: field rope_theta is missing")
    if stated != {rope_theta(target.config)}:
        values = " and ".join(str(value) for value in sorted(stated))
        raise ValueError(f"{config.path}: rope_theta is {values}, the target's is {rope_theta(target.config)}")
    return float(stated.pop())


def _spec(config: _Fields, target: Target, stored: str) -> BlockSpec:
    """The block, after checking its ids against the target."""
    layer_ids, mask_token_id = config.get("target_layer_ids", list), config.get("mask_token_id")
    beyond = [layer_id for layer_id in layer_ids if layer_id >= target.config.num_hidden_layers]
    if beyond:
        raise ValueError(
            f"{config.path}: target_layer_ids {beyond} are past the target's {target.config.num_hidden_layers} layers"
        )
    if not 0 <= mask_token_id < target.embed.shape[0]:
        raise ValueError(
            f"{config.path}: mask_token_id {mask_token_id} is outside the target's {target.embed.shape[0]} embeddings"
        )
    key = FORMATS[stored].candidates_field
    num_candidates = int(_head_field(config, key)) if key else DrafterConfig.num_candidates
    return BlockSpec(config.get("block_size"), num_candidates, mask_token_id, tuple(layer_ids))


def _draft_vocab(folder: Path, config: _Fields, vocab_size: int) -> Tensor | None:
    """The ids the drafter predicts, None for the whole vocabulary."""
    size, path = config.block.get("draft_vocab_size"), folder / DRAFT_VOCAB
    if (size is not None) != path.is_file():
        found = "exists" if size is None else "is missing"
        raise ValueError(f"{config.path}: draft_vocab_size is {size}, but {path.name} {found}")
    if size is None:
        return None
    try:
        ids = np.load(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is cut off: {error}") from error
    if ids.shape != (size,) or np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"{path} must hold {size} ascending ids below {vocab_size}, found {ids.shape}")
    return torch.from_numpy(ids.astype(np.int64))


def _load_tensors(path: Path, draft_model: DraftModel, stored: str) -> None:
    """Copy the file's tensors into `draft_model`; every name and every shape must match."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    wanted = checkpoint_tensors(draft_model)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name.removeprefix("model."): file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error
    if stored != draft_model.head_name:
        found = {name: tensor for name, tensor in found.items() if not name.startswith(FORMATS[stored].prefix)}
    missing, surplus = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        raise ValueError(f"{path}: {len(missing)} tensors are missing: {', '.join(missing[:8])}")
    if surplus:
        raise ValueError(f"{path}: {len(surplus)} tensors are surplus: {', '.join(surplus[:8])}")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, must be {list(wanted[name].shape)}")
        wanted[name].copy_(tensor)  # state_dict shares storage with the parameters
