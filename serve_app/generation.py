"""A request being answered, whichever route it came by: prompts to the engine, chunks to one response or a stream.

Place in the flow: a route parses the body and makes `Prompt`s; `Generation` submits one engine request for each
prompt and choice, pushes their chunks into `Answer`s, and has the route's `Writer` give them its API's shape. A
streamed and a whole answer run through the same code, so their texts and counts are the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lilicorr.engine.request import Request as EngineRequest
from serve_app.answer import Answer, Delta, Speculation, usage
from serve_app.detokenize import TextStream
from serve_app.encoding import json_bytes, json_line
from serve_app.errors import ApiError, internal_error
from serve_app.guard import CLIENT_LEFT
from serve_app.protocol import AnswerRequest
from serve_app.replica import Replica, Ticket
from serve_app.sampling import check_fields, check_ids, choice_seeds, sampling_params
from serve_app.served_model import ServedModel

logger = logging.getLogger(__name__)

SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class Prompt:
    """What is to be answered, and how a completion route echoes it."""

    token_ids: list[int]
    text: str = ""


@dataclass(frozen=True)
class Choice:
    """One answer of a response, and what it answers."""

    index: int
    prompt: Prompt
    request: EngineRequest
    answer: Answer


class Writer:
    """The shape that one of the APIs gives to answers; one writer for each response."""

    id_prefix: str
    kind: str  # `object` of a whole response
    chunk_kind: str  # and of an event

    def __init__(self, model: ServedModel, wanted: AnswerRequest) -> None:
        self.model, self.wanted = model, wanted

    def envelope(self, choices: list[Choice]) -> dict[str, Any]:
        """More fields of a whole response and of a stream's first event."""
        return {}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The choice of an event that is sent before there is a token, if there is one."""
        raise NotImplementedError

    def whole(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        """A choice of a whole response."""
        raise NotImplementedError

    def delta(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
        """The choice of an event."""
        raise NotImplementedError

    def closing(self, choice: Choice) -> dict[str, Any]:
        """The choice of an answer's last event, which has the finish reason."""
        raise NotImplementedError


class EventStream(StreamingResponse):
    """A stream of events that closes its ticket however the response ends."""

    def __init__(self, events: AsyncIterator[bytes], ticket: Ticket, media_type: str = "text/event-stream") -> None:
        super().__init__(events, media_type=media_type, headers=SSE_HEADERS)
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._ticket):
            await super().__call__(scope, receive, send)


