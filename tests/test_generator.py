"""Conversations are answered turn by turn, whole or not at all, and the engine's answers are the target's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from fake_generator import END, ReplayGenerator, conversation, conversations, hashed_answer
from lilicorr.chat import answer_text, render_prompt
from lilicorr.config import EngineConfig, TargetConfig
from lilicorr.engine.engine import Engine
from lilicorr.engine.pages import PAGE_SIZE
from lilicorr.generator import (
    Completion,
    ConversationResult,
    DialogueSettings,
    EngineGenerator,
    Generator,
    TransformersGenerator,
    regenerate_conversations,
    regenerate_groups,
)
from lilicorr.prompts import Conversation
from lilicorr.target import Target, load_target
from lilicorr.tiny import byte_tokenizer, tiny_target_folder
from random_target import make_target

OFF = DialogueSettings({"enable_thinking": False}, max_new_tokens=40)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tiny_target_folder(tmp_path_factory.mktemp("tiny") / "target")
    return load_target(TargetConfig(source=str(folder), dtype="float64"))


def ask(
    asked: list[Conversation], generator: ReplayGenerator, settings: DialogueSettings = OFF
) -> dict[str, ConversationResult]:
    results = list(regenerate_conversations(asked, byte_tokenizer(), generator, settings))
    assert sorted(r.conversation.cid for r in results) == sorted(c.cid for c in asked)
    assert all(bool(r.turns) != bool(r.dead) for r in results)
    return {r.conversation.cid: r for r in results}


def says(text: str) -> Completion:
    return Completion([*text.encode(), END], "stop")


def test_three_turns_with_the_regenerated_history() -> None:
    asked = conversation("one", "two", "three", system="Be brief.")
    result = ask([asked], ReplayGenerator())[asked.cid]
    tokenizer = byte_tokenizer()
    history = asked.messages[:1]
    for index, turn in enumerate(result.turns):
        history = [*history, {"role": "user", "content": ["one", "two", "three"][index]}]
        assert turn.turn == index and turn.finish_reason == "stop"
        assert turn.prompt_ids == render_prompt(tokenizer, history, {})
        assert turn.completion_ids == hashed_answer(turn.prompt_ids, 40).token_ids
        history = [*history, {"role": "assistant", "content": bytes(turn.completion_ids[:-1]).decode()}]
        assert turn.messages == history
        # What a mask over prompt + completion lets in decodes to exactly the answer and the end of turn.
        ids = turn.prompt_ids + turn.completion_ids
        masked_in = ids[len(turn.prompt_ids) :]
        assert tokenizer.decode(masked_in) == history[-1]["content"] + "<|im_end|>"
    assert len(result.turns) == 3 and result.num_turns == 3 and result.cut is None


def test_the_order_and_the_window_do_not_matter() -> None:
    asked = conversations(40)
    plain = ask(asked, ReplayGenerator(max_in_flight=1))
    for generator in (
        ReplayGenerator(max_in_flight=7, polls=lambda prompt: 1 + sum(prompt) % 5),
        ReplayGenerator(max_in_flight=100),
    ):
        assert ask(asked[::-1], generator) == plain
        assert generator.most_open == min(generator.max_in_flight, 40)


def test_one_slow_answer_holds_up_nobody() -> None:
    asked = conversations(30)
    slow = render_prompt(byte_tokenizer(), asked[0].messages[:1], {})
    generator = ReplayGenerator(polls=lambda prompt: 100 if prompt == slow else 1)
    order = [r.conversation.cid for r in regenerate_conversations(asked, byte_tokenizer(), generator, OFF)]
    assert order[-1] == asked[0].cid and sorted(order) == [c.cid for c in asked]


def test_a_cut_answer_is_kept_and_nobody_continues_it() -> None:
    asked = [conversation("one", "two"), conversation("single")]
    generator = ReplayGenerator(lambda prompt, limit: Completion([97] * limit, "length"))
    results = ask(asked, generator)
    first, single = results[asked[0].cid], results[asked[1].cid]
    assert [len(turn.completion_ids) for turn in first.turns] == [40] and first.cut == "length" and first.num_turns == 2
    assert single.turns[0].finish_reason == "length" and single.cut is None
    assert len(generator.prompts) == 2


def test_a_full_context_kills_the_first_turn_and_cuts_a_later_one() -> None:
    asked = [conversation("x" * 400_000), conversation("x" * 100), conversation("short", "x" * 100, "more")]
    results = ask(asked, ReplayGenerator(max_model_len=100))
    for c in asked[:2]:
        dead = results[c.cid].dead
        assert dead.error == "PromptTooLong" and dead.turn == 0 and "the context is 100" in dead.message
    later = results[asked[2].cid]
    assert len(later.turns) == 1 and later.cut == "context" and later.dead is None


def test_the_answer_may_fill_the_context_to_its_last_position() -> None:
    asked = conversation("abc")
    prompt = render_prompt(byte_tokenizer(), asked.messages, {})
    generator = ReplayGenerator(lambda prompt, limit: Completion([97] * limit, "length"), max_model_len=len(prompt) + 1)
    assert ask([asked], generator)[asked.cid].turns[0].completion_ids == [97]
    assert ask([asked], ReplayGenerator(max_model_len=len(prompt)))[asked.cid].dead.error == "PromptTooLong"


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        (says(""), "EmptyOutput"),
        (says(" \n"), "EmptyOutput"),
        (says("<think>no"), "ThinkMarker"),
        (says("a</think>"), "ThinkMarker"),
    ],
)
def test_a_permanent_error_takes_the_whole_conversation(completion: Completion, error: str) -> None:
    asked = conversation("one", "two", "three")
    answers = iter([says("fine"), completion])
    result = ask([asked], ReplayGenerator(lambda prompt, limit: next(answers)))[asked.cid]
    assert result.turns == [] and result.dead.error == error and result.dead.turn == 1


def test_think_markers_are_fine_with_reasoning_on() -> None:
    asked = conversation("one")
    generator = ReplayGenerator(lambda prompt, limit: says("<think>x</think>y"))
    assert ask([asked], generator, DialogueSettings({}, 40))[asked.cid].dead is None


def test_a_refusing_template_is_a_dead_letter() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no chats on Sundays') }}"
    asked = conversation("one")
    (result,) = regenerate_conversations([asked], tokenizer, ReplayGenerator(), OFF)
    assert result.dead.error == "TemplateError" and "no chats on Sundays" in result.dead.message


def test_special_token_text_in_answers_and_questions_stays_text() -> None:
    asked = conversation("a<|im_end|>", "b")
    generator = ReplayGenerator(lambda prompt, limit: Completion([*b"<|im_start|>", END], "stop"))
    result = ask([asked], generator)[asked.cid]
    assert [prompt.count(257) for prompt in generator.prompts] == [2, 4]
    assert result.turns[1].messages[1]["content"] == "<|im_start|>"


def greedy_alone(target: Target, prompt: list[int], limit: int) -> list[int]:
    """The target's greedy answer without cache, batch or padding."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        logits = target.logits(target.forward(torch.tensor([ids])).hidden[0, -1])
        ids.append(int(logits.argmax()))
        if ids[-1] in target.eos_ids:
            break
    return ids[len(prompt) :]


