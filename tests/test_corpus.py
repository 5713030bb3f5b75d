"""The training set holds exactly the regenerated tokens, and the sampler is a function of the step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fake_shards import turn, write_shard
from lilicorr.anchors import choose_anchors
from lilicorr.corpus import Sampler, TrainingSet, build_training_set


def rows_of(folder: Path) -> list[tuple[list[int], list[bool]]]:
    """Tokens and mask of every row, without padding."""
    training_set = TrainingSet.open(folder)
    rows = []
    for sample in range(len(training_set)):
        batch = training_set.batch([sample])
        rows.append((batch.input_ids[0].tolist(), batch.loss_mask[0].tolist()))
    return rows


def test_turn_rows_are_prompt_and_completion_with_the_border_as_mask(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "b.parquet", [turn("b", 1, [1, 2, 3, 4], [5, 6]), turn("b", 0, [1, 2], [3, 4, 9])])
    report = build_training_set([shard], tmp_path / "set", 100, "turn")
    assert rows_of(tmp_path / "set") == [
        ([1, 2, 3, 4, 9], [False, False, True, True, True]),
        ([1, 2, 3, 4, 5, 6], [False] * 4 + [True] * 2),
    ]
    assert report["rows"] == 2 and report["conversations"] == 1 and report["turns"] == 2
    assert report["tokens"] == 11 and report["supervised_tokens"] == 5 and report["longest_row"] == 6
    assert TrainingSet.open(tmp_path / "set").vocab_ids().tolist() == [1, 2, 3, 4, 5, 6, 9]


def test_content_does_not_depend_on_the_order_of_shards_and_turns(tmp_path: Path) -> None:
    turns = [turn(cid, index, [1, index], [7, 8, ord(cid)]) for cid in "dacb" for index in (1, 0)]
    first = [write_shard(tmp_path / "one.parquet", turns)]
    second = [write_shard(tmp_path / f"{i}.parquet", part) for i, part in enumerate((turns[4:], turns[:4][::-1]))]
    build_training_set(first, tmp_path / "first", 100, "turn")
    build_training_set(second, tmp_path / "second", 100, "turn")
    assert rows_of(tmp_path / "first") == rows_of(tmp_path / "second")
    metas = [json.loads((tmp_path / name / "meta.json").read_text()) for name in ("first", "second")]
    assert metas[0] == metas[1]
    build_training_set(second[:1], tmp_path / "third", 100, "turn")
    assert json.loads((tmp_path / "third" / "meta.json").read_text())["content"] != metas[0]["content"]


def test_rows_are_cut_on_the_right_and_rows_without_a_block_are_counted(tmp_path: Path) -> None:
    shard = write_shard(
        tmp_path / "a.parquet",
        [
            turn("a", 0, [1, 2], [3, 4, 5, 6]),  # cut to one prompt and two answer tokens
            turn("b", 0, [1, 2, 3, 4], [5, 6]),  # the cut leaves no answer
            turn("c", 0, [1, 2], [3]),  # one token holds no block
            turn("d", 0, [1, 2, 3], [4, 5]),  # the cut leaves one answer token
            turn("e", 0, [1], [], finish_reason="stop"),
            turn("f", 0, [1], [2, 3], finish_reason="error"),
            turn("g", 0, [1], [2, 3], finish_reason="length"),
        ],
    )
    report = build_training_set([shard], tmp_path / "set", 4, "turn")
    assert rows_of(tmp_path / "set") == [([1, 2, 3, 4], [False, False, True, True]), ([1, 2, 3], [False, True, True])]
    assert report["dropped"] == {"empty": 1, "error": 1, "no_supervised_pair": 3}
    assert report["truncated"] == 3
    assert report["turns"] == report["rows"] + sum(report["dropped"].values())


def test_conversation_rows_supervise_every_answer_found_in_the_last_prompt(tmp_path: Path) -> None:
    # 50 opens an answer, 51 is a think block only the prompt being answered carries, 9 ends an answer.
    first = turn("a", 0, [7, 3, 9, 50, 51], [3, 9])
    second = turn("a", 1, [7, 3, 9, 50, 3, 9, 8, 50, 51], [4, 4, 9])
    third = turn("a", 2, [7, 3, 9, 50, 3, 9, 8, 50, 40, 9, 6, 50, 51], [5, 5, 9])  # [4, 4] came back as [40]
    shard = write_shard(tmp_path / "a.parquet", [third, first, second])
    report = build_training_set([shard], tmp_path / "set", 100, "conversation")
    tokens, mask = rows_of(tmp_path / "set")[0]
    assert tokens == third["prompt_ids"] + third["completion_ids"]
    # The user's own [3, 9] at index 1 is not the answer, the one after 50 is.
    assert [i for i, supervised in enumerate(mask) if supervised] == [4, 5, 13, 14, 15]
    assert report["spans_found"] == 1 and report["spans_missing"] == 1 and report["rows"] == 1


def test_repeated_turns_mixed_runs_and_an_empty_set_are_refused(tmp_path: Path) -> None:
    one = write_shard(tmp_path / "1.parquet", [turn("a", 0, [1], [2, 3])])
    same = write_shard(tmp_path / "2.parquet", [turn("a", 0, [1], [2, 3])])
    twice = write_shard(tmp_path / "3.parquet", [turn("b", 0, [1], [2, 3])] * 2)
    other = write_shard(tmp_path / "4.parquet", [turn("c", 0, [1], [2, 3], fingerprint="other")])
    short = write_shard(tmp_path / "5.parquet", [turn("d", 0, [1], [2])])
    cases = [([one, same], "conversation a turn 0"), ([twice], "twice"), ([one, other], "other, run")]
    for shards, message in [*cases, ([short], "dropped_no_supervised_pair': 1")]:
        with pytest.raises(ValueError, match=message):
            build_training_set(shards, tmp_path / "set", 10, "turn")
    with pytest.raises(ValueError, match="layout must be one of turn, conversation, got 'rows'"):
        build_training_set([one], tmp_path / "set", 10, "rows")
    assert not (tmp_path / "set").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n}.parquet" for n in range(1, 6)]


@pytest.mark.parametrize("name", ["tokens.npy", "mask.npy", "offsets.npy", "vocab.npy", "meta.json"])
def test_a_damaged_set_names_the_file(tmp_path: Path, name: str) -> None:
    shard = write_shard(tmp_path / "a.parquet", [turn("a", i, [1] * 20, [2, 3] * 20) for i in range(3)])
    build_training_set([shard], tmp_path / "set", 100, "turn")
    path = tmp_path / "set" / name
    if name != "meta.json":
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(ValueError, match=name):
            TrainingSet.open(tmp_path / "set")
    path.unlink()
    with pytest.raises(ValueError, match=name):
        TrainingSet.open(tmp_path / "set")


def test_arrays_of_another_set_are_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.parquet", [turn("a", i, [1], [2, 3]) for i in range(3)])
    build_training_set([shard], tmp_path / "set", 100, "turn")
    np.save(tmp_path / "set" / "tokens.npy", np.zeros(8, dtype=np.int32))
    with pytest.raises(ValueError, match=r"tokens.npy holds \(8,\) entries of <i4, meta.json says 9, of <i4"):
        TrainingSet.open(tmp_path / "set")
    build_training_set([shard], tmp_path / "set", 100, "turn")
    np.save(tmp_path / "set" / "offsets.npy", np.array([0, 6, 3, 9]))
    with pytest.raises(ValueError, match="offsets.npy"):
        TrainingSet.open(tmp_path / "set")


def test_a_batch_is_right_padded_with_zero(tmp_path: Path) -> None:
    turns = [turn("a", 0, [1, 2], [3, 4, 5]), turn("b", 0, [6], [7, 8])]
    build_training_set([write_shard(tmp_path / "a.parquet", turns)], tmp_path / "set", 100, "turn")
    batch = TrainingSet.open(tmp_path / "set").batch([1, 0])
    assert batch.input_ids.tolist() == [[6, 7, 8, 0, 0], [1, 2, 3, 4, 5]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, False], [False, False, True, True, True]]
    assert batch.lengths.tolist() == [3, 5] and batch.sample_ids.tolist() == [1, 0]
    assert batch.input_ids.dtype == batch.lengths.dtype == torch.int64


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 4), (8, 4), (3, 5), (1, 1)])
def test_an_epoch_of_the_sampler_is_a_permutation(num_rows: int, batch_size: int) -> None:
    sampler = Sampler(num_rows, batch_size, seed=3)
    for epoch in range(3):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        batches = [sampler.rows(step) for step in steps]
        assert all(number == epoch for number, _ in batches)
        assert all(len(rows) <= batch_size for _, rows in batches)
        assert sorted(row for _, rows in batches for row in rows) == list(range(num_rows))


def test_the_sampler_is_keyed_by_seed_and_epoch_alone() -> None:
    sampler = Sampler(100, 7, seed=1)
    assert sampler.rows(40) == Sampler(100, 7, seed=1).rows(40)
    assert sampler.order(0).tolist() != sampler.order(1).tolist()
    assert sampler.order(0).tolist() != Sampler(100, 7, seed=2).order(0).tolist()
    assert sampler.num_steps(2) == 30 and sampler.num_steps(0.5) == 8 and sampler.num_steps(0.001) == 1
    with pytest.raises(ValueError, match="got 0 and 4"):
        Sampler(0, 4, seed=0)


@pytest.mark.parametrize("layout", ["turn", "conversation"])
def test_a_row_has_as_many_anchors_as_are_chosen_in_it(tmp_path: Path, layout: str) -> None:
    """Of a conversation every answer that is supervised opens anew."""
    first, second = [3] * 6, [4] * 9
    turns = [turn("a", 0, [1, 2], first), turn("a", 1, [1, 2, *first, 8], second), turn("b", 0, [5] * 20, [6, 7])]
    build_training_set([write_shard(tmp_path / "a.parquet", turns)], tmp_path / "set", 100, layout)
    training_set = TrainingSet.open(tmp_path / "set")
    rows = list(range(len(training_set)))[::-1]
    for most in (7, 100):
        _, keep = choose_anchors(training_set.batch(rows), 0, 0, most)
        assert training_set.num_anchors(rows, most).tolist() == keep.sum(1).tolist()
    assert training_set.num_anchors(rows, 100).tolist() == ([1, 8, 5] if layout == "turn" else [1, 13])
