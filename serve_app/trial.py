"""One prompt from the operations page: the answer token by token, each with the slot that drafted it.

Place in the flow: POST /ui/try. The prompt is one user message through the chat template, as on the chat route. The
answer is JSON Lines: first `{"slots": S}`, then a line for each run of tokens, at the end the reason.

    {"tokens": [{"text": "def", "slot": 0}, {"text": " f", "slot": null}], "drafted": 15, "accepted": 1}
    {"tokens": [], "drafted": 0, "accepted": 0, "finish_reason": "stop"}

`slot` counts from 0 (the paper's slot s + 1); it is null for the target's own tokens: the first, and the one
behind the accepted drafts of every block. The text of a character that spans tokens comes with the last of them.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from lilicorr.decode import SamplingParams
from lilicorr.engine.request import Request as EngineRequest
from lilicorr.engine.request import TokenChunk
from serve_app.chat_completions import render
from serve_app.detokenize import TextStream
from serve_app.encoding import json_line
from serve_app.errors import ApiError, internal_error
from serve_app.generation import EventStream
from serve_app.guard import read_body
from serve_app.protocol import Message, Rendering
from serve_app.replica import Replica, Ticket
from serve_app.served_model import ServedModel

JSON_LINES = "application/x-ndjson"
MAX_BODY_BYTES = 2**20


class TrialRequest(BaseModel):
    """The body of POST /ui/try."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str = Field(min_length=1, max_length=100_000)
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)

    @property
    def message(self) -> Message:
        """The prompt as a conversation's only message."""
        return Message(role="user", content=self.prompt)


class Trial:
    """The route of one replica."""

    def __init__(self, model: ServedModel, replica: Replica) -> None:
        self._model = model
        self._replica = replica

    async def respond(self, request: Request) -> Response:
        """POST /ui/try."""
        self._replica.check_room()
        wanted = _parse(await read_body(request, MAX_BODY_BYTES))
        prompt_ids = await self._model.aside(render, self._model, [wanted.message], Rendering(), "prompt")
        room = self._model.max_model_len - len(prompt_ids)
        if room < 1:
            message = f"this model's context is {self._model.max_model_len} tokens; the prompt has {len(prompt_ids)}"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
        params = SamplingParams(
            max_new_tokens=min(wanted.max_tokens, room),
            temperature=wanted.temperature,
            seed=secrets.randbits(63),
            stop_ids=self._model.stop_ids,
        )
        ticket = self._replica.submit([EngineRequest(f"try-{uuid.uuid4().hex}", prompt_ids, params)])
        return EventStream(self._lines(ticket), ticket, JSON_LINES)

    async def _lines(self, ticket: Ticket) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        text = TextStream(self._model.token_table)
        yield _line({"slots": self._model.num_slots})
        async for _, chunk in ticket:
            if chunk.error is not None:
                yield _line(internal_error(f"decoding failed: {chunk.error}").body())
                return
            yield _line(_run(chunk, text))


def _parse(body: bytes) -> TrialRequest:
    try:
        return TrialRequest.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise ApiError(400, f"{field or 'the body'}: {problem['msg']}", field or None, "invalid_value") from error


def _run(chunk: TokenChunk, text: TextStream) -> dict[str, Any]:
    """A run of tokens as a line: its first `num_accepted` are drafts, of slots 0, 1, ..."""
    tokens = [
        {"text": text.push([token_id]).text, "slot": place if place < chunk.num_accepted else None}
        for place, token_id in enumerate(chunk.token_ids)
    ]
    line = {"tokens": tokens, "drafted": chunk.num_drafted, "accepted": chunk.num_accepted}
    return line if chunk.finish_reason is None else line | {"finish_reason": chunk.finish_reason}


def _line(data: dict[str, Any]) -> bytes:
    return json_line(data).encode() + b"\n"
