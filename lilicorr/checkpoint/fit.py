"""Whether a checkpoint was made for a target, by their configurations alone, and who reads it as it stands.

Place in the flow: the endpoint asks before it stops or starts a replica, and before a replica takes the weights of
another checkpoint (`replacement_weights`, which reads them). What weights alone can show, names and shapes of tensors
and copies of the target's tables, `store.read_checkpoint` holds against the loaded target.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lilicorr.checkpoint.description import CONFIG, Description, check_target, describe_model, target_of
from lilicorr.checkpoint.field import read_json
from lilicorr.checkpoint.format import spelled_as
from lilicorr.checkpoint.info import INFO
from lilicorr.checkpoint.store import DRAFT_VOCAB, Checkpoint, read_checkpoint, read_fields, read_tensors
from lilicorr.config import TargetConfig, YarnConfig
from lilicorr.draft_model import DraftModel
from lilicorr.heads import HEADS
from lilicorr.target import Target, model_config

NOT_TRAINED = ("yarn", "max_position_embeddings")  # fields of a drafter's shape that its weights do not depend on


def check_fits(folder: Path, target: TargetConfig) -> None:
    """Raise ValueError that names the field for a checkpoint folder, of any format, that does not fit `target`.

    Held against it are sizes, vocabulary, captured layers, RoPE and the mask token, where `target` says one; against
    what the folder says a second time, block size and layout; and where both go by a name, the target's name. A target
    that is given as a folder may be a copy of any name.
    """
    folder, wanted = Path(folder), model_config(target)
    config, description, info = read_fields(folder, wanted.num_hidden_layers)
    check_target(config, wanted, wanted.vocab_size)
    mask, stated = target.mask_token_id, target_of(info)
    if mask not in (None, description.spec.mask_token_id):
        raise ValueError(
            f"{folder / CONFIG}: mask_token_id is {description.spec.mask_token_id}, the target's is set to {mask}"
        )
    kind, source = stated.get("model_type"), stated.get("source")
    if kind not in (None, wanted.model_type):
        raise ValueError(f"{folder / INFO}: target.model_type is {kind}, the target is a {wanted.model_type}")
    if source not in (None, target.source) and target.path is None and TargetConfig(source).path is None:
        raise ValueError(
            f"{folder / INFO}: target.source is {source}, the target is {target.source}; "
            "one of the same weights under another name can be given as the folder of its files"
        )


def check_same_drafter(folder: Path, description: Description, draft_model: DraftModel) -> None:
    """Raise ValueError that names the field if the drafter that is described cannot go on as that of `draft_model`.

    `description` is what `folder` holds. Head and YaRN may differ, and the length that the checkpoint was made for,
    which no drafter computes with.
    """
    shape = [field.name for field in fields(description.shape) if field.name not in NOT_TRAINED]
    for theirs, ours, names in (
        (description.spec, draft_model.spec, ("block_size", "layout", "mask_token_id", "target_layer_ids")),
        (description.shape, draft_model.shape, shape),
    ):
        for name in names:
            found, wanted = getattr(theirs, name), getattr(ours, name)
            if found != wanted:
                raise ValueError(f"cannot start from {folder}: its {name} is {found}, this run's is {wanted}")


def readers_of(folder: Path, checkpoint: Checkpoint) -> list[str]:
    """The formats whose readers take the folder of `checkpoint` as it stands."""
    names = {name.removeprefix("model.") for name in read_tensors(folder)}
    config = read_json(Path(folder) / CONFIG)
    return spelled_as(config, names, checkpoint.tensors, checkpoint.description, checkpoint.info)


def replacement_weights(
    folder: Path, target: Target, draft_model: DraftModel, yarn: YarnConfig | None = None
) -> dict[str, Tensor]:
    """The tensors of a checkpoint that may take the place of those of `draft_model`, see `store.write_weights`.

    They are memory, not the mapped file: whoever writes them neither waits for the file nor sees it change. `yarn` is
    what `draft_model` was loaded with. Raises ValueError as `read_checkpoint`, and for a checkpoint that differs in
    more than its weights.
    """
    folder = Path(folder)
    checkpoint = read_checkpoint(folder, target)
    new, own = checkpoint.description, describe_model(draft_model, "float32")
    if yarn is not None:
        new = replace(new, shape=replace(new.shape, yarn=yarn))
    served = _facts(own)
    for name, value in _facts(new).items():
        if value != served.get(name):
            raise ValueError(
                f"{folder / CONFIG}: {name} is {value}, of the draft model in use it is {served.get(name)}"
            )
    ids = checkpoint.vocab_ids
    if ids is not None and not torch.equal(ids, draft_model.vocab_ids.cpu()):
        raise ValueError(f"{folder / DRAFT_VOCAB} holds other ids than the draft model in use predicts")
    return {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}


def _facts(description: Description) -> dict[str, Any]:
    """What a draft model is but for its weights."""
    facts = {"head": description.head, "draft_vocab_size": description.num_draft_ids} | asdict(description.spec)
    if HEADS[description.head].format.candidates_field is None:
        del facts["num_candidates"]  # a checkpoint of such a head names none
    facts |= asdict(description.shape)
    return facts | {f"head_config.{name}": value for name, value in description.head_config.items()}
