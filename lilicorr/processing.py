"""Logits processing: what a request may change about the target's logits before a token is drawn from them.

Place in the flow: `decode.SamplingParams` holds the settings and checks them here; both decoders process the target's
logits before `verify` sees them.
"""

from __future__ import annotations

import math

MAX_LOGIT_BIAS = 300  # tokens of a request that may have one


def check_processing(
    presence_penalty: float,
    frequency_penalty: float,
    repetition_penalty: float,
    logit_bias: tuple[tuple[int, float], ...],
) -> None:
    """Raise ValueError for a value that a user may not set."""
    for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
        if not -2 <= value <= 2:
            raise ValueError(f"{name} must be in [-2, 2] (0 is off), got {value}")
    if not (math.isfinite(repetition_penalty) and repetition_penalty > 0):
        raise ValueError(f"repetition_penalty must be finite and > 0 (1 is off), got {repetition_penalty}")
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} token ids, got {len(logit_bias)}")
    for token_id, bias in logit_bias:
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias must be in [-100, 100], got {bias} for token id {token_id}")
    token_ids = [token_id for token_id, _ in logit_bias]
    twice = {token_id for token_id in token_ids if token_ids.count(token_id) > 1}
    if twice:
        raise ValueError(f"logit_bias must name a token id once, got {min(twice)} more than once")
