"""The bench of the bookkeeping at toy size: a corpus of the card's shape, and what it says of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benches import corpus, corpus_scale
from benches.corpus import LONGEST, SPLITS, Replay, make_corpus
from lilicorr.config import PipelineConfig
from lilicorr.rows import corpus_files, iter_rows
from lilicorr.tiny import byte_tokenizer
from pipelines import regenerate
from pipelines.shard_queue import ShardQueue

CARD_BYTES = {"stem": 2275, "chat": 9513, "math": 2119, "code": 5602}  # mean of a row, of the data set's card
ROWS = 400


def test_the_corpus_has_the_schema_the_sizes_and_the_longest_row(tmp_path: Path) -> None:
    assert sum(split.num_rows for split in SPLITS.values()) == corpus.NUM_ROWS == 1_397_187
    make_corpus(tmp_path, 6000)
    sizes, longest = Counter(), 0
    for path in corpus_files(tmp_path):
        table = pq.read_table(path)
        assert table.column_names == [*corpus.COLUMNS, "messages"]
        split = path.name.partition("-")[0]
        sizes[split] += table.num_rows
        mean = table.slice(2 if split == "chat" else 0).nbytes / table.num_rows
        assert abs(mean / CARD_BYTES[split] - 1) < 0.15, (split, mean)
        messages = [message for row in table["messages"].to_pylist() for message in row]
        longest = max(longest, *(len(message["content"] or "") for message in messages))
    assert sizes == {"stem": 1524, "chat": 2696, "math": 1028, "code": 752} and longest == LONGEST


def test_the_corpus_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_corpus(tmp_path / name, 300)
    first, second = ([list(iter_rows(path)) for path in corpus_files(tmp_path / name)] for name in ("a", "b"))
    assert first == second and len({row["uuid"] for rows in first for row in rows}) == 300


def test_the_replay_answers_by_the_prompt_alone() -> None:
    prompts = [[i, 5, 7] for i in range(400)]
    engines = [Replay(byte_tokenizer(), max_model_len=1000, max_in_flight=9) for _ in range(2)]
    for engine, order in zip(engines, (1, -1)):
        for key in range(400)[::order]:
            engine.submit(key, prompts[key], 900)
    first, second = (dict(engine.poll()) for engine in engines)
    assert first == second and engines[0].poll() == []
    lengths = sorted(len(completion.token_ids) for completion in first.values())
    assert 400 < lengths[200] < 700 and lengths[-1] == 900
    for completion in first.values():
        assert (completion.finish_reason == "length") == (len(completion.token_ids) == 900)
        assert (completion.token_ids[-1] == byte_tokenizer().eos_token_id) == (completion.finish_reason == "stop")
    assert len(engines[0].answer([1] * 990, 10).token_ids) == 10


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    """A run of the driver in this process."""

    def in_process(work: regenerate.Work) -> None:
        work.attempts.mkdir(parents=True)
        regenerate.GeneratorActor(work, ShardQueue(len(work.shards))).work_off(0)

    monkeypatch.setattr(regenerate, "run_on_ray", in_process)
    make_corpus(tmp_path / "corpus", ROWS)
    config = corpus_scale.make_profile(tmp_path, actors=1, shard_size=100)
    corpus_scale.drive(str(tmp_path))
    return config


def test_every_row_has_one_place_and_a_second_one_or_none_is_an_error(finished: PipelineConfig) -> None:
    found = corpus_scale.account(finished, ROWS)
    assert found["rows"] == ROWS and found["duplicate"] > 0 and found["ok"] > 0.9 * ROWS and found["shards"] == 4
    sizes = corpus_scale.sizes(finished)
    report = sizes["training_set"]
    assert sizes["loader"]["rows_per_s"] > 0 and sizes["loader"]["tokens_per_s"] > 0
    # the longest row is among the answered ones; cut to 3,072 tokens it holds none of its answer
    assert report["turns"] == found["turns"] == report["rows"] + sum(report["dropped"].values())
    assert report["dropped"]["no_supervised_pair"] >= 1
    with pytest.raises(RuntimeError, match=f"of {ROWS + 1} rows accounted for"):
        corpus_scale.account(finished, ROWS + 1)
    shards = sorted((finished.directory / "regenerate" / "shards").glob("*.parquet"))
    data = shards[1].read_bytes()
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(RuntimeError, match="ids in shards and dead letters"):
        corpus_scale.account(finished, ROWS)
    shards[1].unlink()
    with pytest.raises(RuntimeError, match="ids in shards and dead letters"):
        corpus_scale.account(finished, ROWS)
    shards[1].write_bytes(data)
    assert corpus_scale.account(finished, ROWS) == found


@pytest.mark.parametrize("keep", [False, True])
def test_what_an_error_leaves_is_removed_unless_it_is_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    def fail(folder: Path, *_: Any) -> None:
        (folder / "corpus").mkdir()
        raise RuntimeError("the driver ended")

    folder, output = tmp_path / "run", tmp_path / "result.json"
    arguments = ["--folder", str(folder), "--output", str(output), *(["--keep"] if keep else [])]
    monkeypatch.setattr(corpus_scale, "bench", fail)
    monkeypatch.setattr(sys, "argv", ["corpus_scale", *arguments])
    with pytest.raises(RuntimeError, match="the driver ended"):
        corpus_scale.main()
    assert (folder / "corpus").is_dir() == keep and not output.exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('the disk is full'); raise SystemExit(1)", "ended by itself with 1:\n.*the disk is full"),
        ("import os; os.kill(os.getpid(), 9)", "ended by itself with -9"),
        ("pass", "was done before it could be killed at 50%; give more rows"),
    ],
)
def test_a_driver_that_ends_by_itself_is_not_taken_for_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", program], **options)

    popen = subprocess.Popen
    monkeypatch.setattr(corpus_scale.subprocess, "Popen", start)
    watch = corpus_scale.Watch(tmp_path, corpus_scale.make_profile(tmp_path, 1, 100), tmp_path)
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        watch.run(0.5)


def test_sigterm_ends_the_bench_and_removes_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(folder: Path, *_: Any) -> None:
        (folder / "corpus").mkdir()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # again, while it cleans up

    monkeypatch.setattr(corpus_scale, "bench", bench)
    monkeypatch.setattr(sys, "argv", ["corpus_scale", "--folder", str(tmp_path / "run")])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            corpus_scale.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_driver_is_started_again_and_the_result_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "result.json"
    # what the killed driver started works on for a moment: there must be more than it can make in that time
    arguments = ["--rows", "8000", "--kills", "0.2", "0.5", "--actors", "1", "--shard-size", "20"]
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["corpus_scale", *arguments, "--folder", str(folder), "--output", str(output)])
    corpus_scale.main()
    result = json.loads(output.read_text(encoding="utf-8"))
    parts = ("ok", "dead", "duplicate", "dropped", "held_out")
    assert result["rows"] == 8000 == sum(result[name] for name in parts)
    assert result["kills"] == [0.2, 0.5] and result["resume_seconds"] > 0 and result["status_seconds"] > 0
    assert 0.05 < result["peak_rss_gb"] < result["peak_tree_gb"] * 1.5 and result["seconds"] > 0
    assert set(result["stage_seconds"]) == {"prepare", "regenerate", "build"} and result["provenance"]["versions"]
    assert not folder.exists()
