"""The formats that a checkpoint can be written in: who spells what how, in a table.

Place in the flow: `store` takes the fields and tensor names of a file from here. Reading needs no format: `description`
and `own_name` take every spelling of the table. A format is named after who reads it (vllm, sglang, tensorrt_llm, the
zlab package) or who writes it (specforge, modelopt, deepspec, speculators); `native` is what training leaves, the
union of what the servers read.

Who reads which format, with versions: docs/checkpoints.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lilicorr.blocks import ANCHOR_FIRST, IN_PLACE
from lilicorr.checkpoint import speculator
from lilicorr.checkpoint.description import Description, block_fields, layer_fields
from lilicorr.heads import HEADS
from lilicorr.heads.base import HeadFormat

NATIVE, SPECULATORS, SGLANG, VLLM = "native", "speculators", "sglang", "vllm"
# The target's own tables, which some formats hold a copy of -> attribute of the draft model and of the target
TABLES = {"embed_tokens.weight": "embed", "lm_head.weight": "lm_head"}


@dataclass(frozen=True)
class Spelling:
    """How a format spells the checkpoints of a head, where that differs from the tables of `HeadFormat`."""

    architecture: str | None = None  # None: the head's own
    at_top: tuple[str, ...] = ()  # fields of block and head that stand outside dflash_config (too)
    left_out: tuple[str, ...] = ("layout",)  # fields that do not stand in dflash_config
    nested: bool = True  # there is a dflash_config
    renamed: dict[str, str] = field(default_factory=dict)  # field of dflash_config -> its other name
    added: dict[str, Any] = field(default_factory=dict)  # fields that stand where the others do
    names: dict[str, str] | None = None  # patterns of our tensor names -> the format's; None: the head's own
    tables: bool = False  # holds copies of the target's two tables
    allowed: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # values of fields that the format can say


BOTH = ("block_size",)  # readers look for it in either place
DOMINO = ("block_size", "emb_dim")
ONLY_IN_PLACE = {"layout": (IN_PLACE,)}  # of a DFlash drafter: nothing in the format says how its blocks are cut
POWERS = {"lilicorr_candidate_topk": (1, 2, 4, 8, 16)}  # a lane of a warp for each candidate
OLDER = ("layout", "block_size")
DEEPSPEC = Spelling(at_top=HEADS["dspark"].format.at_top, nested=False, tables=True)
DEEPSPEC_DFLASH = Spelling(
    "Qwen3DSparkModel",
    at_top=("block_size", "mask_token_id", "target_layer_ids", "num_anchors"),
    nested=False,
    added=HEADS["dspark"].format.without_head,
    tables=True,
    allowed={"layout": (ANCHOR_FIRST,)},
)
NOT_CAUSAL = {"causal": False}
SPECFORGE_DSPARK = Spelling("DSparkDraftModel", BOTH, (*OLDER, "shift_label"))

FORMATS: dict[str, dict[str, Spelling]] = {
    "zlab": {"argmax": Spelling(allowed=ONLY_IN_PLACE)},
    "zlab_old": {"argmax": Spelling(at_top=BOTH, left_out=OLDER, allowed=ONLY_IN_PLACE)},
    SGLANG: {
        "argmax": Spelling(at_top=BOTH, allowed=ONLY_IN_PLACE),
        "domino": Spelling(at_top=DOMINO, allowed={"pure_draft_prefix_len": (1,)}),
        "dspark": DEEPSPEC,
        "lilicorr": Spelling(at_top=BOTH, allowed=POWERS),
    },
    VLLM: {
        "argmax": Spelling(at_top=BOTH, allowed=ONLY_IN_PLACE),
        "dspark": DEEPSPEC,
        "lilicorr": Spelling(at_top=BOTH, allowed=POWERS),
    },
    "tensorrt_llm": {"lilicorr": Spelling(at_top=BOTH)},
    "specforge": {
        "argmax": Spelling(at_top=BOTH, left_out=OLDER, allowed=ONLY_IN_PLACE),
        "domino": Spelling("DominoDraftModel", DOMINO, OLDER),
        "dspark": SPECFORGE_DSPARK,
    },
    "specforge_old": {
        "domino": Spelling("DominoDraftModel", DOMINO, OLDER, names={"^": "logit_head."}),
        "dspark": Spelling("DSparkDraftModel", BOTH, (*OLDER, "shift_label"), names={"^": "logit_head."}),
    },
    "modelopt": {
        "argmax": Spelling(at_top=BOTH, left_out=OLDER, added=NOT_CAUSAL, allowed=ONLY_IN_PLACE),
        "domino": Spelling(at_top=DOMINO, left_out=OLDER, added=NOT_CAUSAL),
        "dspark": Spelling(
            "DFlashDraftModel",
            at_top=BOTH,
            left_out=(*OLDER, "confidence_head_with_markov"),
            renamed=HEADS["dspark"].format.older_fields,
            added=NOT_CAUSAL,
            names={r"^markov_head\.": "", r"^confidence_head\.proj\.": "confidence_proj."},
            allowed={"confidence_head_with_markov": (True,)},
        ),
        "lilicorr": Spelling(
            at_top=BOTH,
            left_out=OLDER,
            added={"projector_type": "lilicorr", "lilicorr_enabled": True} | NOT_CAUSAL,
            names={},
        ),
    },
    "deepspec": {"argmax": DEEPSPEC_DFLASH, "dspark": DEEPSPEC},
}


def formats_of(head: str) -> list[str]:
    """The formats that know this head."""
    named = [name for name, heads in FORMATS.items() if head in heads]
    return [NATIVE, *named, *([SPECULATORS] if head in speculator.HEAD_TYPES else [])]


def problem(name: str, description: Description) -> str | None:
    """Why a format cannot say what `description` does, None where it can."""
    known = [NATIVE, *FORMATS, SPECULATORS]
    if name not in known:
        return f"format must be one of {', '.join(known)}, got {name!r}"
    if name not in formats_of(description.head):
        knowing = ", ".join(formats_of(description.head))
        return f"{name} has no checkpoints of the head {description.head}; formats that do: {knowing}"
    if name == SPECULATORS:
        return speculator.problem(description)
    if description.num_draft_ids is not None and name != NATIVE:
        return (
            f"{name} knows no draft vocabulary, and this drafter predicts {description.num_draft_ids} of its target's "
            f"{description.shape.vocab_size} tokens; {NATIVE} and {SPECULATORS} do"
        )
    fields = block_fields(description)
    for key, values in spelling_of(name, description.head).allowed.items():
        if fields[key] not in values:
            return f"{name} needs {key} {' or '.join(str(value) for value in values)}, got {fields[key]}"
    return None


def spelling_of(name: str, head: str) -> Spelling:
    """The line of the table; our own format spells a head as its `HeadFormat` says."""
    form = HEADS[head].format
    if name == NATIVE:
        return Spelling(at_top=(*BOTH, *form.at_top), left_out=(), tables=form.target_tables)
    return FORMATS[name][head]


def with_tables(name: str, head: str) -> bool:
    """Whether the format holds copies of the target's embedding and output tables."""
    return name != SPECULATORS and spelling_of(name, head).tables


