"""The endpoint's OpenAPI document, built from the records that requests are validated by.

Place in the flow: `api` answers GET /openapi.json with it. What a schema of `protocol` does not say is added here:
fields that are accepted at the value that does nothing, and those that are ignored.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import lilicorr
from serve_app.protocol import IGNORED, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REF = "#/components/schemas/{model}"
POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatRequest, "A conversation's next message, whole or as server-sent events."),
    "/v1/completions": (CompletionRequest, "What follows prompts, whole or as server-sent events."),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
GETS = {
    "/v1/models": "The one model.",
    "/v1/models/{id}": "The same by its name.",
    "/health": "Whether the decoding thread lives.",
    "/version": "Version of the program, fingerprint of the weights.",
}
STREAMED = ("/v1/chat/completions", "/v1/completions")
REFUSALS = {
    "400": "A field is wrong; `param` names it.",
    "401": "A valid API key is needed.",
    "404": "Another model.",
    "413": "The body is too large.",
    "429": "As many requests run and wait as the replica takes.",
    "500": "This request failed.",
    "503": "The decoding thread has died, or no replica runs.",
}


def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    kinds = [kind for kind, _ in POSTS.values()]
    _, definitions = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF)
    schemas = definitions["$defs"] | {"Error": _error()}
    for kind in kinds:
        schemas[kind.__name__]["properties"] |= _neutral(kind)
    paths = {path: {"post": _post(path, kind, text)} for path, (kind, text) in POSTS.items()}
    paths |= {path: {"get": _get(path, text)} for path, text in GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lilicorr", "version": lilicorr.__version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _neutral(kind: type[BaseModel]) -> dict[str, Any]:
    """Fields that change no answer: any value of the ignored ones, of others the values that do nothing."""
    neutral = {name: {"enum": [*values, None]} for name, values in kind.neutral.items()}
    return dict.fromkeys(sorted(IGNORED), {}) | neutral


def _post(path: str, kind: type[BaseModel], text: str) -> dict[str, Any]:
    body = {"required": True, "content": _content({"$ref": REF.format(model=kind.__name__)})}
    return {"summary": text, "requestBody": body, "responses": _responses(path, REFUSALS)}


def _get(path: str, text: str) -> dict[str, Any]:
    """Nothing but a model's name can be wrong."""
    refusals = {"/health": ("503",), "/v1/models/{id}": ("401", "404")}.get(path, ("401",))
    found = {"summary": text, "responses": _responses(path, {status: REFUSALS[status] for status in refusals})}
    if "{id}" in path:
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def _responses(path: str, refusals: dict[str, str]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "The answer."}
    if path != "/health":
        answer["content"] = _content({"type": "object"})
    if path in STREAMED:
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    errors = {status: {"description": text, "content": _content({"$ref": REF.format(model="Error")})}
              for status, text in refusals.items()}  # fmt: skip
    return {"200": answer} | errors


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _error() -> dict[str, Any]:
    """OpenAI's shape of every error."""
    names = ("message", "type", "param", "code")
    properties = {name: {"type": ["string", "null"] if name in ("param", "code") else "string"} for name in names}
    error = {"type": "object", "properties": properties, "required": list(names)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
