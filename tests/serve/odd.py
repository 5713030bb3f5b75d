"""Bodies nobody would send: every field, with JSON of any kind in it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from fakes import CHAT, COMPLETIONS, body

FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "return_token_ids", "chat_template_kwargs", "add_generation_prompt", "cache_salt", "echo",
    "continue_final_message", "add_special_tokens", "tools", "response_format", "suffix", "user", "tokens",
]  # fmt: skip
PATHS = [CHAT, COMPLETIONS, "/tokenize", "/detokenize"]


NUM_BODIES = 300
NUMBERS = [
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "logprobs",
    "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
]  # fmt: skip
EDGES = [2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**70, 10**400, -1, 0, 1e-320, 1e300, float("nan"), float("inf"), True]


def odd_value(rng: random.Random, depth: int = 2) -> Any:
    """JSON of any kind, some of it at the edges of what fields take."""
    plain = [None, True, False, 0, 1, -1, 2, 0.5, 2**63, 2**70, -1e300, float("nan"), float("inf")]
    plain += ["", "hello", "auto", "\ud800", "漢\x00", "5"]
    kind = rng.randrange(4) if depth else 0
    if kind == 2:
        return [odd_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 3:
        keys = ["5", "type", "text", "role", "content", "include_usage", "\ud800"]
        return {rng.choice(keys): odd_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return rng.choice(plain)


def right_body(path: str, model: str) -> dict[str, Any]:
    """One that is answered with 200."""
    return {
        CHAT: {**body("hello", max_tokens=9), "model": model},
        COMPLETIONS: {"model": model, "prompt": "hello", "max_tokens": 9},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [97]},
    }[path]


def odd_bodies(path: str, model: str) -> Iterator[bytes]:
    """Most start from a body that is right, so that it is the odd field that is tried."""
    rng = random.Random(path)
    for _ in range(NUM_BODIES // len(PATHS)):
        fields = {rng.choice(FIELDS): odd_value(rng) for _ in range(rng.randrange(1, 4))}
        yield json.dumps({**(right_body(path, model) if rng.random() < 0.8 else {}), **fields}).encode()


def edge_bodies(path: str, model: str) -> Iterator[bytes]:
    """Numbers at the edges of what a machine holds, one at a time in every field that has one anywhere in it."""
    for edge in EDGES:
        values = [(field, edge) for field in NUMBERS]
        values += [(field, [5, edge]) for field in ("prompt", "tokens", "stop_token_ids")]
        values += [("logit_bias", {"5": edge}), ("logit_bias", {str(edge): 1})]
        for field, value in values:
            yield json.dumps({**right_body(path, model), field: value}).encode()
