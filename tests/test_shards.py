"""Whatever is killed and whenever: every planned conversation is accounted for exactly once, with the same content."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fake_generator import ReplayGenerator, conversation, conversations, hashed_answer
from lilicorr import parquet
from lilicorr.generator import Completion, DialogueSettings, regenerate_conversations
from lilicorr.prompts import Conversation, write_conversations
from lilicorr.tiny import byte_tokenizer
from pipelines import shards
from pipelines import tally as tally_module
from pipelines.shards import Plan, Run
from pipelines.tally import STALL_S, Progress, Tally, describe, percentile

SETTINGS = DialogueSettings({"enable_thinking": False}, max_new_tokens=12)
PARTS = {"target": {"template_hash": "x"}, "regenerate.max_new_tokens": 12}


def setup(folder: Path, number: int = 23, shard_size: int = 5) -> tuple[Plan, Run, Path]:
    """Plan and run of `number` conversations, three of them too long for the context of 60."""
    asked = conversations(number - 3) + [conversation(f"{i} " + "x" * 80) for i in range(3)]
    write_conversations(folder / "prompts.parquet", asked)
    plan = shards.open_plan(folder, folder / "prompts.parquet", shard_size)
    return plan, shards.open_run(folder, "replay 1", PARTS), folder / "prompts.parquet"


def make(plan: Plan, run: Run, prompts: Path) -> int:
    """Make what is missing in this process; returns how many shards that was."""
    todo = shards.missing(run, plan)
    for shard in todo:
        generator = ReplayGenerator(max_model_len=60)
        results = regenerate_conversations(shards.read_shard(prompts, shard), byte_tokenizer(), generator, SETTINGS)
        shards.commit(run, shard, results, attempt=1, seconds=1.0)
    return len(todo)


def content(folder: Path) -> dict[str, Any]:
    """Everything a run says of its conversations, by content id; each one may be there only once."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("shards/*.parquet")):
        rows = pq.read_table(path).to_pylist()
        assert [(row["cid"], row["turn"]) for row in rows] == sorted((row["cid"], row["turn"]) for row in rows)
        for cid in {row["cid"] for row in rows}:
            assert cid not in found
            turns = [row for row in rows if row["cid"] == cid]
            found[cid] = [{k: v for k, v in row.items() if k not in ("created_ns", "attempt")} for row in turns]
    for path in folder.glob("dead_letter/*.parquet"):
        for row in pq.read_table(path).to_pylist():
            assert row["cid"] not in found
            found[row["cid"]] = (row["error"], row["message"], row["turn"], row["source_uuid"])
    return found


def planned(prompts: Path) -> set[str]:
    return set(pq.read_table(prompts)["cid"].to_pylist())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("reference")
    assert make(*setup(folder)) == 5
    return content(folder)


def test_a_run_accounts_for_everything_and_a_second_one_does_nothing(tmp_path: Path, reference: dict[str, Any]) -> None:
    plan, run, prompts = setup(tmp_path)
    make(plan, run, prompts)
    assert content(tmp_path) == reference and set(reference) == planned(prompts)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert make(*setup_again(tmp_path)) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == stamps
    numbers = Tally(tmp_path, plan).summary()
    assert (numbers["ok"], numbers["dead"], numbers["duplicate"], numbers["planned"]) == (20, 3, 0, 23)
    assert numbers["dead_by_error"] == {"PromptTooLong": 3} and numbers["shards_done"] == numbers["shards"] == 5
    turns = [turn for turns in reference.values() if isinstance(turns, list) for turn in turns]
    lengths = sorted(turn["completion_len"] for turn in turns)
    assert numbers["turns"] == len(turns) and numbers["completion_tokens"] == sum(lengths)
    assert numbers["answer_tokens_p50"] == lengths[(len(lengths) + 1) // 2 - 1]
    at_limit = sum(turn["finish_reason"] == "length" for turn in turns)
    assert sum(source["length"] for source in numbers["sources"].values()) == at_limit > 0
    assert numbers["sources"]["a"]["length_rate"] == round(
        sum(t["finish_reason"] == "length" for t in turns if t["source_split"] == "a")
        / sum(t["source_split"] == "a" for t in turns),
        4,
    )


def setup_again(folder: Path) -> tuple[Plan, Run, Path]:
    """Continue the run of `folder`."""
    prompts = folder / "prompts.parquet"
    return shards.open_plan(folder, prompts, 5), shards.open_run(folder, "replay 1", PARTS), prompts


def test_rows_are_what_the_training_set_reads(tmp_path: Path) -> None:
    plan, run, prompts = setup(tmp_path)
    make(plan, run, prompts)
    table = pq.read_table(shards.data_path(tmp_path, plan.shards[0]))
    assert table.schema.names == shards.TURNS.names
    row = table.to_pylist()[0]
    assert row["completion_ids"] == hashed_answer(row["prompt_ids"], 12).token_ids
    assert row["completion_len"] == len(row["completion_ids"]) and row["fingerprint"] == run.fingerprint
    assert row["messages"][-1]["role"] == "assistant" and row["engine"] == "replay 1" and row["attempt"] == 1


@pytest.mark.parametrize("name", ["shards", "dead_letter", "manifest"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "empty"])
def test_a_damaged_shard_is_made_again(tmp_path: Path, reference: dict[str, Any], name: str, damage: str) -> None:
    make(*setup(tmp_path))
    path = sorted((tmp_path / name).iterdir())[0]
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        half = len(data) // 2
        flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        path.write_bytes({"cut": data[:half], "flipped": flipped, "empty": b""}[damage])
    made = make(*setup_again(tmp_path))
    harmless = name == "manifest" and damage == "flipped"  # a digit of a time, say; but never of a count or a hash
    assert made == 1 or harmless
    assert content(tmp_path) == reference


def make_until(folder: Path, where: str, count: int) -> int:
    """Make shards in a child process that kills itself at call `count + 1` of `shards.where` or `os.where`."""

    def child() -> None:
        owner = os if where == "replace" else shards
        original, calls = getattr(owner, where), []

        def die_after(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) > count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        plan, run, prompts = setup_again(folder)
        setattr(owner, where, die_after)
        make(plan, run, prompts)

    process = multiprocessing.get_context("fork").Process(target=child)  # fork: no second import of torch
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.parametrize(
    ("where", "count", "left"),
    [
        ("read_shard", 2, 3),  # while a shard is being made
        ("write_json", 1, 4),  # between the data and the manifest
        ("_write_table", 3, 3),  # between the turns and the dead letters, or before the turns
        ("replace", 4, 4),  # with a file complete but still under its temporary name
    ],
)
def test_killed_at_any_point_and_run_again(
    tmp_path: Path, reference: dict[str, Any], where: str, count: int, left: int
) -> None:
    setup(tmp_path)
    assert make_until(tmp_path, where, count) == -signal.SIGKILL
    if where == "replace":
        assert list(tmp_path.glob("*/.tmp-*"))
    plan, run, prompts = setup_again(tmp_path)
    assert not list(tmp_path.glob("**/.tmp-*"))
    assert 0 < make(plan, run, prompts) <= left
    assert content(tmp_path) == reference
    Tally(tmp_path, plan).complete()


