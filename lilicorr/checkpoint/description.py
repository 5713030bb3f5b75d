"""What a checkpoint's `config.json` says of the draft model in it, read strictly and written in our spelling.

Place in the flow: `store` makes a `Description` of a draft model and writes it with `config_fields`, in the spelling
that `format` asks for; it reads one with `describe` and builds the draft model that it describes. Other projects'
spellings of the same fields are read here; `speculator` turns the one format that is laid out differently into these.

Paper: section 3 and Table 4 give the shapes.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from lilicorr.blocks import ANCHOR_FIRST, IN_PLACE, LAYOUTS, BlockSpec, check_layer_ids
from lilicorr.checkpoint.field import Fields, read_rope, rope_fields
from lilicorr.config import DrafterConfig
from lilicorr.draft_model import DraftModel
from lilicorr.drafter import DrafterShape
from lilicorr.heads import HEADS
from lilicorr.target import rope_theta

CONFIG = "config.json"
DTYPES = ("float32", "bfloat16", "float16")
LAYOUT_SPELLINGS = ("shift_label", "sample_from_anchor")  # true for anchor-first, in other trainers' checkpoints

# Fields of a block, in our spelling or another's, that are read below.
BLOCK_FIELDS = {"block_size", "layout", "mask_token_id", "target_layer_ids", "projector_type", "draft_vocab_size"}
BLOCK_FIELDS |= set(LAYOUT_SPELLINGS)
# Fields that would change what is computed, and their values that do not: absent and null, and these.
SETTLED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "attention_bias": (False,),
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "hidden_act": ("silu",),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "use_swa": (False,),
    "swa_window_size": (),
    "causal": (False,),
    "is_causal": (False,),
    "conv_kernel_size": (0,),
    "conv_group_size": (0,),
    "selector_rank": (),
    "selector_top_k": (),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "quantization_config": (),
}
# Fields of the drafter's transformer that are counts -> attribute of its shape.
SHAPE_FIELDS = {
    "num_target_layers": "num_target_layers",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
# Fields that change nothing: of training, of loaders, and what is known from elsewhere.
NOTES = {"num_anchors", "confidence_head_alpha", "auto_map", "torch_dtype", "transformers_version", "model_max_length"}
OUTSIDE = {"dflash_config", "num_target_layers", "rope_theta", "rope_scaling", "tie_word_embeddings"}


@dataclass(frozen=True)
class Description:
    """A draft model without its tensors; `shape.yarn` is what the checkpoint says of serving."""

    head: str
    head_config: dict[str, Any]  # what a checkpoint fixes of it
    shape: DrafterShape
    spec: BlockSpec
    dtype: str | None = None  # None where the fields do not say it
    num_draft_ids: int | None = None  # size of the draft vocabulary, None for the target's own


def describe_model(draft_model: DraftModel, dtype: str) -> Description:
    """The description of a draft model whose tensors are to be kept as `dtype`."""
    head, vocab_ids = draft_model.head, draft_model.vocab_ids
    fixed = {name: getattr(head.config, name) for name in HEADS[draft_model.head_name].format.config_fields.values()}
    size = None if vocab_ids is None else len(vocab_ids)
    return Description(draft_model.head_name, fixed, draft_model.shape, draft_model.spec, dtype, size)


def block_fields(description: Description) -> dict[str, Any]:
    """The fields of block and head, which stand in `dflash_config` in our spelling."""
    spec, form = description.spec, HEADS[description.head].format
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
        block[name] = description.head_config[attribute]
    if description.num_draft_ids is not None:
        block["draft_vocab_size"] = description.num_draft_ids
    return block


def layer_fields(description: Description, info: dict[str, Any]) -> dict[str, Any]:
    """The fields of the drafter's transformer, as in the config.json of a Qwen3 model; RoPE stands in both schemas."""
    shape = description.shape
    return {
        "model_type": "qwen3",
        "dtype": description.dtype,
        **{name: getattr(shape, attribute) for name, attribute in SHAPE_FIELDS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
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
        "bos_token_id": info.get("bos_token_id"),
        "eos_token_id": info.get("eos_token_id"),
    }


def target_of(info: dict[str, Any]) -> dict[str, Any]:
    """What the info says of the target, a bare name as its source."""
    target = info.get("target") or {}
    return target if isinstance(target, dict) else {"source": target}


def check_target(config: Fields, target: PretrainedConfig, num_rows: int) -> None:
    """Raise ValueError for a field that does not fit a target of this configuration, with so many embedding rows."""
    config.expect("hidden_size", target.hidden_size, "the target's is")
    config.expect("vocab_size", num_rows, "the target's embedding has")
    config.expect("num_target_layers", target.num_hidden_layers, "the target has")
    read_rope(config, rope_theta(target))


def describe(config: Fields) -> Description:
    """The description that stands in `config`.

    Raises ValueError that names the field for anything missing, unknown, contradictory or not implemented here.
    """
    head, speller = stored_head(config)
    _refuse(config, speller)
    shape = _shape(config)
    spec = _spec(config, shape, head, speller)
    names = [name for name in ("dtype", "torch_dtype") if config.top.get(name) is not None]
    dtypes = {config.get(name, str) for name in names}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise ValueError(f"{config.path}: dtype must be one of {', '.join(DTYPES)}, got {' and '.join(sorted(dtypes))}")
    size = config.positive("draft_vocab_size") if config.has("draft_vocab_size") else None
    return Description(head, _head_fields(config, head), shape, spec, dtypes.pop() if dtypes else None, size)


def stored_head(config: Fields) -> tuple[str, str]:
    """The head a checkpoint holds, and the one in whose spelling it does.

    They are told apart by the architecture and, where several share that, by the projector type. A LiLiCorr
    checkpoint may be without its head, and so may a DSpark one of rank 0, which is how its authors spell DFlash.
    """
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
    without = HEADS[chosen[0]].format.without_head
    off = without and all(
        config.has(name) and config.get(name, type(value)) == value for name, value in without.items()
    )
    return "argmax" if off else chosen[0], chosen[0]


def known_fields(speller: str) -> tuple[set[str], set[str]]:
    """Names that may stand at the top, and those that may in `dflash_config`."""
    form = HEADS[speller].format
    own = {*form.config_fields, *form.older_fields.values(), *form.without_head}
    own |= {name for name in (form.candidates_field, form.layout_field) if name}
    block = BLOCK_FIELDS | own | NOTES | SETTLED.keys()
    return block | OUTSIDE | Qwen3Config().to_dict().keys(), block


def _refuse(config: Fields, speller: str) -> None:
    """Raise ValueError for what would need code that is not here."""
    config.refuse_unknown(*known_fields(speller))
    for name, harmless in SETTLED.items():
        config.refuse(name, *harmless)
    kinds = config.top.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * config.get("num_hidden_layers"):
        raise ValueError(
            f"{config.path}: layer_types must be full_attention for each of the {config.get('num_hidden_layers')} "
            f"layers, got {kinds}"
        )


def _head_fields(config: Fields, head: str) -> dict[str, Any]:
    """What a checkpoint fixes of a head's config; required, since a wrong scale changes no shape and loads silently."""
    form, kinds = HEADS[head].format, typing.get_type_hints(HEADS[head].Config)
    older = {field: spelling for field, spelling in form.older_fields.items() if config.has(spelling)}
    values = {}
    for field, attribute in form.config_fields.items():
        spelling = older.get(field, field)
        if older and not config.has(spelling):
            # trainers with the older spelling do not write it: the tensors have to fit the usual value
            values[attribute] = getattr(HEADS[head].Config(), attribute)
        else:
            values[attribute] = _required(config, spelling, kinds[attribute])
    return values


def _required(config: Fields, name: str, kind: type) -> Any:
    if not config.has(name):
        raise ValueError(f"{config.path}: field dflash_config.{name} is missing")
    return config.get(name, kind)


def _shape(config: Fields) -> DrafterShape:
    """The drafter's shape."""
    theta, yarn = read_rope(config)
    sizes = {attribute: config.positive(name) for name, attribute in SHAPE_FIELDS.items()}
    epsilon = float(config.positive("rms_norm_eps", float))
    try:
        return DrafterShape(
            **sizes, num_captured_layers=len(layer_ids_of(config)), rms_norm_eps=epsilon, rope_theta=theta, yarn=yarn
        )
    except ValueError as error:
        raise ValueError(f"{config.path}: {error}") from error


def layer_ids_of(config: Fields) -> tuple[int, ...]:
    """The target layers that are captured for the drafter, 0-based and ascending; there is at least one."""
    ids = tuple(config.integers("target_layer_ids"))
    try:
        check_layer_ids(ids)
    except ValueError as error:
        raise ValueError(f"{config.path}: {error}") from error
    return ids


def _spec(config: Fields, shape: DrafterShape, head: str, speller: str) -> BlockSpec:
    """The block, after checking its ids against the target's sizes."""
    layer_ids, mask_token_id = layer_ids_of(config), config.get("mask_token_id")
    beyond = [layer_id for layer_id in layer_ids if layer_id >= shape.num_target_layers]
    if beyond:
        raise ValueError(
            f"{config.path}: target_layer_ids {beyond} are past the target's {shape.num_target_layers} layers"
        )
    if not 0 <= mask_token_id < shape.vocab_size:
        raise ValueError(
            f"{config.path}: mask_token_id {mask_token_id} is outside the target's {shape.vocab_size} embeddings"
        )
    key = HEADS[head].format.candidates_field
    num_candidates = _required(config, key, int) if key else DrafterConfig.num_candidates
    try:
        return BlockSpec(
            config.get("block_size"), num_candidates, mask_token_id, layer_ids, _layout(config, head, speller)
        )
    except ValueError as error:
        raise ValueError(f"{config.path}: {error}") from error


def _layout(config: Fields, head: str, speller: str) -> str:
    """The layout a checkpoint says it has, in our spelling or another trainer's; unsaid, it is its head's only one.

    A drafter read in the other layout would accept next to nothing without any error.
    """
    form = HEADS[speller].format
    stated = {config.get("layout", str)} if config.has("layout") else set()
    for spelling in LAYOUT_SPELLINGS:
        if config.has(spelling):
            stated.add(ANCHOR_FIRST if config.get(spelling, bool) else IN_PLACE)
    if not stated and form.layout_field and len(HEADS[speller].layouts) > 1:
        raise ValueError(f"{config.path}: field layout or {form.layout_field} is missing")
    if not stated:
        return HEADS[speller].layouts[0]
    if len(stated) > 1:
        raise ValueError(f"{config.path}: layout is {' and '.join(sorted(stated))} by different fields")
    layout, allowed = stated.pop(), HEADS[head].layouts
    if layout not in LAYOUTS or layout not in allowed:
        raise ValueError(f"{config.path}: layout of the head {head} must be {' or '.join(allowed)}, got {layout!r}")
    return layout