def encode_config(name: str, description: Description, info: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of a checkpoint in the format `name`, which has no `problem` with it."""
    if name == SPECULATORS:
        return speculator.encode_config(description, info)
    return _own_fields(name, description, info) | layer_fields(description, info)


def _own_fields(name: str, description: Description, info: dict[str, Any]) -> dict[str, Any]:
    """The fields that formats differ in: those of block and head where this one has them."""
    spelling, form = spelling_of(name, description.head), HEADS[description.head].format
    block = block_fields(description)
    said = block | {"num_anchors": info.get("max_anchors")}
    config = {key: said[key] for key in spelling.at_top}
    config["architectures"] = [spelling.architecture or form.architecture]
    if not spelling.nested:
        return config | spelling.added
    inside = {spelling.renamed.get(key, key): value for key, value in block.items() if key not in spelling.left_out}
    return config | {"dflash_config": inside | spelling.added}


def their_names(form: str, head: str, names: Iterable[str]) -> dict[str, str]:
    """Tensor names of ours -> those of the format; the drafter's are the same everywhere."""
    form_of_head = HEADS[head].format
    others = None if form == SPECULATORS else spelling_of(form, head).names
    patterns = form_of_head.names if others is None else others

    def theirs(name: str) -> str:
        if name.startswith(form_of_head.tensors):
            for pattern, other in patterns.items():
                if re.search(pattern, name):
                    return re.sub(pattern, other, name)
        return name

    return {name: theirs(name) for name in names}


def spelled_as(
    top: dict[str, Any], names: set[str], own_names: Iterable[str], description: Description, info: dict[str, Any]
) -> list[str]:
    """The formats whose readers find what they look for in a file with the fields `top` and the tensors `names`.

    `own_names` are those of drafter and head in our spelling.
    """
    if speculator.TYPE in top:
        return [SPECULATORS, *([VLLM] if speculator.vllm_reads(top, description) else [])]
    found, head, stated = [], description.head, top.get("dflash_config") or {}
    for form in formats_of(head):
        if form == SPECULATORS or problem(form, description) is not None:
            continue
        tables = TABLES.keys() if with_tables(form, head) else set()
        fields = _own_fields(form, description, info)
        inside = fields.pop("dflash_config", {})
        for key in fields.keys() & inside.keys() & set(BOTH):  # it was found in one of them
            del fields[key], inside[key]
        if (
            names == set(their_names(form, head, own_names).values()) | tables
            and all(top.get(key) == value for key, value in fields.items())
            and all(stated.get(key) == value for key, value in inside.items())
        ):
            found.append(form)
    return found


def speculative_config(description: Description, checkpoint: str) -> dict[str, Any]:
    """What vLLM is told (`--speculative-config`) to draft with a checkpoint in the format `vllm`."""
    method = "dspark" if description.head == "dspark" else "dflash"
    return {"method": method, "model": checkpoint, "num_speculative_tokens": description.spec.num_slots}


def own_name(name: str, form: HeadFormat) -> str:
    """A tensor's name in our spelling."""
    for older, ours in form.older_names.items():
        if re.search(older, name):
            return own_name(re.sub(older, ours, name), form)
    return name