def test_every_interleaving_of_two_workers_ends_done_or_not_done(tmp_path: Path, reference: dict[str, Any]) -> None:
    plan, run, prompts = setup(tmp_path)
    shard = plan.shards[0]
    steps = [shards.data_path(tmp_path, shard), shards.dead_letter_path(tmp_path, shard)]
    steps.append(tmp_path / "manifest" / f"{shard.id}.json")
    writes: list[list[tuple[Path, bytes]]] = []
    for worker in range(2):
        results = regenerate_conversations(
            shards.read_shard(prompts, shard), byte_tokenizer(), ReplayGenerator(max_model_len=60), SETTINGS
        )
        shards.commit(run, shard, results, attempt=1 + worker, seconds=1.0)
        writes.append([(path, path.read_bytes()) for path in steps if path.exists()])
        for path in steps:
            path.unlink(missing_ok=True)
    assert writes[0] != writes[1]
    size = len(writes[0])
    for mask in range(1 << (2 * size)):
        if bin(mask).count("1") != size:
            continue
        queues = [list(writes[0]), list(writes[1])]
        for bit in range(2 * size):
            path, data = queues[mask >> bit & 1].pop(0)
            path.write_bytes(data)
        if not shards.is_done(run, shard):
            continue
        rows = pq.read_table(shards.data_path(tmp_path, shard)).to_pylist()
        assert {row["attempt"] for row in rows} == {shards.read_manifest(tmp_path, shard)["attempt"]}
    make(plan, run, prompts)
    assert content(tmp_path) == reference