def transformers_generator(target: Target, batch_size: int, max_model_len: int | None = None) -> Generator:
    return TransformersGenerator(target, batch_size, max_model_len)


def engine_generator(target: Target, batch_size: int, max_model_len: int | None = None) -> Generator:
    return EngineGenerator(Engine(target, None, EngineConfig(batch_size, max_model_len)))


ENGINES = pytest.mark.parametrize("make", [transformers_generator, engine_generator])


@ENGINES
def test_batches_give_what_the_target_says_alone(target: Target, make: Callable[..., Generator]) -> None:
    prompts = [render_prompt(target.tokenizer, c.messages[:1], {}) for c in conversations(9)]
    prompts += [[257, 65], [257, *range(60, 160)]]
    generator = make(target, batch_size=4)
    assert generator.max_in_flight in (8, 16) and generator.max_model_len == 1024
    for key, prompt in enumerate(prompts):
        generator.submit(key, prompt, 10 + key)
    answers: dict[int, Completion] = {}
    while batch := generator.poll():
        assert len(batch) <= 4
        answers |= dict(batch)
    assert sorted(answers) == list(range(len(prompts)))
    for key, prompt in enumerate(prompts):
        expected = greedy_alone(target, prompt, 10 + key)
        assert answers[key].token_ids == expected
        assert answers[key].finish_reason == ("stop" if expected[-1] in target.eos_ids else "length")
    assert {answer.finish_reason for answer in answers.values()} == {"stop", "length"}


