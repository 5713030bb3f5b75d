"""The simulation of the feed: no turn is lost or longer than it is, and the pipeline's feed keeps engines full."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benches import corpus_scale, feed, loader
from benches.feed import Trace, make_turns, run_processor, simulate
from lilicorr.generator import DialogueSettings, regenerate_groups
from lilicorr.prompts import Conversation
from lilicorr.tiny import byte_tokenizer


def test_busy_is_the_area_under_the_places_in_use() -> None:
    trace = Trace()
    for start, end in ((0, 10), (0, 4), (4, 6)):
        trace.add(start, end)
    assert trace.busy(2, 10) == 16 / 20 and trace.busy(2, 4) == 1.0 and trace.busy(4, 5) == 10 / 20
    ends, shares = trace.shares(2)
    assert ends[-1] == 10 and shares[0] == 1.0 and shares[-1] == 0.5 and shares.mean() == pytest.approx(0.8)


def test_a_batch_of_the_processor_ends_with_its_longest_answer() -> None:
    turns = [[3], [9], [5, 2], [1], [4], [4], [4], [4]]
    trace = run_processor(turns, num_engines=1, slots=16, at_once=8)  # batches of two; then the second turns
    assert sorted(trace.finished) == [1, 3, 4, 4, 4, 4, 5, 9, 11]
    trace = run_processor(turns, num_engines=1, slots=16, at_once=2)  # four rows wait for the batches before them
    assert sorted(trace.finished) == [1, 3, 5, 5 + 4, 5 + 4, 9, 9 + 4, 9 + 4, 13 + 2]


def test_rows_that_wait_at_the_processors_engine_take_the_next_place() -> None:
    turns = [[6], [1], [1], [1], [2], [1], [1], [1], [5], [3]]  # batches of one over eight places
    trace = run_processor(turns, num_engines=1, slots=8, at_once=10)
    assert sorted(trace.finished) == [1, 1, 1, 1, 1, 1, 2, 1 + 3, 1 + 5, 6]
    assert sorted(run_processor(turns, 1, 8, at_once=9).finished) == sorted(trace.finished)
    assert max(run_processor(turns, 1, 8, at_once=2).finished) > 6


def test_the_feed_keeps_its_engine_full_and_waiting_for_the_last_answer_does_not() -> None:
    turns = make_turns(24 * 128)
    mean = sum(map(sum, turns)) / sum(map(len, turns))
    assert 650 < mean < 850 and 1.1 < sum(map(len, turns)) / len(turns) < 1.5
    rows = {way: simulate(way, turns, 2, 16)[0] for way in feed.WAYS}
    assert rows["feed"]["busy"] >= 0.95
    assert rows["shards"]["busy"] < 0.9 and rows["processor"]["busy"] < 0.8 and rows["processor2"]["busy"] < 0.95
    least = sum(map(sum, turns)) / (2 * 16)
    assert least <= rows["feed"]["steps"] < rows["processor2"]["steps"] < rows["processor"]["steps"]
    assert rows["feed"]["steps"] < rows["shards"]["steps"]
    for row in rows.values():
        assert row["busy_all"] == pytest.approx(least / row["steps"])


def test_engines_take_shards_in_the_order_of_their_clocks() -> None:
    """Among them one that is slow: it must not be given a shard in advance that another asks for before."""
    turns = [[1000 if number < 8 else 10 + number % 7] for number in range(400)]
    starts, taken = iter(range(0, 400, 8)), []
    order, trace = feed.Order(3), Trace()

    def run(engine: feed.SimulatedEngine) -> Iterator[Any]:
        def groups() -> Iterator[tuple[int, list[Conversation]]]:
            for start in starts:
                taken.append((engine.clock, start))
                yield start, [feed.conversation(number, turns[number]) for number in range(start, start + 8)]

        return regenerate_groups(groups(), byte_tokenizer(), engine, DialogueSettings({}, 4096))

    feed.run_together(order, [feed.SimulatedEngine(4, turns, trace, order, number) for number in range(3)], run)
    assert [start for _, start in taken] == list(range(0, 400, 8))
    assert [clock for clock, _ in taken] == sorted(clock for clock, _ in taken)
    assert trace.finished == sorted(trace.finished) and len(trace.finished) == 400


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [
        (feed, ["--slots", "0"], "--slots: must be at least 1, got 0"),
        (feed, ["--engines", "-1"], "--engines: must be at least 1, got -1"),
        (feed, ["--shards", "few"], "--shards: invalid positive value: 'few'"),
        (loader, ["--micro-batch-size", "0"], "--micro-batch-size: must be at least 1, got 0"),
        (loader, ["--folder", "nowhere"], "--folder nowhere is no folder"),
        (corpus_scale, ["--rows", "-3"], "--rows: must be at least 1, got -3"),
        (corpus_scale, ["--folder", __file__], "is a file"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    bench: ModuleType,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_rows_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, plot = tmp_path / "feed.jsonl", tmp_path / "feed.png"
    arguments = ["--engines", "2", "--slots", "8", "--shards", "4", "--output", str(output), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["feed", *arguments])
    feed.main()
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["way"] for row in rows] == list(feed.WAYS) and all(row["provenance"]["versions"] for row in rows)
    assert len({row["turns"] for row in rows}) == 1 and rows[0]["conversations"] == 256
    assert plot.read_bytes().startswith(b"\x89PNG")