def test_the_first_commit_wins(tmp_path: Path) -> None:
    plan, run, prompts = setup(tmp_path)
    make(plan, run, prompts)
    shard = plan.shards[0]
    before = shards.data_path(tmp_path, shard).read_bytes()
    results = list(
        regenerate_conversations(
            shards.read_shard(prompts, shard), byte_tokenizer(), ReplayGenerator(max_model_len=60), SETTINGS
        )
    )
    shards.commit(run, shard, results, attempt=2, seconds=1.0)
    assert shards.data_path(tmp_path, shard).read_bytes() == before
    with pytest.raises(AssertionError, match="results"):
        shards.commit(run, shard, results[1:], attempt=2, seconds=1.0)


def test_other_prompts_sizes_and_settings_are_refused(tmp_path: Path) -> None:
    _, _, prompts = setup(tmp_path)
    with pytest.raises(ValueError, match=r"regenerate\.shard_size changed .*\(5, .*-> 6, .*--force"):
        shards.open_plan(tmp_path, prompts, 6)
    with pytest.raises(ValueError, match=r"regenerate\.max_new_tokens: 12 -> 13"):
        shards.open_run(tmp_path, "replay 1", {**PARTS, "regenerate.max_new_tokens": 13})
    with pytest.raises(ValueError, match=r"engine: 'replay 1' -> 'replay 2'.*new: None -> 1"):
        shards.open_run(tmp_path, "replay 2", {**PARTS, "new": 1})
    write_conversations(prompts, conversations(24))
    with pytest.raises(ValueError, match="the prompt set changed .*23 prompts -> .*24 prompts"):
        shards.open_plan(tmp_path, prompts, 5)
    with pytest.raises(ValueError, match="no regeneration run"):
        shards.read_plan(tmp_path / "manifest")


def test_manifests_of_another_run_do_not_count(tmp_path: Path) -> None:
    plan, run, prompts = setup(tmp_path)
    make(plan, run, prompts)
    assert shards.missing(Run(tmp_path, "other", "replay 1"), plan) == list(plan.shards)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_the_plan_partitions_the_rows_and_counts_duplicates(tmp_path: Path, size: int) -> None:
    cids = sorted(["a", "b", "b", "b", "c", "d", "d", "e", "f", "g"])
    plan = shards.make_plan(cids, size)
    assert plan.num_rows == 10 and plan.num_duplicates == 3
    assert [shard.start for shard in plan.shards] == [0, *(shard.stop for shard in plan.shards)][: len(plan.shards)]
    assert plan.shards[-1].stop == 10
    for shard in plan.shards:
        own = cids[shard.start : shard.stop]
        assert shard.id == own[0] and shard.num_conversations == len(set(own)) <= size
    assert all(shard.num_conversations == size for shard in plan.shards[:-1])
    with pytest.raises(ValueError, match="row 1 has a after b"):
        shards.make_plan(["b", "a"], 1)
    with pytest.raises(ValueError, match="shard_size must be at least 1, got 0"):
        shards.make_plan(["a"], 0)
    with pytest.raises(ValueError, match="no prompts"):
        shards.make_plan([], 1)


