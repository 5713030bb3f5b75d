"""Draft models on disk, in the formats that the public servers and trainers read.

Place in the flow: training ends with `save_draft_model`; evaluation, serving and `start_from` begin with
`load_draft_model`. A folder holds `model.safetensors`, `config.json`, `lilicorr.json` (which target it was
trained for, and how), `README.md` (`card`) and, where the drafter predicts a part of the vocabulary only,
`draft_vocab.npy`.

The drafter's tensors and fields are those of z-lab's DFlash checkpoints; what a head adds is its own `format`
(`heads/base.py`), in the spelling of its authors. The layout of the blocks is a field of every checkpoint. Other
projects' formats are read without being named, and written by `write_checkpoint` (`format`). Reading is strict both
ways: a tensor or field that is missing, surplus or does not fit the target is an error that names it.

Paper: section 3 and Table 4 give the shapes; the format is the one of SGLang's and vLLM's loaders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lilicorr.checkpoint import speculator
from lilicorr.checkpoint.card import CARD, model_card
from lilicorr.checkpoint.description import (
    CONFIG,
    Description,
    check_target,
    describe,
    describe_model,
    layer_ids_of,
    stored_head,
)
from lilicorr.checkpoint.field import Fields, object_at, read_json
from lilicorr.checkpoint.format import (
    NATIVE,
    SPECULATORS,
    TABLES,
    encode_config,
    own_name,
    problem,
    spelled_as,
    their_names,
    with_tables,
)
from lilicorr.checkpoint.info import INFO, block_info, info_of
from lilicorr.config import YarnConfig
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.folder import new_folder
from lilicorr.heads import HEADS
from lilicorr.heads.base import HeadFormat
from lilicorr.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
READ_DTYPES = DTYPES | {"float16": torch.float16}
WEIGHTS, INDEX, DRAFT_VOCAB = "model.safetensors", "model.safetensors.index.json", "draft_vocab.npy"


@dataclass(frozen=True)
class Checkpoint:
    """A draft model as a folder holds it, in our spelling."""

    description: Description
    tensors: dict[str, Tensor]  # of the drafter and the head
    tables: dict[str, Tensor] = field(default_factory=dict)  # copies of the target's tables
    vocab_ids: Tensor | None = None  # [D] the target ids that are drafted, ascending; None: all
    info: dict[str, Any] = field(default_factory=dict)  # where it comes from, JSON-able


def checkpoint_tensors(draft_model: DraftModel) -> dict[str, Tensor]:
    """The draft model's own tensors under the names a checkpoint gives them."""
    form = HEADS[draft_model.head_name].format
    head = draft_model.head.state_dict()
    return draft_model.drafter.state_dict() | {form.prefix + name: tensor for name, tensor in head.items()}


def write_weights(draft_model: DraftModel, tensors: dict[str, Tensor]) -> None:
    """Overwrite the draft model's own tensors, in place and in their type, with those of the same names."""
    for name, tensor in checkpoint_tensors(draft_model).items():  # they share storage with the parameters
        tensor.copy_(tensors[name])


