"""What every request passes first: the API key, the size of its body, and an id for its answer.

Place in the flow: `Guard` wraps the whole application as ASGI middleware; `read_body` is how a route gets a body.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

# Asked by who holds no key: Serve's proxy, a load balancer, a browser (a page without data, which asks for the key).
OPEN_PATHS = {"/health", "/ui"}
CLIENT_LEFT = 499  # nobody reads the answer
HEADER_ENCODING = "latin-1"  # of a header's bytes as text; those of a key are compared as they came
MAX_DIGITS = 18  # of a length
CLIENT_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True)
class Limits:
    """What a client needs and what it may send."""

    max_body_bytes: int = 4 * 2**20
    api_keys: tuple[str, ...] = ()  # none: the endpoint is open
    behind_proxy: bool = False  # one that gives every request an id, and every answer its request's


def read_keys(path: str | None) -> tuple[str, ...]:
    """The API keys of a file, one a line. Raises ValueError for a file without any."""
    if path is None:
        return ()
    keys = tuple(line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys:
        raise ValueError(f"api_key_file {path} holds no key")
    return keys


class Guard:
    """Answers 401 where a key is needed and missing, and 500 for what nobody expected.

    Every answer has an `x-request-id`, the client's own if it sent one; behind Serve's proxy the proxy adds it.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], adds_id: bool = True) -> None:
        self._app, self._adds_id = app, adds_id
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if CLIENT_ID.fullmatch(given) else uuid.uuid4().hex

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._adds_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in OPEN_PATHS and not self._admits(headers.get("authorization", "")):
            error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", None, "invalid_api_key")
            error.headers = {"www-authenticate": "Bearer"}
            await error.response()(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise  # half an answer is out: closing the connection is all that is left
            logger.exception("request %s failed", request_id)
            message = f"request {request_id} failed: {type(error).__name__}: {error}"
            await internal_error(message).response()(scope, receive, send_with_id)

    def _admits(self, authorization: str) -> bool:
        """Whether the header has one of the keys; the time it takes says nothing about them."""
        kind, _, key = authorization.partition(" ")
        given = _digest(key.strip(" \t").encode(HEADER_ENCODING))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return not self._digests or (kind.lower() == "bearer" and any(matches))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request. Raises ApiError (413) as soon as it is known to be larger than `max_bytes`."""
    too_large = ApiError(413, f"the body has more than {max_bytes} bytes", code="request_too_large")
    declared: Any = request.headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > MAX_DIGITS or int(declared) > max_bytes):
        raise too_large
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect as error:
        raise ApiError(CLIENT_LEFT, "the client left in the middle of its request") from error
    return bytes(body)
