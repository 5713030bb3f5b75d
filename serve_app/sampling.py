"""A request's fields as the decoder's settings, held against the model that is to serve them.

Place in the flow: `generation` calls it once for every prompt and choice, after the prompt has become token ids.

The defaults are OpenAI's: temperature 1 and top_p 1, with a random seed for every request that sends none. Send
`temperature: 0` for the deterministic answer.
"""

from __future__ import annotations

import hashlib
import secrets

from lilicorr.decode import SamplingParams
from lilicorr.engine.row import MAX_STOP_IDS
from serve_app.errors import ApiError
from serve_app.protocol import COMPLETION_TOKENS, AnswerRequest, CompletionRequest
from serve_app.served_model import ServedModel


def check_fields(model: ServedModel, wanted: AnswerRequest) -> None:
    """Raise ApiError (400) for what only the model can tell: ids outside its vocabulary, too many stop ids."""
    ids = {"stop_token_ids": wanted.stop_token_ids or [], "logit_bias": [int(key) for key in wanted.logit_bias or {}]}
    for name, token_ids in ids.items():
        check_ids(model, name, token_ids)
    count = len(_stop_ids(model, wanted))
    if count > MAX_STOP_IDS:
        message = (
            f"stop_token_ids: with the model's own end tokens these are {count}, at most {MAX_STOP_IDS} are possible"
        )
        raise ApiError(400, message, "stop_token_ids", "invalid_value")


def check_ids(model: ServedModel, name: str, token_ids: list[int]) -> None:
    """Raise ApiError (400) that names the field for an id outside the model's vocabulary."""
    outside = [token_id for token_id in token_ids if token_id >= model.num_rows]
    if outside:
        message = f"{name}: token id {outside[0]} is outside the model's vocabulary of {model.num_rows}"
        raise ApiError(400, message, name, "invalid_value")


def sampling_params(model: ServedModel, wanted: AnswerRequest, num_prompt: int, seed: int) -> SamplingParams:
    """How an answer to a prompt of `num_prompt` tokens is decoded. Raises ApiError (400) where it cannot fit."""
    max_new_tokens = _max_new_tokens(model, wanted, num_prompt)
    min_new_tokens = wanted.min_tokens or 0
    if min_new_tokens > max_new_tokens:
        message = f"min_tokens {min_new_tokens} is more than the answer may have, {max_new_tokens}"
        raise ApiError(400, message, "min_tokens", "invalid_value")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=_default(wanted.temperature, 1.0),
        top_k=min(max(0, wanted.top_k or 0), model.num_rows),  # more than there are is all of them
        top_p=_default(wanted.top_p, 1.0),
        seed=seed,
        stop_ids=_stop_ids(model, wanted),
        min_p=wanted.min_p or 0.0,
        presence_penalty=wanted.presence_penalty or 0.0,
        frequency_penalty=wanted.frequency_penalty or 0.0,
        repetition_penalty=_default(wanted.repetition_penalty, 1.0),
        logit_bias=tuple((int(token_id), bias) for token_id, bias in (wanted.logit_bias or {}).items()),
        min_new_tokens=min_new_tokens,
        num_logprobs=wanted.num_logprobs,
    )


def choice_seeds(seed: int | None, count: int) -> list[int]:
    """A seed for each choice of a request: the request's own for the first, others derived from it."""
    first = secrets.randbits(63) if seed is None else seed
    derived = (hashlib.blake2b(f"{first}/{index}".encode(), digest_size=8).digest() for index in range(1, count))
    return [first, *(int.from_bytes(digest, "little", signed=True) for digest in derived)]


def _max_new_tokens(model: ServedModel, wanted: AnswerRequest, num_prompt: int) -> int:
    """The answer's limit. Without one a chat's answer may fill the context, a completion has its API's default."""
    limit, room = model.max_model_len, model.max_model_len - num_prompt
    name, value = wanted.token_limit or (None, None)
    if room < (0 if value == 0 else 1):
        message = f"this model's context is {limit} tokens; the {wanted.prompt_field} has {num_prompt}"
        message += ", which leaves no room for an answer"
        raise ApiError(400, message, wanted.prompt_field, "context_length_exceeded")
    if value is None:
        return min(room, COMPLETION_TOKENS) if isinstance(wanted, CompletionRequest) else room
    if value > room:
        message = f"this model's context is {limit} tokens; the {wanted.prompt_field} has {num_prompt} and {name} asks"
        raise ApiError(400, f"{message} for {value}", name, "context_length_exceeded")
    return value


def _stop_ids(model: ServedModel, wanted: AnswerRequest) -> tuple[int, ...]:
    own = () if wanted.ignore_eos else model.stop_ids
    return tuple(dict.fromkeys([*own, *(wanted.stop_token_ids or [])]))


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
