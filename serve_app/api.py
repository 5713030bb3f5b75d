"""The HTTP side: OpenAI's chat completions, streamed or whole, over one replica's decoding thread.

Place in the flow: body -> `protocol` -> chat template -> prompt ids and sampling params -> `Replica` ->
token chunks -> `TextStream` -> SSE events or one response. A streamed and a whole answer run through the
same `Answer`, so their texts and counts are the same.

    POST /v1/chat/completions   GET /v1/models   GET /v1/models/{id}   GET /health

The sampling defaults are OpenAI's: temperature 1 and top_p 1, with a random seed for every request that
sends none. Send `temperature: 0` for the deterministic answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from lilicorr import chat
from lilicorr.decode import SamplingParams
from lilicorr.engine.request import Request as EngineRequest
from serve_app.detokenize import TextStream
from serve_app.protocol import ApiError, ChatRequest, parse_chat_request
from serve_app.replica import DrainingError, QueueFullError, Replica, ReplicaDeadError, Ticket
from serve_app.served_model import ServedModel

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Answer:
    """One answer as it grows: its text, why it ended, and its token counts."""

    def __init__(self, prompt_ids: list[int], text: TextStream) -> None:
        self.finish_reason: str | None = None
        self._text = text
        self._num_prompt = len(prompt_ids)
        self._num_tokens = 0
        self._num_drafted = 0
        self._num_accepted = 0

    async def deltas(self, ticket: Ticket) -> AsyncIterator[str]:
        """The answer's text, piece by piece; a stop string ends it. Raises ApiError (500) if decoding failed."""
        async for _, chunk in ticket:
            if chunk.error is not None:
                raise ApiError(500, f"decoding failed: {chunk.error}", code="internal_error", kind="server_error")
            piece = self._text.push(chunk.token_ids)
            self._num_tokens += piece.num_tokens
            self._num_drafted += chunk.num_drafted
            self._num_accepted += min(chunk.num_accepted, piece.num_tokens)
            self.finish_reason = "stop" if piece.stopped else chunk.finish_reason
            yield piece.text if piece.stopped or self.finish_reason is None else piece.text + self._text.finish()
            if piece.stopped:
                ticket.stop(chunk.request_id)

    def usage(self) -> dict[str, Any]:
        """Token counts of what was returned; the token that ended the answer is one of them.

        Accepted predictions are drafted tokens in the answer, rejected ones were drafted in vain.
        """
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt + self._num_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._num_accepted,
                "rejected_prediction_tokens": self._num_drafted - self._num_accepted,
            },
        }


class EventStream(StreamingResponse):
    """A stream of events that closes its ticket however the response ends."""

    def __init__(self, events: AsyncIterator[bytes], ticket: Ticket, media_type: str = "text/event-stream") -> None:
        super().__init__(events, media_type=media_type, headers=SSE_HEADERS)
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._ticket):
            await super().__call__(scope, receive, send)


