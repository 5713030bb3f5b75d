"""A training run's states on disk: weights, moments and a step number; written whole, found again and pruned.

Place in the flow: `training.Trainer` writes and reads them; `pipelines/train.py` asks for the newest one before a run's
first step. Names are `weight.<parameter>` and one per moment of AdamW, tensors are whole, however many workers made
them. Paper: none, it is how a run survives.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lilicorr.folder import new_folder, remove_unfinished

STATE, META = "state.safetensors", "meta.json"


def write_state(folder: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and what is known of them to `folder`, whole or not at all."""
    with new_folder(folder) as aside:
        save_file(tensors, aside / STATE)
        (aside / META).write_text(json.dumps(meta) + "\n", encoding="utf-8")


def read_state(folder: Path, identity: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_state` wrote; raises ValueError if it is damaged, or of another run than `identity`."""
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if meta["identity"] != identity:
        raise ValueError(f"{folder} was saved by run {meta['identity']}, this is {identity}")
    try:
        return load_file(folder / STATE), meta
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / STATE} is missing or damaged: {error}") from error


def check_fits(folder: Path, tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> None:
    """Raise ValueError, naming the tensor, unless those of a state in `folder` are exactly the ones of `shapes`."""
    for name in sorted(shapes.keys() ^ tensors.keys()):
        raise ValueError(f"{folder / STATE}: tensor {name} is {'missing' if name in shapes else 'surplus'}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise ValueError(f"{folder / STATE}: {name} has shape {list(tensor.shape)}")


def checkpoint_folder(parent: Path, step: int) -> Path:
    """Where the state after `step` steps is kept."""
    return parent / f"step_{step}"


def checkpoints(parent: Path) -> list[Path]:
    """The complete states under `parent`, oldest first."""
    found = {int(match[1]): path for path in parent.glob("step_*") if (match := re.fullmatch(r"step_(\d+)", path.name))}
    return [found[step] for step in sorted(found)]


def newest_checkpoint(parent: Path, device: torch.device) -> Path | None:
    """The newest complete state under `parent` that rank 0 finds, on every rank; None if it finds none.

    A rank's own listing of a shared file system may be some seconds old, and ranks must not go on from different steps.
    """
    states = checkpoints(parent)
    if not dist.is_initialized():
        return states[-1] if states else None
    step = int(states[-1].name.removeprefix("step_")) if states else -1
    chosen = torch.tensor(step, device=device)
    dist.broadcast(chosen, 0)
    return None if int(chosen) < 0 else checkpoint_folder(parent, int(chosen))


def prune_checkpoints(parent: Path, keep: int) -> None:
    """Delete all but the newest `keep` states, and what killed processes left unfinished."""
    for folder in checkpoints(parent)[: -max(1, keep)]:
        shutil.rmtree(folder)
    remove_unfinished(parent)
