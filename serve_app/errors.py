"""How the endpoint says no: OpenAI's error shape, for every error there is.

Place in the flow: the routes raise `ApiError`, the replica its own errors; `handle_errors` turns them, unknown paths
and wrong methods into answers. What nobody expected is `guard.Guard`'s.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from serve_app.replica import QueueFullError, ReplicaDeadError

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer, in ASCII: the message may quote a name that is half a character."""
        return Response(json.dumps(self.body()), self.status, self.headers, media_type="application/json")


def internal_error(message: str) -> ApiError:
    """Something failed that is not the client's fault."""
    return ApiError(500, message, None, "internal_error", "server_error")


def unavailable(message: str) -> ApiError:
    """What is asked cannot be done now, and may be later."""
    return ApiError(503, message, None, "service_unavailable", "server_error", {"retry-after": str(RETRY_AFTER_S)})


def handle_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(_request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(QueueFullError)
    async def full(_request: Request, error: QueueFullError) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_S)}
        return ApiError(429, str(error), None, "rate_limit_exceeded", "rate_limit_error", headers).response()

    @app.exception_handler(ReplicaDeadError)
    async def dead(_request: Request, error: ReplicaDeadError) -> Response:
        return unavailable(str(error)).response()

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response()
