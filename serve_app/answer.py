"""One answer as it grows: its text, its tokens and their log-probabilities, why it ended, and what it cost.

Place in the flow: `generation` pushes the chunks of a request into its `Answer`; a streamed and a whole response are
made of the same `Delta`s, so their texts and counts are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lilicorr.engine.request import TokenChunk
from lilicorr.logprobs import TokenLogprobs
from serve_app.detokenize import TextStream


@dataclass(frozen=True)
class Delta:
    """What a chunk adds to an answer. `logprobs` belong to `token_ids` one by one."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # in the first one, where they were asked for


@dataclass
class Speculation:
    """How the drafts of answers fared; adds up over answers."""

    num_drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)  # blocks by how many of their drafts are in the answer

    @property
    def num_blocks(self) -> int:
        """Blocks with at least one draft."""
        return self.accepted.total()

    @property
    def num_accepted(self) -> int:
        """Drafts in the answer."""
        return sum(count * blocks for count, blocks in self.accepted.items())

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count a block; one without drafts does not count."""
        if num_drafted:
            self.num_drafted += num_drafted
            self.accepted[num_accepted] += 1

    def metrics(self, num_slots: int) -> dict[str, Any]:
        """The object that load tools read at `metrics.speculative_decoding` of a response."""
        blocks, accepted = self.num_blocks, self.num_accepted
        return {
            "mean_acceptance_length": 1 + accepted / blocks if blocks else 1.0,
            "draft_acceptance_rate": accepted / self.num_drafted if blocks else 0.0,
            "acceptance_histogram": [self.accepted[count] for count in range(num_slots + 1)],
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self.num_drafted,
            "num_spec_steps": blocks,
            "num_spec_tokens": num_slots,
        }


class Answer:
    """One answer. `show_stop`: the text of the token or string that ends it is part of it."""

    def __init__(self, text: TextStream, show_stop: bool = False) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # the stop string or the token that ended it
        self.num_tokens = 0
        self.num_cached = 0  # tokens of the prompt that the prefix cache knew
        self.speculation = Speculation()
        self._text = text
        self._show_stop = show_stop

    def push(self, chunk: TokenChunk) -> Delta:
        """Add a chunk. Nothing may be pushed once there is a finish reason."""
        assert self.finish_reason is None, f"pushed after the end: {chunk}"
        token_ids = chunk.token_ids
        hidden = token_ids[-1:] if chunk.finish_reason == "stop" and not self._show_stop else []
        piece = self._text.push(token_ids[: len(token_ids) - len(hidden)])
        text, count = piece.text, piece.num_tokens
        if piece.stop is not None:
            self.finish_reason, self.stop_reason = "stop", piece.stop
        elif chunk.finish_reason is not None:
            count += len(hidden)
            text += self._text.finish()
            self.finish_reason = chunk.finish_reason
            self.stop_reason = token_ids[-1] if chunk.finish_reason == "stop" else None
        self.num_tokens += count
        self.num_cached += chunk.num_cached
        self.speculation.add(chunk.num_drafted, min(chunk.num_accepted, count))
        logprobs = chunk.logprobs[:count] if chunk.logprobs is not None else None
        return Delta(text, token_ids[:count], logprobs, chunk.prompt_logprobs)


def usage(num_prompt: int, num_cached: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Token counts of what was returned for prompts of `num_prompt` tokens; the token that ended an answer is counted.

    Accepted predictions are drafted tokens in the answers, rejected ones were drafted in vain.
    """
    num_tokens = sum(answer.num_tokens for answer in answers)
    accepted = sum(answer.speculation.num_accepted for answer in answers)
    drafted = sum(answer.speculation.num_drafted for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }
