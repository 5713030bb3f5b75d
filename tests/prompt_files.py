"""The two files of prepared prompts, read back."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lilicorr.config import PromptConfig
from lilicorr.prompts import Conversation, prepare_conversations, read_conversations


def load_conversations(config: PromptConfig) -> tuple[list[Conversation], list[Conversation], dict[str, int]]:
    """Training and held-out prompts of a source, and the counts; nothing else is left beside the files."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("prompts.parquet", "held_out.parquet")]
        counts = prepare_conversations(config, *files)
        assert sorted(Path(folder).iterdir()) == sorted(files)
        return *(read_conversations(file) for file in files), counts
