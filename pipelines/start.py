"""What a training run starts from: another run of the profile, or the folder of anyone's checkpoint.

Place in the flow: `runs` and `train` ask here for `train.runs.<run>.start_from`. A published DFlash drafter, in any
format that `lilicorr.checkpoint` reads, is a warm start for every head whose blocks are cut as its own are. A value
with a slash, or one that begins with a dot or a tilde, is a path; any other one is a run's name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lilicorr.config import RunConfig, TrainConfig


def is_folder(start_from: str) -> bool:
    """Whether a start is a path."""
    return "/" in start_from or start_from.startswith((".", "~"))


def absolute(path: str) -> str:
    """A path that means the same in any current folder; one that does already stays as it is written."""
    return path if os.path.isabs(path) else str(Path(os.path.expanduser(path)).resolve())


def with_folders(config: TrainConfig) -> TrainConfig:
    """The runs with absolute paths: a worker has another current folder."""

    def in_full(run: RunConfig) -> RunConfig:
        if run.start_from is None or not is_folder(run.start_from):
            return run
        return replace(run, start_from=absolute(run.start_from))

    return replace(config, runs={name: in_full(run) for name, run in config.runs.items()})


def check_start(key: str, start_from: str | None, before: Sequence[str]) -> None:
    """Raise ValueError where the config's `key` names neither a run of `before` nor a checkpoint's folder."""
    if start_from is None or start_from in before:
        return
    if not is_folder(start_from):
        raise ValueError(
            f"{key} must be a run before it ({', '.join(before) or 'there is none'}) or the path of a checkpoint's "
            f"folder, got {start_from!r}"
        )
    folder = Path(os.path.expanduser(start_from))
    if not folder.is_dir():
        raise ValueError(
            f"{key}: there is no folder {start_from}; a checkpoint of the hub is downloaded first: "
            "hf download NAME --local-dir FOLDER"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {start_from} is not a checkpoint, it has no config.json")


def start_folder(runs: Path, start_from: str) -> Path:
    """The folder of the checkpoint that a run starts from; those of the profile's runs lie below `runs`."""
    return Path(start_from) if is_folder(start_from) else runs / start_from / "final"
