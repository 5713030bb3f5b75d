"""Regeneration without a cluster: the Generator protocol, two engines behind it, the conversation driver.

Place in the flow: `pipelines/regenerate.py` gives every actor one generator and runs the conversations of a
shard through `regenerate_conversations`. The target answers every user turn greedily, its own answers being
the history of the next turn (paper, section 4.1). Tokens are kept as the engine made them.

A conversation ends in one of three ways, and is never half of one:
    all turns answered;
    cut: a turn reached the length limit (kept: all its tokens are the target's, but nobody continues a cut
        answer), or the next prompt fills the context; the turns so far count, the rest is counted as skipped;
    dead: the first prompt is too long, the template refuses it, an answer is empty or holds a think marker
        although reasoning is off; no turn of it is kept, and the reason is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lilicorr.chat import ChatError, answer_text, render_prompt
from lilicorr.decode import SamplingParams
from lilicorr.engine.engine import Engine
from lilicorr.engine.request import Request
from lilicorr.prompts import Conversation
from lilicorr.target import Target, TargetCache

THINK_MARKERS = ("<think>", "</think>")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Completion:
    """One greedy answer as the engine made it; the stop token is its last id if it stopped."""

    token_ids: list[int]
    finish_reason: str  # stop | length


class Generator(Protocol):
    """An engine that continues token prompts greedily, many at a time."""

    name: str
    max_model_len: int  # prompt and answer together
    max_in_flight: int  # how many requests are worth having open at once

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Queue a prompt under a key of the caller's; the answer also ends where `max_model_len` is reached."""

    def poll(self) -> list[tuple[int, Completion]]:
        """Work until at least one queued request is finished; return what is, by key."""


@dataclass(frozen=True)
class TurnRecord:
    """One regenerated answer and what the target saw before it."""

    turn: int
    messages: list[dict[str, str]]  # the regenerated history up to and with this answer
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class DeadRecord:
    """Why a conversation has no answer."""

    turn: int
    error: str  # a class: PromptTooLong, TemplateError, EmptyOutput, ThinkMarker, KilledEngine, EngineDied
    message: str


@dataclass(frozen=True)
class ConversationResult:
    """Everything that became of one conversation; `turns` is empty exactly if `dead` is not None."""

    conversation: Conversation
    turns: list[TurnRecord]
    dead: DeadRecord | None = None
    cut: str | None = None  # length | context, where not every turn was answered

    @property
    def num_turns(self) -> int:
        """User turns of the conversation, answered or not."""
        return sum(message["role"] == "user" for message in self.conversation.messages)


@dataclass(frozen=True)
class DialogueSettings:
    """How conversations are rendered and how far answers go."""

    template_kwargs: dict[str, Any]
    max_new_tokens: int

    @property
    def reasoning_off(self) -> bool:
        """Whether a think marker in an answer is an error."""
        return self.template_kwargs.get("enable_thinking") is False


def regenerate_conversations(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    generator: Generator,
    settings: DialogueSettings,
) -> Iterator[ConversationResult]:
    """Answer every turn of every conversation; results come in the order in which they are finished.

    The generator always has `max_in_flight` requests open while there are conversations left: a finished
    turn is followed at once by the next one, so a slow answer holds up nobody else.
    """
    waiting = iter(enumerate(conversations))
    dialogues: dict[int, _Dialogue] = {}
    while True:
        while len(dialogues) < generator.max_in_flight and (entry := next(waiting, None)):
            key, conversation = entry
            dialogue = _Dialogue(conversation, tokenizer, settings)
            if dialogue.submit_next(key, generator):
                dialogues[key] = dialogue
            else:
                yield dialogue.result()
        if not dialogues:
            return
        for key, completion in generator.poll():
            dialogue = dialogues[key]
            if not (dialogue.accept(completion) and dialogue.submit_next(key, generator)):
                del dialogues[key]
                yield dialogue.result()


def regenerate_groups(
    groups: Iterable[tuple[Key, Sequence[Conversation]]],
    tokenizer: PreTrainedTokenizerBase,
    generator: Generator,
    settings: DialogueSettings,
) -> Iterator[tuple[Key, list[ConversationResult]]]:
    """Answer groups of conversations, each group's results as one when its last conversation is finished.

    The next group begins as soon as the one before it leaves a request's place free: no group waits for another's
    last answer, and an end of `groups` is the only time at which the generator runs empty. A content id may be in
    one open group only; a group must not be empty.
    """
    owners: dict[str, Key] = {}  # of open conversations
    left: dict[Key, int] = {}
    done: dict[Key, list[ConversationResult]] = {}

    def feed() -> Iterator[Conversation]:
        for key, conversations in groups:
            left[key], done[key] = len(conversations), []
            for conversation in conversations:
                assert conversation.cid not in owners, f"conversation {conversation.cid} is in two open groups"
                owners[conversation.cid] = key
                yield conversation

    for result in regenerate_conversations(feed(), tokenizer, generator, settings):
        key = owners.pop(result.conversation.cid)
        done[key].append(result)
        left[key] -= 1
        if not left[key]:
            del left[key]
            yield key, done.pop(key)


