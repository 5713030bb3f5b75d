"""An actor never waits between shards, and one whose engine dies costs what it held and takes nobody else with it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fake_generator import ReplayGenerator, conversation, conversations
from lilicorr.config import PipelineConfig, RegenerateConfig
from lilicorr.generator import DialogueSettings, regenerate_groups
from lilicorr.prompts import write_conversations
from lilicorr.tiny import byte_tokenizer
from pipelines import regenerate, shards
from pipelines.regenerate import GeneratorActor, Work
from pipelines.shard_queue import ShardQueue
from test_shards import content

SETTINGS = DialogueSettings({}, max_new_tokens=12)


def test_a_worker_that_starts_again_finds_what_it_held_first() -> None:
    queue = ShardQueue(5)
    queue.start(0)
    queue.start(1)
    assert [queue.take(0), queue.take(1), queue.take(0)] == [0, 1, 2]
    queue.finish(0, 0)
    queue.start(0)
    assert [queue.take(1), queue.take(1), queue.take(0), queue.take(0)] == [2, 3, 4, None]
    queue.finish(0, 99)  # a shard that was given to another worker in between
    queue.start(1)
    assert [queue.take(1) for _ in range(4)] == [1, 2, 3, None]


def test_groups_overlap_and_each_is_yielded_whole() -> None:
    asked = [conversation(f"question {i}") for i in range(40)]
    slow = asked[3].messages[0]["content"].encode()
    generator = ReplayGenerator(polls=lambda ids: 20 if slow in bytes(i for i in ids if i < 256) else 1)
    open_at: list[int] = []
    poll = generator.poll
    generator.poll = lambda: open_at.append(len(generator.open)) or poll()
    groups = ((start // 8, asked[start : start + 8]) for start in range(0, 40, 8))
    done = list(regenerate_groups(groups, byte_tokenizer(), generator, SETTINGS))
    assert sorted(key for key, _ in done) == [0, 1, 2, 3, 4] and [key for key, _ in done].index(0) > 0
    for key, results in done:
        assert {r.conversation.cid for r in results} == {c.cid for c in asked[8 * key : 8 * key + 8]}
    assert set(open_at[:-4]) == {generator.max_in_flight}  # full to the end of the last group


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """22 conversations in six shards, two attempts each."""
    prompts = tmp_path / "prompts.parquet"
    write_conversations(prompts, conversations(22))
    plan, run = shards.open_plan(tmp_path, prompts, 4), shards.open_run(tmp_path, "replay 1", {})
    settings = RegenerateConfig(engine="transformers", max_new_tokens=12, shard_size=4, max_attempts=2)
    (tmp_path / "attempts").mkdir()
    config = PipelineConfig(regenerate=settings)
    return Work(
        config, run, prompts, plan.shards, tmp_path / "attempts", lambda _: (byte_tokenizer(), ReplayGenerator())
    )


def attempts(work: Work) -> list[int]:
    return [shards.read_manifest(work.run.folder, shard)["attempt"] for shard in work.shards]


def test_one_worker_makes_everything_that_is_not_done(work: Work) -> None:
    GeneratorActor(work).make(work.shards[2])
    stamp = shards.data_path(work.run.folder, work.shards[2]).stat().st_mtime_ns
    actor = GeneratorActor(work, ShardQueue(6))
    actor.work_off(0)
    assert set(content(work.run.folder)) == {c.cid for c in conversations(22)} and attempts(work) == [1] * 6
    assert shards.data_path(work.run.folder, work.shards[2]).stat().st_mtime_ns == stamp
    assert not actor.begun and actor.queue.held == {0: set()}


class Poisoned(ReplayGenerator):
    """Fails at the second turn of one conversation."""

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        if b"question 5.1" in bytes(i for i in prompt_ids if i < 256):
            raise MemoryError("out of memory")
        super().submit(key, prompt_ids, max_new_tokens)


def test_an_engine_that_dies_takes_no_other_shard_with_it(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []

    def die(code: int) -> None:
        exits.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", die)
    poisoned = replace(work, make_generator=lambda _: (byte_tokenizer(), Poisoned()))
    queue = ShardQueue(6)
    for _ in range(9):
        try:
            GeneratorActor(poisoned, queue).work_off(0)
        except SystemExit:
            continue
        break
    assert exits == [1, 1]
    found = content(work.run.folder)
    dead = {cid: letter for cid, letter in found.items() if isinstance(letter, tuple)}
    shard = next(s for s in work.shards if {c.cid for c in shards.read_shard(work.prompts, s)} & dead.keys())
    assert dead.keys() == {c.cid for c in shards.read_shard(work.prompts, shard)}
    assert {letter[:2] for letter in dead.values()} == {("EngineDied", "2 attempts: MemoryError: out of memory")}
    assert found.keys() == {c.cid for c in conversations(22)} and set(attempts(work)) == {1, 2}


def test_the_driver_gives_every_worker_its_own_number() -> None:
    """What `run_on_ray` relies on: a call is one worker's whole run."""
    seen: list[int] = []

    class Recorded(GeneratorActor):
        def __init__(self) -> None:
            pass

        def work_off(self, worker: int) -> None:
            seen.append(worker)

    assert Recorded()({"worker": regenerate.np.array([3])})["done"].tolist() == [3] and seen == [3]
