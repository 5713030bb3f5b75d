"""Draft models on disk, in the format the public servers read.

Place in the flow: training ends with `save_draft_model`; evaluation, serving and `start_from` begin with
`load_draft_model`. A folder holds `model.safetensors`, `config.json`, `lilicorr.json` (which target it was
trained for, and how) and, where the drafter predicts a part of the vocabulary only, `draft_vocab.npy`.

The drafter's tensors and fields are those of z-lab's DFlash checkpoints; what a head adds is its own `format`
(`heads/base.py`), in the spelling of its authors. The layout of the blocks is a field of every checkpoint. Reading
is strict both ways: a tensor or field that is missing, surplus or does not fit the target is an error that names it.

Paper: section 3 and Table 4 give the shapes; the format is the one of SGLang's and vLLM's loaders.
"""

from __future__ import annotations

import json
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lilicorr.blocks import ANCHOR_FIRST, IN_PLACE, LAYOUTS, BlockSpec
from lilicorr.config import DrafterConfig, YarnConfig
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import DrafterShape
from lilicorr.fields import Fields, read_rope, rope_fields
from lilicorr.folder import new_folder
from lilicorr.heads import HEADS
from lilicorr.heads.base import HeadFormat
from lilicorr.target import Target, rope_theta

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS, CONFIG, INFO, DRAFT_VOCAB = "model.safetensors", "config.json", "lilicorr.json", "draft_vocab.npy"


# The target's own tables, which some formats hold a copy of -> attribute of the draft model
TABLES = {"embed_tokens.weight": "embed", "lm_head.weight": "lm_head"}
LAYOUT_SPELLINGS = ("shift_label", "sample_from_anchor")  # true for anchor-first, in other trainers' checkpoints