class _Dialogue:
    """One conversation on its way: the history so far, and how it ended."""

    def __init__(
        self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase, settings: DialogueSettings
    ) -> None:
        self.conversation = conversation
        self.tokenizer = tokenizer
        self.settings = settings
        self.questions = list(conversation.messages)  # turns not yet in the history
        self.history: list[dict[str, str]] = []
        self.turns: list[TurnRecord] = []
        self.prompt_ids: list[int] = []
        self.dead: DeadRecord | None = None
        self.cut: str | None = None

    def result(self) -> ConversationResult:
        """The outcome; an error takes earlier turns with it."""
        return ConversationResult(self.conversation, [] if self.dead else self.turns, self.dead, self.cut)

    def submit_next(self, key: int, generator: Generator) -> bool:
        """Queue the next user turn; false where there is none or it cannot be asked."""
        if not self.questions:
            return False
        end = next(index for index, message in enumerate(self.questions) if message["role"] == "user") + 1
        self.history += self.questions[:end]
        del self.questions[:end]
        try:
            self.prompt_ids = render_prompt(self.tokenizer, self.history, self.settings.template_kwargs)
        except ChatError as error:
            return self._die("TemplateError", str(error))
        if len(self.prompt_ids) >= generator.max_model_len:
            if self.turns:
                self.cut = "context"
                return False
            return self._die(
                "PromptTooLong", f"{len(self.prompt_ids)} tokens, the context is {generator.max_model_len}"
            )
        generator.submit(key, self.prompt_ids, self.settings.max_new_tokens)
        return True

    def accept(self, completion: Completion) -> bool:
        """Add an answer to the history; false where the conversation ends with it."""
        assert completion.finish_reason in ("stop", "length"), completion.finish_reason
        text = answer_text(self.tokenizer, completion.token_ids)
        if completion.finish_reason == "stop" and not text.strip():
            return self._die("EmptyOutput", f"{len(completion.token_ids)} tokens: {completion.token_ids[:8]}")
        marker = next((marker for marker in THINK_MARKERS if marker in text), None)
        if marker and self.settings.reasoning_off:
            return self._die("ThinkMarker", f"{marker} at character {text.index(marker)} of the answer")
        self.history.append({"role": "assistant", "content": text})
        self.turns.append(
            TurnRecord(
                len(self.turns), list(self.history), self.prompt_ids, completion.token_ids, completion.finish_reason
            )
        )
        if completion.finish_reason == "length":
            self.cut = "length" if self.questions else None
            return False
        return True

    def _die(self, error: str, message: str) -> bool:
        self.dead = DeadRecord(len(self.turns), error, message)
        return False


@dataclass(frozen=True)
class _Request:
    key: int
    prompt_ids: list[int]
    max_new_tokens: int


def _check_stops(target: Target) -> None:
    """Raise ValueError for a target whose answers nothing would end."""
    if not target.eos_ids:
        raise ValueError("the target's generation config names no eos_token_id: its answers would never stop")


def _limit(prompt_ids: list[int], max_new_tokens: int, max_model_len: int) -> int:
    """Tokens that the answer may have; raises ValueError for a prompt that leaves none."""
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {max_model_len}")
    return min(max_new_tokens, room)


class EngineGenerator:
    """Greedy decoding through the paged engine: a row that is finished takes up the next prompt at once."""

    name = "engine"

    def __init__(self, engine: Engine) -> None:
        """The engine, with or without a draft model, must have no other user."""
        _check_stops(engine.target)
        self.engine = engine
        self.max_model_len = engine.max_model_len
        self.max_in_flight = 2 * engine.config.max_running  # as many wait as run
        self._answers: dict[str, list[int]] = {}  # of open requests, so far

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Queue a prompt; see Generator."""
        limit = _limit(prompt_ids, max_new_tokens, self.max_model_len)
        params = SamplingParams(limit, stop_ids=self.engine.target.eos_ids)
        self.engine.submit(Request(str(key), prompt_ids, params))
        self._answers[str(key)] = []

    def poll(self) -> list[tuple[int, Completion]]:
        """Step until an answer is whole; see Generator. RuntimeError where the target's logits are not finite."""
        done: list[tuple[int, Completion]] = []
        while self._answers and not done:
            for chunk in self.engine.step():
                if chunk.error is not None:
                    del self._answers[chunk.request_id]
                    raise RuntimeError(f"request {chunk.request_id}: {chunk.error}")
                self._answers[chunk.request_id] += chunk.token_ids
                if chunk.finish_reason is not None:
                    token_ids = self._answers.pop(chunk.request_id)
                    done.append((int(chunk.request_id), Completion(token_ids, chunk.finish_reason)))
        return done


