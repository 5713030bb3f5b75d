"""Draft models on disk: `store` reads and writes them, `format` has the spellings of other projects in a table."""

from lilicorr.checkpoint.fit import check_fits, check_same_drafter, readers_of, replacement_weights
from lilicorr.checkpoint.info import read_info
from lilicorr.checkpoint.store import (
    Checkpoint,
    captured_layers,
    checkpoint_tensors,
    load_draft_model,
    mask_token,
    read_checkpoint,
    read_fields,
    save_draft_model,
    write_checkpoint,
    write_weights,
)

__all__ = [
    "Checkpoint",
    "captured_layers",
    "check_fits",
    "check_same_drafter",
    "checkpoint_tensors",
    "load_draft_model",
    "mask_token",
    "read_checkpoint",
    "read_fields",
    "read_info",
    "readers_of",
    "replacement_weights",
    "save_draft_model",
    "write_checkpoint",
    "write_weights",
]