def checkpoint_tensors(draft_model: DraftModel) -> dict[str, Tensor]:
    """The draft model's own tensors under the names a checkpoint gives them."""
    form = HEADS[draft_model.head_name].format
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
    tensors = checkpoint_tensors(draft_model)
    if HEADS[draft_model.head_name].format.target_tables:
        tensors |= {name: getattr(draft_model, attribute) for name, attribute in TABLES.items()}
    # a target may tie its two tables, and a file may not hold one storage twice
    tensors = {
        name: tensor.detach().to("cpu", DTYPES[dtype], copy=True).contiguous() for name, tensor in tensors.items()
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
    shape, spec, form = draft_model.shape, draft_model.spec, HEADS[draft_model.head_name].format
    block: dict[str, Any] = {
        "block_size": spec.block_size,
        "layout": spec.layout,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
    }
    if form.projector_type:
        block["projector_type"] = form.projector_type
    if form.layout_field:
        block[form.layout_field] = spec.layout == ANCHOR_FIRST
    if form.candidates_field:
        block[form.candidates_field] = spec.num_candidates
    for name, attribute in form.config_fields.items():
        block[name] = getattr(draft_model.head.config, attribute)
    if draft_model.vocab_ids is not None:
        block["draft_vocab_size"] = len(draft_model.vocab_ids)
    training = {"num_anchors": target_info.get("max_anchors")}
    top_level = {name: (block | training)[name] for name in form.at_top}
    return top_level | {
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
        **rope_fields(shape.rope_theta, shape.yarn),
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


def load_draft_model(
    folder: Path,
    target: Target,
    head: str | None = None,
    head_config: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    yarn: YarnConfig | None = None,
) -> DraftModel:
    """Read a checkpoint folder for `target`, on its device and in its dtype unless `dtype` says otherwise.

    `head` decodes the same drafter with another head: `"argmax"` reads the drafter's part only. `head_config`
    overrides what the checkpoint does not fix (the walk, the contract, loss weights); `yarn` stretches the drafter's
    positions in place of what the checkpoint says of them. Tensor names may carry `model.`.

    Raises ValueError that names the tensor or field for anything missing, surplus or not fitting the target.
    """
    folder = Path(folder)
    config = Fields(folder / CONFIG)
    stored = _stored_head(config)
    name = stored if head is None else head
    if name not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {name!r}")
    if name not in (stored, "argmax"):
        raise ValueError(f"{folder} holds the head {stored}, which cannot be read as {name}")
    shape, spec = _shape(config, target), _spec(config, target, stored)
    if yarn is not None:
        shape = replace(shape, yarn=yarn)
    fixed = _head_fields(config, name)
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


def _stored_head(config: Fields) -> str:
    """The head a checkpoint holds, by its architecture and, where several share that, its projector type."""
    architectures = config.get("architectures", list)
    forms = {name: head.format for name, head in HEADS.items()}
    known = sorted({architecture for form in forms.values() for architecture in (form.architecture, *form.also_read)})
    if len(architectures) != 1 or architectures[0] not in known:
        raise ValueError(f"{config.path}: architectures must be one of {', '.join(known)}, got {architectures}")
    forms = {n: form for n, form in forms.items() if architectures[0] in (form.architecture, *form.also_read)}
    projector = config.get("projector_type", str) if config.has("projector_type") else None
    if projector is not None:
        chosen = [name for name, form in forms.items() if projector in (name, form.projector_type)]
    else:
        plain = [name for name, form in forms.items() if form.projector_type is None]
        chosen = plain or list(forms)
    if len(chosen) != 1:
        raise ValueError(
            f"{config.path}: projector_type of a {architectures[0]} must be {' or '.join(forms)}, got {projector!r}"
        )
    return "argmax" if chosen[0] == "lilicorr" and config.block.get("lilicorr_enabled") is False else chosen[0]


def _head_fields(config: Fields, name: str) -> dict[str, Any]:
    """What a checkpoint fixes of a head's config; required, since a wrong scale changes no shape and loads silently."""
    form, kinds = HEADS[name].format, typing.get_type_hints(HEADS[name].Config)
    older = {field: spelling for field, spelling in form.older_fields.items() if config.has(spelling)}
    values = {}
    for field, attribute in form.config_fields.items():
        spelling = older.get(field, field)
        if older and not config.has(spelling):
            continue  # trainers with the older spelling do not write it: the tensors have to fit the usual value
        values[attribute] = _required(config, spelling, kinds[attribute])
    return values


def _required(config: Fields, name: str, kind: type) -> Any:
    if not config.has(name):
        raise ValueError(f"{config.path}: field dflash_config.{name} is missing")
    return config.get(name, kind)


def _shape(config: Fields, target: Target) -> DrafterShape:
    """The drafter's shape, after comparing what it shares with the target."""
    config.expect("hidden_size", target.config.hidden_size, "the target's is")
    config.expect("vocab_size", target.embed.shape[0], "the target's embedding has")
    config.expect("num_target_layers", target.config.num_hidden_layers, "the target has")
    config.refuse("attention_bias", False)
    config.refuse("hidden_act", "silu")
    config.refuse("sliding_window")
    config.refuse("use_sliding_window", False)
    config.refuse("conv_kernel_size")
    theta, yarn = read_rope(config, rope_theta(target.config))
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
        rope_theta=theta,
        max_position_embeddings=config.get("max_position_embeddings"),
        yarn=yarn,
    )


def _spec(config: Fields, target: Target, stored: str) -> BlockSpec:
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
    key = HEADS[stored].format.candidates_field
    num_candidates = _required(config, key, int) if key else DrafterConfig.num_candidates
    layout = _layout(config, stored)
    return BlockSpec(config.get("block_size"), num_candidates, mask_token_id, tuple(layer_ids), layout)


def _layout(config: Fields, stored: str) -> str:
    """The layout a checkpoint says it has, in our spelling or another trainer's; unsaid, it is its head's only one.

    A drafter read in the other layout would accept next to nothing without any error.
    """
    head = HEADS[stored]
    stated = {config.get("layout", str)} if config.has("layout") else set()
    for spelling in LAYOUT_SPELLINGS:
        if config.has(spelling):
            stated.add(ANCHOR_FIRST if config.get(spelling, bool) else IN_PLACE)
    if not stated and head.format.layout_field and len(head.layouts) > 1:
        raise ValueError(f"{config.path}: field layout or {head.format.layout_field} is missing")
    if not stated:
        return head.layouts[0]
    if len(stated) > 1:
        raise ValueError(f"{config.path}: layout is {' and '.join(sorted(stated))} by different fields")
    layout = stated.pop()
    if layout not in LAYOUTS or layout not in head.layouts:
        raise ValueError(
            f"{config.path}: layout of the head {stored} must be {' or '.join(head.layouts)}, got {layout!r}"
        )
    return layout


def _draft_vocab(folder: Path, config: Fields, vocab_size: int) -> Tensor | None:
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
    form = HEADS[stored].format
    found = {_our_name(name, form): tensor for name, tensor in found.items()}
    if form.target_tables:
        for name, attribute in TABLES.items():
            _check_table(path, name, found.pop(name, None), getattr(draft_model, attribute))
    if stored != draft_model.head_name:
        found = {name: tensor for name, tensor in found.items() if not name.startswith(form.tensors)}
    missing, surplus = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        raise ValueError(f"{path}: {len(missing)} tensors are missing: {', '.join(missing[:8])}")
    if surplus:
        raise ValueError(f"{path}: {len(surplus)} tensors are surplus: {', '.join(surplus[:8])}")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, must be {list(wanted[name].shape)}")
        wanted[name].copy_(tensor)  # state_dict shares storage with the parameters


def _our_name(name: str, form: HeadFormat) -> str:
    """A tensor's name in the spelling that is written."""
    for older, ours in form.older_names.items():
        if name.startswith(older):
            return _our_name(ours + name.removeprefix(older), form)
    return name


def _check_table(path: Path, name: str, stored: Tensor | None, own: Tensor) -> None:
    """Refuse a checkpoint that holds another target's table; none at all is fine."""
    if stored is None:
        return
    own = own.cpu()
    same = stored.shape == own.shape
    if not same or not (torch.equal(stored.to(own.dtype), own) or torch.equal(own.to(stored.dtype), stored)):
        raise ValueError(f"{path}: {name} is not the target's own table: it was trained for another target")