class Chat:
    """The chat endpoint of one replica."""

    def __init__(self, model: ServedModel, replica: Replica) -> None:
        self.model = model
        self.replica = replica

    async def respond(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        wanted = parse_chat_request(await request.body())
        self.check_model(wanted.model)
        prompt_ids = await self._render(wanted)
        params = self._sampling(wanted, len(prompt_ids))
        answer = Answer(prompt_ids, TextStream(self.model.token_table, wanted.stop))
        engine_request = EngineRequest(f"chatcmpl-{uuid.uuid4().hex}", prompt_ids, params)
        try:
            self.replica.check_request(engine_request)
        except ValueError as error:
            raise ApiError(400, str(error), "messages", "invalid_value") from error
        ticket, envelope = self.replica.submit([engine_request]), self._envelope(engine_request.id)
        if wanted.stream:
            return EventStream(self._events(ticket, envelope, answer, wanted.include_usage), ticket)
        with closing(ticket):
            return await self._whole(request, ticket, envelope, answer)

    def check_model(self, name: str) -> None:
        """Raise ApiError (404) for any model but the one that is served."""
        if name != self.model.name:
            message = f"the model {name!r} does not exist here; this endpoint serves {self.model.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def _render(self, wanted: ChatRequest) -> list[int]:
        messages = [message.as_dict() for message in wanted.messages]
        kwargs = self.model.template_kwargs | (wanted.chat_template_kwargs or {})
        try:
            return await self.model.render(messages, kwargs)
        except chat.ChatError as error:
            raise ApiError(400, str(error), "messages", "invalid_value") from error

    def _sampling(self, wanted: ChatRequest, num_prompt: int) -> SamplingParams:
        """The request's sampling; without a limit the answer may fill the context."""
        limit = self.model.max_model_len
        name, max_new_tokens = wanted.token_limit or ("messages", max(1, limit - num_prompt))
        if num_prompt + max_new_tokens > limit:
            message = f"this model's context is {limit} tokens; the messages have {num_prompt}"
            message += ", no room for an answer" if name == "messages" else f" and {name} asks for {max_new_tokens}"
            raise ApiError(400, message, name, "context_length_exceeded")
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if wanted.temperature is None else wanted.temperature,
            top_k=max(0, wanted.top_k or 0),
            top_p=1.0 if wanted.top_p is None else wanted.top_p,
            seed=secrets.randbits(63) if wanted.seed is None else wanted.seed,
            stop_ids=self.model.stop_ids,
        )

    async def _whole(self, request: Request, ticket: Ticket, envelope: dict[str, Any], answer: Answer) -> Response:
        """The answer as one response; a client that goes away ends the decoding."""

        async def collect() -> str:
            return "".join([delta async for delta in answer.deltas(ticket)])

        collecting = asyncio.create_task(collect())
        leaving = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)  # nobody reads it
            text = collecting.result()
        finally:
            collecting.cancel()
            leaving.cancel()
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        body = envelope | {"object": "chat.completion", "choices": [choice], "usage": answer.usage()}
        return JSONResponse(body)

    async def _events(
        self, ticket: Ticket, envelope: dict[str, Any], answer: Answer, include_usage: bool
    ) -> AsyncIterator[bytes]:
        """The answer as server-sent events: the role, the text as it comes, the reason, perhaps the counts."""
        envelope = envelope | {"object": "chat.completion.chunk"}

        def event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            return _sse(envelope | {"choices": [choice]} | ({"usage": None} if include_usage else {}))

        try:
            yield event({"role": "assistant", "content": ""})
            async for text in answer.deltas(ticket):
                if text:
                    yield event({"content": text})
            yield event({}, answer.finish_reason)
            if include_usage:
                yield _sse(envelope | {"choices": [], "usage": answer.usage()})
        except ApiError as error:
            yield _sse(error.body())
        finally:
            ticket.close()
        yield b"data: [DONE]\n\n"

    def _envelope(self, response_id: str) -> dict[str, Any]:
        return {
            "id": response_id,
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }


def _sse(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def _disconnected(request: Request) -> None:
    """Return when the client has gone away. Only after the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def build_api(model: ServedModel, replica: Replica) -> FastAPI:
    """The ASGI app that answers for `model`, decoded by `replica`."""
    app = FastAPI(title="lilicorr", docs_url=None, redoc_url=None, openapi_url=None)
    endpoint = Chat(model, replica)
    card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "lilicorr"}
    card |= {"max_model_len": model.max_model_len, "fingerprint": model.fingerprint}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await endpoint.respond(request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        endpoint.check_model(name)
        return JSONResponse(card)

    @app.get("/health")
    async def health() -> Response:
        replica.check()
        return Response(status_code=200)

    _handle_errors(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape."""

    def answer(error: ApiError) -> Response:
        # In ASCII: the message may quote a name that is half a character.
        return Response(json.dumps(error.body()), error.status, error.headers, media_type="application/json")

    @app.exception_handler(ApiError)
    async def refused(_request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(QueueFullError)
    async def full(_request: Request, error: QueueFullError) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_S)}
        return answer(ApiError(429, str(error), None, "rate_limit_exceeded", "rate_limit_error", headers))

    @app.exception_handler(DrainingError)
    @app.exception_handler(ReplicaDeadError)
    async def unavailable(_request: Request, error: Exception) -> Response:
        return answer(ApiError(503, str(error), None, "service_unavailable", "server_error"))

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        return answer(ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, error: Exception) -> Response:
        logger.error("unexpected error", exc_info=error)
        return answer(ApiError(500, f"{type(error).__name__}: {error}", None, "internal_error", "server_error"))
