"""Kept features are those computed each time, survive torn writes, and are shared by processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fake_shards import turn, write_shard
from lilicorr.corpus import TrainingSet, build_training_set
from lilicorr.features import FeatureFile, FeatureSource
from lilicorr.target import Target

LENGTHS = (9, 24, 13)


@pytest.fixture
def training_set(tmp_path: Path) -> TrainingSet:
    """Three rows of random tokens."""
    ids = torch.randint(0, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5)).tolist()
    turns = [turn(f"c{i}", 0, ids[i : i + 3], ids[i + 3 : i + length]) for i, length in enumerate(LENGTHS)]
    build_training_set([write_shard(tmp_path / "shard.parquet", turns)], tmp_path / "set", 64, "turn")
    return TrainingSet.open(tmp_path / "set")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_features_are_those_computed(
    tmp_path: Path, training_set: TrainingSet, target_factory: Callable[..., Target], dtype: torch.dtype
) -> None:
    target = target_factory(dtype=dtype)
    batch = training_set.batch([0, 2, 1])
    first = FeatureSource(target, training_set, tmp_path / "new" / "file")(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        expected = FeatureSource(target, training_set)(training_set.batch(batch.sample_ids[row : row + 1].tolist()))
        for states, state in zip(first, expected):
            assert states.dtype == dtype
            assert torch.equal(states[row, :length], state[0])
    target.forward = None  # whatever is asked for now was kept, also for another process
    again = FeatureSource(target, training_set, tmp_path / "new" / "file")(batch)
    assert all(torch.equal(states, kept) for states, kept in zip(first, again))


def test_rows_come_back_and_holes_and_torn_rows_do_not_count(tmp_path: Path) -> None:
    sizes = np.array([3, 4000, 0, 4, 0])
    file, other = FeatureFile(tmp_path / "file", sizes), FeatureFile(tmp_path / "file", sizes)
    rows = {0: b"abc", 1: bytes(4000), 2: b""}
    assert [file.read(row) for row in range(5)] == [None] * 5
    for row, data in rows.items():
        file.write(row, data)
    assert [other.read(row) for row in range(5)] == [b"abc", bytes(4000), b"", None, None]
    content = bytearray(file.path.read_bytes())
    content[5] ^= 1
    file.path.write_bytes(content)
    assert [other.read(row) for row in range(3)] == [None, bytes(4000), b""]
    other.write(0, b"abd")
    assert file.read(0) == b"abd"


def test_a_disk_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**30))
    FeatureFile(tmp_path / "small", np.array([2**29]))
    with pytest.raises(ValueError, match=r"cache_features needs 2.0 GiB more in .*, 1.0 GiB are free"):
        FeatureFile(tmp_path / "large", np.array([2**30, 2**30]))


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = FeatureFile(tmp_path / "file", np.array([3]))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(0, b"abc")
    assert file.read(0) is None
