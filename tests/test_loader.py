"""The training loader does what a step's rows ask for and no more: nothing padded, nothing read or looped over besides.

What it does is counted, not timed: `benches/loader.py` has the times.
"""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from benches import loader
from benches.loader import consumed_rows_per_s, loader_rates, make_set
from lilicorr.anchors import choose_anchors
from lilicorr.config import TrainConfig
from lilicorr.corpus import Sampler, TrainingSet
from lilicorr.deal import deal_rows, row_costs

LENGTH = 48


def draw(training_set: TrainingSet, step: int, batch_size: int, size: int = 1, world: int = 1) -> list[Any]:
    """The batches of rank 0 in a step, drawn as the trainer draws them."""
    epoch, rows = Sampler(len(training_set), batch_size, 0).rows(step)
    batches = []
    for sample_ids, _ in deal_rows(rows, row_costs(training_set, rows, 8), size, 0, world):
        batches.append(training_set.batch(sample_ids))
        choose_anchors(batches[-1], 0, epoch, 8)
    return batches


def equal_rows(num_rows: int) -> TrainingSet:
    """Rows of one length, so that what is done for them does not depend on which they are."""
    offsets = np.arange(num_rows + 1, dtype=np.int64) * LENGTH
    tokens, mask = np.zeros(num_rows * LENGTH, dtype=np.int32), np.ones(num_rows * LENGTH, dtype=np.bool_)
    return TrainingSet(tokens, mask, offsets, np.zeros(1, dtype=np.int32), {})


def calls_of(training_set: TrainingSet, batch_size: int) -> int:
    """Calls of Python and C functions for a step in an epoch that has begun."""
    draw(training_set, 0, batch_size)
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        draw(training_set, 1, batch_size)
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_a_step_grows_with_its_rows_and_not_with_the_training_set() -> None:
    small, large = equal_rows(200), equal_rows(20_000)
    counts = {size: calls_of(large, size) for size in (8, 16, 32)}
    assert calls_of(small, 16) == counts[16] > 16
    assert counts[32] - counts[16] == 2 * (counts[16] - counts[8])  # a constant part and one a row


def test_an_epoch_is_shuffled_once() -> None:
    from lilicorr.corpus import _permutation

    training_set = equal_rows(101)
    _permutation.cache_clear()
    for step in range(26):
        draw(training_set, step, 8)
    assert _permutation.cache_info().misses == 2  # 13 steps an epoch


class Recorder:
    """An array that notes what is read of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.read = array, []

    def __getitem__(self, part: slice) -> np.ndarray:
        self.read.append((part.start, part.stop))
        return self.array[part]


def test_files_stay_mapped_and_only_the_rows_of_a_step_are_read(tmp_path: Path) -> None:
    training_set = make_set(tmp_path, 300, 100)
    for array in (training_set.tokens, training_set.mask):
        assert isinstance(array, np.memmap) and isinstance(array._mmap, mmap.mmap) and not array.flags.writeable
    recorders = [Recorder(training_set.tokens), Recorder(training_set.mask)]
    training_set.tokens, training_set.mask = recorders
    _, rows = Sampler(300, 16, 0).rows(3)
    batches = draw(training_set, 3, 16)
    assert sorted(int(i) for batch in batches for i in batch.sample_ids) == sorted(rows)
    wanted = sorted((int(training_set.offsets[row]), int(training_set.offsets[row + 1])) for row in rows)
    tokens, mask = (sorted(recorder.read) for recorder in recorders)
    assert tokens == wanted and mask == sorted(2 * wanted)  # the anchors are counted before the rows are dealt


@pytest.mark.parametrize("world", [1, 4])
def test_nothing_is_padded_in_micro_batches_of_one_row_and_little_in_larger_ones(tmp_path: Path, world: int) -> None:
    training_set = make_set(tmp_path, 400, 3072)
    padding = {}
    for size in (1, 4):
        tokens = positions = 0
        for step in range(6):
            for batch in draw(training_set, step, 64, size, world):
                assert batch.input_ids.shape == (len(batch.lengths), int(batch.lengths.max()))
                tokens, positions = tokens + int(batch.lengths.sum()), positions + batch.input_ids.numel()
        padding[size] = 1 - tokens / positions
    apart = 1 - np.mean([np.mean(four) / np.max(four) for four in training_set.lengths.reshape(-1, 4)])
    assert padding[1] == 0 < padding[4] < 0.7 * apart


def test_the_bench_measures_rows_like_those_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert consumed_rows_per_s() == pytest.approx(52.0, abs=0.1)
    assert consumed_rows_per_s("8b lilicorr") == pytest.approx(25.9, abs=0.1)
    training_set = make_set(tmp_path / "set", 4000, 3072)
    assert 800 < training_set.lengths.mean() < 1200 and training_set.lengths.max() == 3072
    assert 0.6 < training_set.mask.mean() < 0.9
    assert loader_rates(training_set, TrainConfig(), 2)["padding"] == 0
    output = tmp_path / "rows.jsonl"
    options = ["--rows", "300", "--steps", "3", "--micro-batch-size", "4", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["loader", *options, "--output", str(output)])
    loader.main()
    rows = [json.loads(text) for text in output.read_text().splitlines()]
    assert [row["cache"] for row in rows] == ["cold", "warm"] and capsys.readouterr().out.count(
        "times the 52 rows/s"
    ) == 2
    for row in rows:
        assert row["rows_per_s"] > 0 and row["tokens_per_s"] > row["rows_per_s"] and 0 < row["padding"] < 0.5
        assert row["times_consumed"] == pytest.approx(row["rows_per_s"] / row["consumed_rows_per_s"], rel=0.05, abs=0.1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("loader-")]