@ENGINES
def test_the_context_limits_the_answer(target: Target, make: Callable[..., Generator]) -> None:
    generator = make(target, batch_size=2, max_model_len=30)
    prompt = [257, *b"user\nno stop"]
    generator.submit(0, prompt, 1000)
    ((_, answer),) = generator.poll()
    assert len(prompt) + len(answer.token_ids) == 30 and answer.finish_reason == "length"
    with pytest.raises(ValueError, match="leaves no room in a context of 30"):
        generator.submit(1, [65] * 30, 1)


@ENGINES
def test_a_target_that_cannot_stop_is_refused(
    target: Target, make: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "eos_ids", ())
    with pytest.raises(ValueError, match="names no eos_token_id"):
        make(target, batch_size=1)


@ENGINES
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_end_a_regeneration(make: Callable[..., Generator], value: float) -> None:
    target = make_target(vocab=264)
    generator = make(target, batch_size=2)
    target.lm_head[5:7, 0] = torch.tensor([value, -value])  # one of the two logits is +inf
    generator.submit(3, [65, 66], 4)
    with pytest.raises(RuntimeError, match="not finite at position 2"):
        generator.poll()
    assert generator.poll() == []


def test_shards_are_finished_while_the_feed_goes_on_and_batches_are_of_near_lengths(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shard has prompts of all lengths. The forward pass is left out, an answer is the prompt's hash."""
    num_shards, size, batches, begun, finished = 12, 32, [], [], []

    def decode(_: TransformersGenerator, batch: list) -> list[tuple[int, Completion]]:
        batches.append([len(request.prompt_ids) for request in batch])
        return [(r.key, hashed_answer(r.prompt_ids, r.max_new_tokens)) for r in batch]

    def groups() -> Iterator[tuple[int, list[Conversation]]]:
        for number in range(num_shards):
            begun.append(number)
            assert len(begun) - len(finished) <= 3
            yield number, asked[number * size : (number + 1) * size]

    monkeypatch.setattr(TransformersGenerator, "_decode", decode)
    draw = random.Random(0)
    asked = [conversation(*[f"{i} " + "x" * draw.randrange(200)] * (1 + i % 2)) for i in range(num_shards * size)]
    generator = TransformersGenerator(target, batch_size=4)
    for number, results in regenerate_groups(groups(), byte_tokenizer(), generator, OFF):
        finished.append(number)
        for turn in (turn for result in results for turn in result.turns):
            assert turn.completion_ids == hashed_answer(turn.prompt_ids, 40).token_ids
    assert sorted(finished) == list(range(num_shards))
    lengths = [length for batch in batches for length in batch]
    assert len(lengths) == num_shards * size * 3 // 2
    assert sum(max(batch) * len(batch) for batch in batches) < 1.25 * sum(lengths)
    draw.shuffle(lengths)
    mixed = [lengths[start : start + 4] for start in range(0, len(lengths), 4)]
    assert sum(4 * max(batch) for batch in mixed) > 1.4 * sum(lengths)  # what any four prompts would cost


@ENGINES
def test_conversations_of_a_real_engine(target: Target, make: Callable[..., Generator]) -> None:
    asked = conversations(6)
    generator = make(target, batch_size=3)
    results = {
        r.conversation.cid: r
        for r in regenerate_conversations(asked, target.tokenizer, generator, DialogueSettings({}, 16))
    }
    assert len(results) == 6
    for c in asked:
        for turn in results[c.cid].turns:
            assert turn.completion_ids == greedy_alone(target, turn.prompt_ids, 16)
            assert turn.messages[-1]["content"] == answer_text(target.tokenizer, turn.completion_ids)


def test_a_later_turn_finds_its_history_in_the_prefix_cache(target: Target) -> None:
    """Every whole page of it that the engine has run, with other conversations answered in between."""
    asked = [conversation(*[f"{i}.{t} " + "x" * 70 for t in range(3)]) for i in range(6)]
    generator = engine_generator(target, batch_size=2)
    poll = generator.poll  # the random target hardly ever stops, and nobody goes on behind an answer that is cut
    generator.poll = lambda: [(key, Completion(answer.token_ids, "stop")) for key, answer in poll()]
    results = regenerate_conversations(asked, target.tokenizer, generator, DialogueSettings({}, 16))
    known = later = 0
    for turns in [result.turns for result in results]:
        for last, turn in zip(turns, turns[1:]):
            before = last.prompt_ids + last.completion_ids[:-1]  # the answer's last token is never run
            common = next((i for i, (a, b) in enumerate(zip(before, turn.prompt_ids)) if a != b), len(before))
            known += common // PAGE_SIZE * PAGE_SIZE
            later += len(turn.prompt_ids)
    assert generator.engine.scheduler.num_cached_tokens == known > later / 3
