"""A generator that replays a function of the prompt, and conversations to ask it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from lilicorr.generator import Completion
from lilicorr.prompts import Conversation, conversation_id

END = 258  # <|im_end|> of lilicorr.tiny.byte_tokenizer


def hashed_answer(prompt_ids: list[int], max_new_tokens: int) -> Completion:
    """Between 1 and 16 letters that depend on every token of the prompt, and the end of turn."""
    digest = hashlib.blake2b(repr(prompt_ids).encode(), digest_size=17).digest()
    ids = [97 + byte % 26 for byte in digest[: 1 + digest[16] % 16]] + [END]
    return Completion(ids, "stop") if len(ids) <= max_new_tokens else Completion(ids[:max_new_tokens], "length")


def slow_answer(prompt_ids: list[int], max_new_tokens: int) -> Completion:
    """The same, a moment later."""
    time.sleep(0.3)
    return hashed_answer(prompt_ids, max_new_tokens)


class ReplayGenerator:
    """Answers by `answer`; a request takes `polls(prompt)` polls, so slow ones finish behind later ones."""

    name = "replay"

    def __init__(
        self,
        answer: Callable[[list[int], int], Completion] = hashed_answer,
        polls: Callable[[list[int]], int] = lambda prompt: 1,
        max_model_len: int = 1000,
        max_in_flight: int = 4,
    ) -> None:
        self.answer, self.polls = answer, polls
        self.max_model_len, self.max_in_flight = max_model_len, max_in_flight
        self.open: dict[int, list] = {}  # key -> [polls left, completion]
        self.prompts: list[list[int]] = []
        self.most_open = 0

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        """See Generator."""
        assert key not in self.open and len(prompt_ids) < self.max_model_len
        self.prompts.append(prompt_ids)
        room = self.max_model_len - len(prompt_ids)
        self.open[key] = [self.polls(prompt_ids), self.answer(prompt_ids, min(max_new_tokens, room))]
        self.most_open = max(self.most_open, len(self.open))

    def poll(self) -> list[tuple[int, Completion]]:
        """See Generator."""
        while self.open:
            for entry in self.open.values():
                entry[0] -= 1
            finished = [(key, entry[1]) for key, entry in self.open.items() if entry[0] <= 0]
            if finished:
                for key, _ in finished:
                    del self.open[key]
                return finished
        return []


def conversation(*turns: str, system: str | None = None, category: str = "chat") -> Conversation:
    """A conversation of user turns."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": text} for text in turns]
    return Conversation(conversation_id(messages), messages, "test", category, f"uuid of {turns[0][:20]}")


def conversations(number: int) -> list[Conversation]:
    """`number` different conversations of 1 to 3 turns, ordered by content id."""
    made = [conversation(*[f"question {i}.{t}" for t in range(1 + i % 3)], category="ab"[i % 2]) for i in range(number)]
    return sorted(made, key=lambda c: c.cid)
