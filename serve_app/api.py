"""The HTTP side: OpenAI's API, and what load tools ask besides, over one replica's decoding thread.

Place in the flow: body -> `protocol` -> prompts and sampling params -> `generation` -> `Replica` -> token chunks ->
answers -> SSE events or one response.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{id}
    POST /tokenize              POST /detokenize       GET /health      GET /version   GET /openapi.json

Parsing a body, applying the template and tokenising happen on the tokenizer's thread: on the event loop a long prompt
would hold up every stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import lilicorr
from serve_app.chat_completions import ChatWriter, chat_prompts
from serve_app.completions import CompletionWriter, completion_prompts
from serve_app.errors import ApiError, handle_errors
from serve_app.generation import Generation, Prompt, Writer
from serve_app.guard import Guard, Limits, read_body
from serve_app.openapi import document
from serve_app.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Parsed, TokenizeRequest, parse
from serve_app.replica import Replica
from serve_app.served_model import ServedModel
from serve_app.tokenization import detokenize, tokenize

Made = TypeVar("Made")


class Endpoint:
    """The routes of one replica."""

    def __init__(self, model: ServedModel, replica: Replica, limits: Limits) -> None:
        self.model, self.replica, self.limits = model, replica, limits

    @property
    def card(self) -> dict[str, Any]:
        """What /v1/models says of the model."""
        model = self.model
        card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "lilicorr"}
        return card | {"max_model_len": model.max_model_len, "fingerprint": model.fingerprint}

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, ChatRequest, chat_prompts, ChatWriter)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, CompletionRequest, completion_prompts, CompletionWriter)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        return await self._convert(request, TokenizeRequest, tokenize)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        return await self._convert(request, DetokenizeRequest, detokenize)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for any model but the one that is served; None is that one."""
        if name is not None and name != self.model.name:
            message = f"the model {name!r} does not exist here; this endpoint serves {self.model.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def _answer(
        self,
        request: Request,
        kind: type[Parsed],
        make_prompts: Callable[[ServedModel, Parsed], list[Prompt]],
        writer: type[Writer],
    ) -> Response:
        """What the engine says to a request."""

        def prepare(wanted: Parsed) -> Generation:
            prompts = make_prompts(self.model, wanted)
            return Generation(self.model, self.replica, wanted, prompts, writer(self.model, wanted))

        self.replica.check_room()  # a refusal costs the tokenizer's thread nothing, which those who are taken wait for
        return await (await self._prepared(request, kind, prepare)).respond(request)

    async def _convert(
        self, request: Request, kind: type[Parsed], convert: Callable[[ServedModel, Parsed], dict[str, Any]]
    ) -> Response:
        """What the tokenizer says to a request."""
        return JSONResponse(await self._prepared(request, kind, lambda wanted: convert(self.model, wanted)))

    async def _prepared(self, request: Request, kind: type[Parsed], prepare: Callable[[Parsed], Made]) -> Made:
        """What `prepare` makes of a request."""

        def parse_and_prepare(body: bytes) -> Made:
            wanted = parse(kind, body)
            self.check_model(wanted.model)
            return prepare(wanted)

        body = await read_body(request, self.limits.max_body_bytes)
        return await self.model.aside(parse_and_prepare, body)


def build_api(model: ServedModel, replica: Replica, limits: Limits | None = None) -> FastAPI:
    """The ASGI app that answers for `model`, decoded by `replica`."""
    limits = limits or Limits()
    app = FastAPI(title="lilicorr", docs_url=None, redoc_url=None, openapi_url=None)
    endpoint = Endpoint(model, replica, limits)
    app.add_api_route("/v1/chat/completions", endpoint.chat, methods=["POST"])
    app.add_api_route("/v1/completions", endpoint.complete, methods=["POST"])
    app.add_api_route("/tokenize", endpoint.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", endpoint.detokenize, methods=["POST"])

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [endpoint.card]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        endpoint.check_model(name)
        return JSONResponse(endpoint.card)

    @app.get("/health")
    async def health() -> Response:
        replica.check()
        return Response(status_code=200)

    described = document()

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(described)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": lilicorr.__version__, "fingerprint": model.fingerprint})

    handle_errors(app)
    app.add_middleware(Guard, keys=limits.api_keys, adds_id=not limits.behind_proxy)
    return app
