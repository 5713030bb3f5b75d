"""Log-probabilities of tokens, as a request may ask for them.

Place in the flow: both decoders take them from the target's logits beside verification; the engine hands them out in
its `TokenChunk`s.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability, and the likeliest tokens in its place.

    Of the target's own law: the log-softmax of its raw logits, before temperature, bias, penalties and filters (what
    vLLM reports unless told otherwise). A chosen token may therefore be missing from `top` or be behind others.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # as many (token id, log-probability) as were asked for, likeliest first, then by id


def check_num_logprobs(name: str, value: int | None) -> None:
    """Raise ValueError for a number that a user may not set."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise ValueError(f"{name} must be in [0, {MAX_LOGPROBS}] or None (off), got {value}")