class Generation:
    """One request on its way through one replica.

    Raises ApiError (400) for what the model cannot do: ids it does not have, prompts and answers that do not fit.
    """

    def __init__(
        self, model: ServedModel, replica: Replica, wanted: AnswerRequest, prompts: list[Prompt], writer: Writer
    ) -> None:
        self.model, self.replica, self.wanted, self.writer = model, replica, wanted, writer
        self.num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
        self.id = f"{writer.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        check_fields(model, wanted)
        seeds = choice_seeds(wanted.seed, wanted.n or 1)
        if len(prompts) * len(seeds) > replica.max_requests:
            name = "n" if len(prompts) == 1 else wanted.prompt_field
            message = f"{name}: {len(prompts)} prompts with {len(seeds)} answers each are more than the "
            raise ApiError(400, f"{message}{replica.max_requests} this endpoint takes at once", name, "invalid_value")
        self.choices: list[Choice] = []
        for prompt in prompts:
            for seed in seeds:
                self.choices.append(self._choice(prompt, seed))

    async def respond(self, request: Request) -> Response:
        """Decode and answer; a client that goes away ends the decoding."""
        ticket = self.replica.submit([choice.request for choice in self.choices])
        if self.wanted.stream:
            return EventStream(self._events(ticket), ticket)
        with closing(ticket):
            return await self._whole(request, ticket)

    def _choice(self, prompt: Prompt, seed: int) -> Choice:
        model, wanted, index = self.model, self.wanted, len(self.choices)
        check_ids(model, wanted.prompt_field, prompt.token_ids)
        params = sampling_params(model, wanted, len(prompt.token_ids), seed)
        request = EngineRequest(
            f"{self.id}-{index}", prompt.token_ids, params, wanted.cache_salt or "", wanted.num_prompt_logprobs
        )
        try:
            self.replica.check_request(request)
        except ValueError as error:
            raise ApiError(400, str(error), wanted.prompt_field, "invalid_value") from error
        show_stop = bool(wanted.include_stop_str_in_output)
        table = model.spelled_table if wanted.skip_special_tokens is False else model.token_table
        text = TextStream(table, wanted.stop, show_stop, wanted.min_tokens or 0)
        return Choice(index, prompt, request, Answer(text, show_stop))

    async def _deltas(self, ticket: Ticket) -> AsyncIterator[tuple[Choice, Delta]]:
        """What the answers gain, as it comes. Raises ApiError (500) if one of them failed."""
        async for index, chunk in ticket:
            choice = self.choices[index]
            if chunk.error is not None:
                raise internal_error(f"decoding failed: {chunk.error}")
            delta = choice.answer.push(chunk)
            if choice.answer.finish_reason is not None:
                ticket.stop(chunk.request_id)
            yield choice, delta

    async def _whole(self, request: Request, ticket: Ticket) -> Response:
        """The answers as one response."""

        async def collect() -> list[list[Delta]]:
            deltas: list[list[Delta]] = [[] for _ in self.choices]
            async for choice, delta in self._deltas(ticket):
                deltas[choice.index].append(delta)
            return deltas

        collecting = asyncio.create_task(collect())
        leaving = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_LEFT)
            deltas = collecting.result()
        finally:
            collecting.cancel()
            leaving.cancel()

        def written() -> bytes:
            choices = [self.writer.whole(choice, deltas[choice.index]) for choice in self.choices]
            body = self._envelope(self.writer.kind) | self.writer.envelope(self.choices)
            return json_bytes(body | {"choices": choices, "usage": self._usage(self.choices)} | self._metrics())

        return Response(await self.model.aside(written), media_type="application/json")

    async def _events(self, ticket: Ticket) -> AsyncIterator[bytes]:
        """The answers as server-sent events: perhaps an opening, the text as it comes, the reason, the counts."""
        options = self.wanted.stream_options
        include_usage = options is not None and bool(options.include_usage)
        envelope, started, num_open = self._envelope(self.writer.chunk_kind), set(), len(self.choices)
        extra = self.writer.envelope(self.choices)

        def event(choice: dict[str, Any], **more: Any) -> bytes:
            nonlocal extra
            counts = {"usage": None} if include_usage else {}
            if options is not None and options.continuous_usage_stats:
                counts = {"usage": self._usage([self.choices[choice["index"]]])}
            data, extra = envelope | extra | {"choices": [choice]} | counts | more, {}
            return sse(data)

        def told(choice: Choice, delta: Delta, first: bool) -> bytes:
            return event(self.writer.delta(choice, delta, first))

        try:
            openings = [self.writer.opening(choice) for choice in self.choices]
            for opening in filter(None, openings):
                yield event(opening)
            async for choice, delta in self._deltas(ticket):
                first = choice.index not in started
                if delta.text or delta.logprobs or self.wanted.return_token_ids or (first and delta.prompt_logprobs):
                    started.add(choice.index)
                    long = delta.prompt_logprobs is not None  # as long as the prompt
                    yield await self.model.aside(told, choice, delta, first) if long else told(choice, delta, first)
                if choice.answer.finish_reason is not None:
                    num_open -= 1
                    last = self._metrics() if num_open == 0 and not include_usage else {}
                    yield event(self.writer.closing(choice), **last)
            if include_usage:
                yield sse(envelope | {"choices": [], "usage": self._usage(self.choices)} | self._metrics())
        except ApiError as error:
            yield sse(error.body())
        except Exception as error:  # half an answer is out: what is left is to say so
            logger.exception("the stream of %s failed", self.id)
            yield sse(internal_error(f"{type(error).__name__}: {error}").body())
        finally:
            ticket.close()
        yield b"data: [DONE]\n\n"

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def _usage(self, choices: list[Choice]) -> dict[str, Any]:
        """Of some answers, with all prompts of the request; what a prompt's first answer found cached counts."""
        num_cached = sum(choice.answer.num_cached for choice in self.choices[:: self.wanted.n or 1])
        return usage(self.num_prompt, num_cached, [choice.answer for choice in choices])

    def _metrics(self) -> dict[str, Any]:
        """How the drafts of all answers fared, where that was asked for."""
        if not self.wanted.return_speculative_metrics:
            return {}
        total = Speculation()
        for choice in self.choices:
            total.num_drafted += choice.answer.speculation.num_drafted
            total.accepted += choice.answer.speculation.accepted
        return {"metrics": {"speculative_decoding": total.metrics(self.model.num_slots)}}


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json_line(data)}\n\n".encode()


async def _disconnected(request: Request) -> None:
    """Return when the client has gone away. Only after the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