def save_draft_model(
    folder: Path, draft_model: DraftModel, target_info: dict[str, Any], dtype: str = "bfloat16"
) -> None:
    """Write `draft_model` as a checkpoint folder, whole or not at all.

    `target_info` (JSON-able) goes to `lilicorr.json`; its `bos_token_id` and `eos_token_id` also to
    `config.json`. Raises ValueError for an unknown `dtype`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype of a checkpoint must be one of {', '.join(DTYPES)}, got {dtype!r}")

    def kept(tensor: Tensor) -> Tensor:
        # a target may tie its two tables, and a file may not hold one storage twice
        return tensor.detach().to("cpu", DTYPES[dtype], copy=True).contiguous()

    tensors = {name: kept(tensor) for name, tensor in checkpoint_tensors(draft_model).items()}
    tables = {}
    if with_tables(NATIVE, draft_model.head_name):
        tables = {name: kept(getattr(draft_model, attribute)) for name, attribute in TABLES.items()}
    vocab_ids = None if draft_model.vocab_ids is None else draft_model.vocab_ids.cpu()
    description = describe_model(draft_model, dtype)
    write_checkpoint(folder, Checkpoint(description, tensors, tables, vocab_ids, target_info))


def write_checkpoint(folder: Path, checkpoint: Checkpoint, form: str = NATIVE) -> None:
    """Write a checkpoint folder in the format `form`, whole or not at all; errors as of `encode`."""
    config, tensors = encode(checkpoint, form)
    description, info = checkpoint.description, checkpoint.info
    readers = spelled_as(config, set(tensors), checkpoint.tensors, description, info)
    with new_folder(Path(folder)) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        _write(aside / CONFIG, config)
        _write(aside / INFO, info | {"block": block_info(description)})
        (aside / CARD).write_text(model_card(description, info, readers), encoding="utf-8")
        if checkpoint.vocab_ids is not None and form == NATIVE:
            np.save(aside / DRAFT_VOCAB, checkpoint.vocab_ids.numpy())


def encode(checkpoint: Checkpoint, form: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of a checkpoint in the format `form`.

    Raises ValueError where the format is unknown, cannot say what the checkpoint is, or wants tables that it lacks.
    """
    description = checkpoint.description
    wrong = problem(form, description)
    if wrong is not None:
        raise ValueError(wrong)
    names = their_names(form, description.head, checkpoint.tensors)
    tensors = {names[name]: tensor for name, tensor in checkpoint.tensors.items()}
    if with_tables(form, description.head):
        if not checkpoint.tables:
            raise ValueError(f"{form} holds copies of the target's tables, this checkpoint has none: name the target")
        tensors |= checkpoint.tables
    if form == SPECULATORS and checkpoint.vocab_ids is not None:
        tensors |= speculator.map_tensors(checkpoint.vocab_ids, description.shape.vocab_size)
        tensors |= _drafted_rows(checkpoint)
    return encode_config(form, description, checkpoint.info), tensors


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _drafted_rows(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The output table of a draft vocabulary, which its readers cannot derive from the target's."""
    table = checkpoint.tables.get(speculator.LM_HEAD)
    if table is None:
        raise ValueError(f"{SPECULATORS} holds the drafted rows of the target's output table: name the target")
    rows = table if len(table) == len(checkpoint.vocab_ids) else table[checkpoint.vocab_ids]
    return {speculator.LM_HEAD: rows.contiguous()}


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
    checkpoint = read_checkpoint(folder, target)
    description = checkpoint.description
    name = description.head if head is None else head
    if name not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {name!r}")
    if name not in (description.head, "argmax"):
        raise ValueError(f"{folder} holds the head {description.head}, which cannot be read as {name}")
    shape = description.shape if yarn is None else replace(description.shape, yarn=yarn)
    fixed = description.head_config if name == description.head else {}
    for key, value in (head_config or {}).items():
        if key in fixed and fixed[key] != value:
            raise ValueError(
                f"{folder / CONFIG}: head_config.{key} = {value!r}, but it was trained with {fixed[key]!r}"
            )
    settings = (head_config or {}) | fixed
    draft_model = build_draft_model(shape, description.spec, name, settings, target, checkpoint.vocab_ids)
    write_weights(draft_model, checkpoint.tensors)
    return draft_model.to(target.device, dtype or target.embed.dtype).eval()


def read_checkpoint(folder: Path, target: Target | None = None) -> Checkpoint:
    """Read a checkpoint folder in any format, and hold it against `target` where one is given.

    Raises ValueError that names the tensor or field for anything missing, surplus, of another shape or type than the
    fields say, not finite, or not fitting the target.
    """
    folder = Path(folder)
    return decode(folder, read_json(folder / CONFIG), read_tensors(folder), target)


def decode(folder: Path, top: dict[str, Any], tensors: dict[str, Tensor], target: Target | None = None) -> Checkpoint:
    """The checkpoint whose `config.json` and tensors are these, in any format; `folder` has what else there is."""
    path, foreign = folder / WEIGHTS, speculator.TYPE in top
    config = _fields(folder, top, None if target is None else target.config.num_hidden_layers)
    if target is not None:
        check_target(config, target.config, target.embed.shape[0])
    description = describe(config)
    form = HEADS[stored_head(config)[1]].format
    spelled = _own_names(path, tensors, form)
    tensors = {name: tensors[theirs] for name, theirs in spelled.items()}
    if foreign:
        size, vocab_size = description.num_draft_ids, description.shape.vocab_size
        vocab_ids = speculator.read_maps(path, tensors, size, vocab_size)
    else:
        vocab_ids = _draft_vocab(folder, description)
    tables = {}
    if form.target_tables or foreign:
        tables = {name: tensors.pop(name) for name in TABLES if name in tensors}
    description = replace(description, dtype=_check_tensors(path, tensors, spelled, description))
    for name, table in tables.items():
        _check_table(path, name, table, description, vocab_ids if foreign else None, target)
    return Checkpoint(description, tensors, tables, vocab_ids, info_of(folder, top, description))


def read_fields(folder: Path, num_target_layers: int | None = None) -> tuple[Fields, Description, dict[str, Any]]:
    """The fields of a checkpoint folder of any format, what they describe, and where it comes from; reads no tensor.

    `num_target_layers` where the caller knows it. Raises ValueError as `read_checkpoint`.
    """
    folder = Path(folder)
    top = read_json(folder / CONFIG)
    fields = _fields(folder, top, num_target_layers)
    description = describe(fields)
    return fields, description, info_of(folder, top, description)


def captured_layers(folder: Path) -> tuple[int, ...]:
    """The target's layers, 0-based and ascending, that the drafter in a folder of any format reads.

    They have to be captured when the target is loaded, which is before a checkpoint can be held against it. Raises
    ValueError that names the field for a folder that is no draft model or does not say them.
    """
    return layer_ids_of(_fields(Path(folder), read_json(Path(folder) / CONFIG)))


def mask_token(folder: Path) -> int:
    """The token that a draft model in a folder of any format was trained to see in place of what it drafts.

    It counts where the target's tokenizer does not settle one. Raises ValueError as `captured_layers`.
    """
    return _fields(Path(folder), read_json(Path(folder) / CONFIG)).get("mask_token_id")


def _fields(folder: Path, top: dict[str, Any], num_target_layers: int | None = None) -> Fields:
    """The fields of `config.json` of any format, in our spelling."""
    if speculator.TYPE in top:
        return speculator.decode_config(folder / CONFIG, top, num_target_layers)
    return Fields(folder / CONFIG, top)


def _draft_vocab(folder: Path, description: Description) -> Tensor | None:
    """The ids the drafter predicts, None for the whole vocabulary."""
    size, vocab_size, path = description.num_draft_ids, description.shape.vocab_size, folder / DRAFT_VOCAB
    if (size is not None) != path.is_file():
        found = "exists" if size is None else "is missing"
        raise ValueError(f"{folder / CONFIG}: draft_vocab_size is {size}, but {path.name} {found}")
    if size is None:
        return None
    try:
        with path.open("rb") as file:
            ids = np.lib.format.read_array(file)
    except ValueError as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error
    if (
        ids.dtype.kind != "i"
        or ids.shape != (size,)
        or np.any(np.diff(ids) <= 0)
        or ids[0] < 0
        or ids[-1] >= vocab_size
    ):
        raise ValueError(f"{path} must hold {size} ascending ids below {vocab_size}, found {ids.dtype} {ids.shape}")
    return torch.from_numpy(ids.astype(np.int64))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, or of the files that its index names, as they are spelled there."""
    paths, index = [folder / WEIGHTS], folder / INDEX
    named: set[str] = set()
    if not paths[0].is_file() and index.is_file():
        files = object_at(index, read_json(index), "weight_map")
        if not all(isinstance(name, str) for name in files.values()):
            raise ValueError(f"{index}: weight_map must hold names of files")
        named, paths = set(files), [folder / Path(name).name for name in sorted(set(files.values()))]
    tensors: dict[str, Tensor] = {}
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or cut off: {error}") from error
    if named and named != tensors.keys():
        raise ValueError(f"{index} names {sorted(named ^ tensors.keys())[:8]}, or the files hold them, but not both")
    return tensors


def _own_names(path: Path, names: Iterable[str], form: HeadFormat) -> dict[str, str]:
    """Our names of the file's tensors -> its own; `model.` in front may be there."""
    found: dict[str, str] = {}
    for name in names:
        ours = own_name(name.removeprefix("model."), form)
        if ours in found:
            raise ValueError(f"{path} holds {found[ours]} twice, once as {name}")
        found[ours] = name
    return found


def _check_tensors(path: Path, tensors: dict[str, Tensor], spelled: dict[str, str], description: Description) -> str:
    """Refuse tensors that are not exactly those of the description; returns their type.

    `spelled` is what the file calls them.
    """
    with torch.device("meta"):
        table = torch.empty(description.shape.vocab_size, description.shape.hidden_size)
        try:
            blank = DraftModel(
                description.shape, description.spec, description.head, description.head_config, table, table
            )
        except ValueError as error:
            raise ValueError(f"{path.parent / CONFIG}: {error}") from error
    wanted = checkpoint_tensors(blank)
    spelled = their_names(NATIVE, description.head, wanted) | spelled
    for what, names in (("missing", wanted.keys() - tensors.keys()), ("surplus", tensors.keys() - wanted.keys())):
        if names:
            listed = ", ".join(sorted(spelled[name] for name in names)[:8])
            raise ValueError(f"{path}: {len(names)} tensors are {what}: {listed}")
    types = {value: name for name, value in READ_DTYPES.items()}
    stated = description.dtype or types.get(tensors["fc.weight"].dtype)
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{list(tensor.shape)}, must be {list(wanted[name].shape)}"
            raise ValueError(f"{path}: {spelled[name]} has shape {shapes}")
        if types.get(tensor.dtype) != stated:
            kind = str(tensor.dtype).removeprefix("torch.")
            said = "config.json says" if description.dtype else "fc.weight is"
            raise ValueError(f"{path}: {spelled[name]} is {kind}, {said} {stated}")
        if not (tensor.is_meta or tensor.isfinite().all()):
            raise ValueError(f"{path}: {spelled[name]} has values that are not finite")
    return stated


def _check_table(
    path: Path, name: str, stored: Tensor, description: Description, vocab_ids: Tensor | None, target: Target | None
) -> None:
    """Refuse a table of another size, or another target's."""
    shape = description.shape
    drafted = vocab_ids if name == speculator.LM_HEAD else None
    rows = shape.vocab_size if drafted is None else len(drafted)
    if stored.shape != (rows, shape.hidden_size):
        raise ValueError(f"{path}: {name} has shape {list(stored.shape)}, must be {[rows, shape.hidden_size]}")
    if target is None:
        return
    own = getattr(target, TABLES[name]).detach().cpu()
    own = own if drafted is None else own[drafted]
    if not (torch.equal(stored.to(own.dtype), own) or torch.equal(own.to(stored.dtype), stored)):
        raise ValueError(f"{path}: {name} is not the target's own table: it was trained for another target")