def test_duplicates_in_the_prompt_file_are_answered_once(tmp_path: Path) -> None:
    asked = conversations(7)
    twice = [*asked, asked[2], asked[2], Conversation(**{**vars(asked[4]), "uuid": "another"})]
    prompts = tmp_path / "prompts.parquet"
    write_conversations(prompts, twice)
    plan, run = shards.open_plan(tmp_path, prompts, 3), shards.open_run(tmp_path, "replay 1", PARTS)
    make(plan, run, prompts)
    assert set(content(tmp_path)) == {c.cid for c in asked}
    numbers = Tally(tmp_path, plan).summary()
    assert numbers["ok"] + numbers["dead"] + numbers["duplicate"] == numbers["planned"] == 10
    assert numbers["duplicate"] == 3 and shards.read_plan(tmp_path) == plan


def test_an_engine_that_never_stops_is_flagged(tmp_path: Path) -> None:
    plan, run, prompts = setup(tmp_path)
    for shard in plan.shards:
        generator = ReplayGenerator(lambda prompt, limit: Completion([97] * limit, "length"), max_model_len=60)
        results = regenerate_conversations(shards.read_shard(prompts, shard), byte_tokenizer(), generator, SETTINGS)
        shards.commit(run, shard, results, attempt=1, seconds=1.0)
    numbers = Tally(tmp_path, plan).summary()
    assert {source["length_rate"] for source in numbers["sources"].values()} == {1.0}
    assert numbers["turns"] == 20 and numbers["skipped_turns"] == sum(i % 3 for i in range(20))
    text = "\n".join(describe(numbers))
    assert "100.0 %" in text and "20 ok + 3 dead, PromptTooLong 3 + 0 duplicate of 23 planned" in text


def test_a_shard_of_long_rows_has_several_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, Any]
) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1000)
    plan, run, prompts = setup(tmp_path)
    make(plan, run, prompts)
    assert max(pq.ParquetFile(path).num_row_groups for path in tmp_path.glob("shards/*.parquet")) > 2
    assert content(tmp_path) == reference and make(*setup_again(tmp_path)) == 0


def test_a_tally_reads_every_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, run, prompts = setup(tmp_path)
    make(plan, run, prompts)
    path = tmp_path / "manifest" / f"{plan.shards[3].id}.json"
    text, read = path.read_text(), []
    path.unlink()
    tally = Tally(tmp_path, plan)
    assert tally.summary()["shards_done"] == 4
    monkeypatch.setattr(tally_module, "read_manifest", lambda *a: read.append(a) or shards.read_manifest(*a))
    path.write_text(text)
    assert tally.summary() == Tally(tmp_path, plan).summary() and tally.summary()["shards_done"] == 5
    assert [shard for _, shard in read] == [plan.shards[3], *plan.shards]


def test_an_accounting_that_does_not_add_up_fails(tmp_path: Path) -> None:
    plan, run, prompts = setup(tmp_path)
    make(plan, run, prompts)
    path = tmp_path / "manifest" / f"{plan.shards[0].id}.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "ok": manifest["ok"] - 1}))
    assert not shards.is_done(run, plan.shards[0])
    with pytest.raises(AssertionError, match="22 of 23 conversations accounted for"):
        Tally(tmp_path, plan).complete()
    with Progress(run, plan):  # nothing is wrong yet: the shard is made again
        make(plan, run, prompts)
    assert Tally(tmp_path, plan).complete()["shards_done"] == 5
    path.unlink()
    assert Tally(tmp_path, plan).summary()["shards_done"] == 4
    assert "(more shards are open)" in "\n".join(describe(Tally(tmp_path, plan).summary()))


def test_a_run_in_which_no_shard_is_finished_for_long_says_so(tmp_path: Path) -> None:
    plan, run, _ = setup(tmp_path)
    progress = Progress(run, plan)
    assert progress.trouble(0, STALL_S - 1) is None
    assert progress.trouble(0, STALL_S) == "no shard was finished for 30 min 00 s: an engine may hang"
    assert progress.trouble(1, STALL_S + 60) is None and progress.trouble(1, 2 * STALL_S) is None
    assert progress.trouble(1, 2 * STALL_S + 60)


def test_percentiles() -> None:
    values = list(range(1, 101))
    assert percentile(Counter(values), 0.5) == 50 and percentile(Counter(values), 0.99) == 99
    assert percentile(Counter([7]), 0.5) == percentile(Counter([7]), 0.99) == 7 and percentile(Counter(), 0.5) is None
