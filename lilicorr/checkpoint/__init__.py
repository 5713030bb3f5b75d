"""Draft models on disk: `store` reads and writes them, `format` has the spellings of other projects in a table."""

from lilicorr.checkpoint.store import (
    Checkpoint,
    checkpoint_tensors,
    load_draft_model,
    read_checkpoint,
    read_info,
    read_layer_ids,
    save_draft_model,
    write_checkpoint,
)

__all__ = [
    "Checkpoint",
    "checkpoint_tensors",
    "load_draft_model",
    "read_checkpoint",
    "read_info",
    "read_layer_ids",
    "save_draft_model",
    "write_checkpoint",
]