class TransformersGenerator:
    """Greedy decoding with the transformers model in static batches, for CPUs and for targets without vLLM.

    The queued prompts are taken a window at a time, the longest first, so that those of a batch are of similar
    length, and padded on the left; rows that are finished leave a batch as soon as they are half of it. What comes
    meanwhile waits for the next window: a prompt is overtaken by six batches at the most, whatever its length, so no
    conversation stays open for long and shards are finished one after the other.
    """

    name = "transformers"

    def __init__(self, target: Target, batch_size: int, max_model_len: int | None = None) -> None:
        _check_stops(target)
        self.target = target
        self.batch_size = batch_size
        self.max_model_len = min(max_model_len or target.max_length, target.max_length)
        self.max_in_flight = 4 * batch_size  # a window: enough to find prompts of similar length
        self._queue: list[_Request] = []  # for the next window
        self._window: list[_Request] = []  # by falling length
        self._stops = torch.tensor(target.eos_ids, device=target.device)

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Queue a prompt; see Generator."""
        limit = _limit(prompt_ids, max_new_tokens, self.max_model_len)
        self._queue.append(_Request(key, prompt_ids, limit))

    def poll(self) -> list[tuple[int, Completion]]:
        """Answer the next batch; see Generator. Raises RuntimeError for a target whose logits are not finite."""
        if not self._window:
            self._window = sorted(self._queue, key=lambda request: -len(request.prompt_ids))
            self._queue = []
        batch = self._window[: self.batch_size]
        del self._window[: self.batch_size]
        return self._decode(batch) if batch else []

    @torch.inference_mode()
    def _decode(self, batch: list[_Request]) -> list[tuple[int, Completion]]:
        ids, seen = self._left_padded(batch)
        limits = torch.tensor([request.max_new_tokens for request in batch], device=ids.device)
        width, longest = ids.shape[1], int(limits.max())
        seen = torch.cat([seen, seen.new_ones(len(batch), longest)], dim=1)
        positions = (seen[:, :width].cumsum(1) - 1).clamp(min=0)
        cache = self.target.new_cache(width + longest)
        rows = torch.arange(len(batch), device=ids.device)  # which request each row of the batch answers
        answers = torch.zeros(len(batch), longest, dtype=torch.int64, device=ids.device)
        lengths = torch.zeros(len(batch), dtype=torch.int64, device=ids.device)
        stopped = torch.zeros(len(batch), dtype=torch.bool, device=ids.device)
        active = torch.ones(len(batch), dtype=torch.bool, device=ids.device)  # by row of the batch
        for step in range(longest):
            tokens = self._forward(ids, seen[:, : width + step], positions, cache)  # [rows]
            answers[rows[active], step] = tokens[active]
            lengths[rows[active]] += 1
            ended = torch.isin(tokens, self._stops) & active
            stopped[rows[ended]] = True
            active &= ~ended & (limits > step + 1)
            num_active = int(active.sum())
            if num_active == 0:
                break
            if 2 * num_active <= len(active):
                for layer in cache.layers:
                    layer.batch_select_indices(active)
                rows, limits, seen, tokens, positions, active = (
                    kept[active] for kept in (rows, limits, seen, tokens, positions, active)
                )
            ids, positions = tokens[:, None], positions[:, -1:] + 1
        return [
            (request.key, Completion(answers[i, : lengths[i]].tolist(), "stop" if stopped[i] else "length"))
            for i, request in enumerate(batch)
        ]

    def _left_padded(self, batch: list[_Request]) -> tuple[Tensor, Tensor]:
        """Prompts [R, T] with zeros on the left, and which of them are tokens (int64 ones)."""
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        seen = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            seen[row, width - len(request.prompt_ids) :] = 1
        return ids.to(self.target.device), seen.to(self.target.device)

    def _forward(self, ids: Tensor, seen: Tensor, positions: Tensor, cache: TargetCache) -> Tensor:
        """The greedy token after each row's last one [R]."""
        output = self.target.forward(ids, cache, attention_mask=seen, positions=positions)
        highest, tokens = self.target.logits(output.hidden[:, -1]).max(-1)
        if not highest.isfinite().all():  # see `are_broken`; the place of a NaN would pass for an answer
            raise RuntimeError(f"the target's logits are not finite at position {cache.length}")
        return tokens
