"""An actor never waits between shards, and one whose engine dies costs what it held and takes nobody else with it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fake_generator import ReplayGenerator, conversation, conversations
from lilicorr.config import PipelineConfig, RegenerateConfig
from lilicorr.generator import DialogueSettings, regenerate_conversations, regenerate_groups
from lilicorr.prompts import write_conversations
from lilicorr.tiny import byte_tokenizer
from pipelines import regenerate, shards
from pipelines.attempts import begin
from pipelines.regenerate import GeneratorActor, Work
from pipelines.shard_queue import ShardQueue
from test_shards import content

SETTINGS = DialogueSettings({}, max_new_tokens=12)


NOBODY: frozenset[int] = frozenset()


def test_a_worker_that_starts_again_finds_what_it_held_first() -> None:
    queue = ShardQueue(5)
    queue.start(0)
    queue.start(1)
    assert [queue.take(0), queue.take(1), queue.take(0)] == [(0, NOBODY), (1, NOBODY), (2, NOBODY)]
    queue.finish(0)
    queue.start(0)
    assert [queue.take(1), queue.take(1), queue.take(0)] == [(2, NOBODY), (3, NOBODY), (4, NOBODY)]
    assert queue.take(0) is None  # it has one of its own
    queue.start(1)
    assert [queue.take(1)[0] for _ in range(3)] == [1, 2, 3] and queue.take(1) is None


def test_a_worker_without_work_makes_the_oldest_shard_of_the_others_again() -> None:
    queue = ShardQueue(3)
    assert [queue.take(worker) for worker in (0, 0, 1)] == [(0, NOBODY), (1, NOBODY), (2, NOBODY)]
    assert queue.take(1) is None
    assert queue.claim(1, 2)
    queue.finish(2)
    assert queue.take(1) == (0, frozenset({0})) and queue.take(1) is None
    assert queue.take(2) == (1, frozenset({0}))  # nobody else makes it again
    queue.start(1)  # what another still holds is not waiting
    assert not queue.waiting and queue.take(1) == (0, frozenset({0}))
    assert queue.claim(1, 0) and not queue.claim(0, 0)
    queue.finish(0)
    assert not queue.claim(0, 0) and queue.claim(2, 1)
    queue.finish(1)
    assert [queue.take(worker) for worker in range(3)] == [None] * 3 and not queue.held and not queue.claims


def test_a_claim_ends_with_its_worker_or_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = ShardQueue(2)
    assert [queue.take(worker)[0] for worker in (0, 1, 2)] == [0, 1, 0]
    assert queue.claim(0, 0) and not queue.claim(2, 0)
    assert queue.take(2) == (1, frozenset({1}))  # rather than the one that is being written
    queue.finish(1)
    assert queue.take(2) == (0, frozenset({0}))
    queue.start(0)
    assert queue.claim(2, 0) and queue.take(0) == (0, frozenset({2})) and not queue.claim(0, 0)
    monkeypatch.setattr("pipelines.shard_queue.CLAIM_S", 0.0)
    assert queue.take(0) == (0, frozenset({2})) and queue.claim(0, 0)


def test_what_attempts_leave(tmp_path: Path) -> None:
    folder = tmp_path / "shard"
    first = begin(folder, 3, NOBODY)
    assert (first.number, first.deaths, first.suspects) == (1, 0, None)
    first.note("error", "out of\nmemory")
    second = begin(folder, 3, NOBODY)
    assert (second.number, second.deaths, second.error, second.suspects) == (2, 1, "out of memory", None)
    for what, cid in (("begun", "a"), ("begun", "b"), ("done", "a"), ("begun", "c")):
        second.note(what, cid)
    beside = begin(folder, 4, frozenset({3}))  # a worker that goes on has not died
    assert (beside.number, beside.deaths, beside.suspects) == (3, 1, None)
    third = begin(folder, 3, frozenset({4}))
    assert (third.number, third.deaths, third.suspects, third.guilty) == (4, 2, {"b", "c"}, set())
    for what, cid in (("begun", "a"), ("done", "a"), ("alone", "b"), ("done", "b"), ("alone", "c")):
        third.note(what, cid)
    fourth = begin(folder, 3, NOBODY)
    assert (fourth.number, fourth.deaths, fourth.suspects, fourth.guilty) == (5, 4, {"b", "c"}, {"c"})


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
    results = regenerate_conversations(
        shards.read_shard(work.prompts, work.shards[2]), byte_tokenizer(), ReplayGenerator(), SETTINGS
    )
    shards.commit(work.run, work.shards[2], results, attempt=1, seconds=1.0)
    stamp = shards.data_path(work.run.folder, work.shards[2]).stat().st_mtime_ns
    actor = GeneratorActor(work, ShardQueue(6))
    actor.work_off(0)
    assert set(content(work.run.folder)) == {c.cid for c in conversations(22)} and attempts(work) == [1] * 6
    assert shards.data_path(work.run.folder, work.shards[2]).stat().st_mtime_ns == stamp
    assert not actor.begun and not actor.queue.held and not actor.queue.waiting


def test_a_hanging_worker_and_a_lost_one_are_not_waited_for(work: Work) -> None:
    """Their shards are made again, which is no death: even the second copy is made as a whole and in one attempt."""
    alone = replace(work, config=replace(work.config, regenerate=replace(work.config.regenerate, max_attempts=1)))
    queue = ShardQueue(6)
    for worker in (0, 1):
        queue.start(worker)
        number, _ = queue.take(worker)
        begin(work.attempts / work.shards[number].id, worker, NOBODY)
    late = GeneratorActor(alone, queue)
    late.begun[0] = begin(work.attempts / work.shards[0].id, 0, NOBODY), 0.0
    GeneratorActor(alone, queue).work_off(2)
    found = content(work.run.folder)
    assert set(found) == {c.cid for c in conversations(22)} and not any(isinstance(x, tuple) for x in found.values())
    stamp = shards.data_path(work.run.folder, work.shards[0]).stat().st_mtime_ns
    late._commit(0, 0, [])  # it comes back, and is not asked for its results
    assert shards.data_path(work.run.folder, work.shards[0]).stat().st_mtime_ns == stamp


class Poisoned(ReplayGenerator):
    """Fails at the second turn of some conversations, or always."""

    def __init__(self, *texts: bytes) -> None:
        super().__init__()
        self.texts = texts

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        if any(text in bytes(i for i in prompt_ids if i < 256) for text in self.texts):
            raise MemoryError("out of memory")
        super().submit(key, prompt_ids, max_new_tokens)


def work_off(work: Work, monkeypatch: pytest.MonkeyPatch, *texts: bytes) -> int:
    """Everything by one worker, again and again until it does not die; returns how often it did."""

    def die(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", die)
    poisoned = replace(work, make_generator=lambda _: (byte_tokenizer(), Poisoned(*texts)))
    queue = ShardQueue(len(work.shards))
    for deaths in range(20):
        try:
            GeneratorActor(poisoned, queue).work_off(0)
        except SystemExit:
            continue
        return deaths
    raise AssertionError("it dies for ever")


def dead_letters(work: Work) -> dict[str, tuple]:
    return {cid: letter for cid, letter in content(work.run.folder).items() if isinstance(letter, tuple)}


def test_a_conversation_that_kills_its_engine_is_dead_alone(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    assert work_off(work, monkeypatch, b"question 5.1") == 3  # twice together, then by itself
    guilty = next(c.cid for c in conversations(22) if c.messages[0]["content"] == "question 5.0")
    assert {cid: letter[:2] for cid, letter in dead_letters(work).items()} == {
        guilty: ("KilledEngine", "3 attempts: MemoryError: out of memory")
    }
    assert content(work.run.folder).keys() == {c.cid for c in conversations(22)}
    assert sorted(attempts(work))[-1] == 4 and set(attempts(work)[:-1]) <= {1, 2, 4}
    assert shards.reopen(work.run, shards.read_plan(work.run.folder)) == 0


def test_an_engine_that_always_dies_is_given_up_with_its_shard(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = shards.read_shard(work.prompts, work.shards[2])
    texts = [c.messages[0]["content"].encode() for c in asked]
    assert work_off(work, monkeypatch, *texts) == 5  # twice together, thrice one by one
    letters = dead_letters(work)
    assert letters.keys() == {c.cid for c in asked} and len(asked) == 4
    assert {letter[:2] for letter in letters.values()} == {("EngineDied", "5 attempts: MemoryError: out of memory")}
    assert shards.reopen(work.run, shards.read_plan(work.run.folder)) == 1


def test_the_driver_gives_every_worker_its_own_number() -> None:
    """What `run_on_ray` relies on: a call is one worker's whole run."""
    seen: list[int] = []

    class Recorded(GeneratorActor):
        def __init__(self) -> None:
            pass

        def work_off(self, worker: int) -> None:
            seen.append(worker)

    assert Recorded()({"worker": regenerate.np.array([3])})["done"].tolist() == [3] and seen == [3]
