"""Whether a checkpoint was made for a target, by their configurations alone, and who reads it as it stands.

Place in the flow: the endpoint asks before it stops or starts a replica. What weights alone can show, names and shapes
of tensors and copies of the target's tables, `store.load_draft_model` holds against the loaded target.
"""

from __future__ import annotations

from pathlib import Path

from lilicorr.checkpoint.description import check_target, target_of
from lilicorr.checkpoint.field import read_json
from lilicorr.checkpoint.format import spelled_as
from lilicorr.checkpoint.store import CONFIG, INFO, Checkpoint, read_fields, read_tensors
from lilicorr.config import TargetConfig
from lilicorr.target import model_config


def check_fits(folder: Path, target: TargetConfig) -> None:
    """Raise ValueError that names the field for a checkpoint folder, of any format, that does not fit `target`.

    Held against it are sizes, vocabulary, captured layers, RoPE and the mask token, where `target` says one; against
    what the folder says a second time, block size and layout; and where both go by a name, the target's name. A target
    that is given as a folder may be a copy of any name.
    """
    folder, wanted = Path(folder), model_config(target)
    fields, description, info = read_fields(folder, wanted.num_hidden_layers)
    check_target(fields, wanted, wanted.vocab_size)
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


def readers_of(folder: Path, checkpoint: Checkpoint) -> list[str]:
    """The formats whose readers take the folder of `checkpoint` as it stands."""
    names = {name.removeprefix("model.") for name in read_tensors(folder)}
    fields = read_json(Path(folder) / CONFIG)
    return spelled_as(fields, names, checkpoint.tensors, checkpoint.description, checkpoint.info)
