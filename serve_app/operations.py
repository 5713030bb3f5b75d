"""What an operator sees and sets: /metrics, and the page /ui with the routes behind it.

Place in the flow: `app` adds these routes to the API of every replica; any of them answers for all (`peers`).

    GET  /metrics       Prometheus' text format
    GET  /ui            the page, one static file
    GET  /ui/state      what it shows, as JSON
    POST /ui/replicas   {"replicas": N}, header x-admin-key; what `python -m serve_app.scale N` does
    POST /ui/try        {"prompt": ..., "max_tokens": ..., "temperature": ...} -> JSON Lines, see `trial`

Setting replicas needs the admin key. Where none is configured it is refused, and the page says why. Where the endpoint
has API keys (`guard`) all but the page itself, which holds no data, need one; the page asks for it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from serve_app.errors import ApiError, unavailable
from serve_app.guard import HEADER_ENCODING, read_body
from serve_app.metrics import CONTENT_TYPE, Report, exposition, kv_usage
from serve_app.peers import Peers
from serve_app.replica import Replica
from serve_app.scale import APP, DEPLOYMENT, Scaling, Serve, scaling_of, set_replicas
from serve_app.served_model import ServedModel
from serve_app.trial import Trial

logger = logging.getLogger(__name__)

MAX_REPLICAS = 1000  # a slip of the finger
MIN_KEY_LENGTH = 16
MAX_BODY_BYTES = 1024
NO_KEY = "no admin key is configured: set admin_key_file in the application's arguments (docs/operations.md)"
NO_SERVE = "this endpoint does not run in Ray Serve"
# The page needs nothing from anywhere else, and nobody may frame it around the control.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "cache-control": "no-cache"}


def read_admin_key(path: str | None) -> bytes | None:
    """The key in a file, None without one. Raises ValueError for a file that is not there or holds too short a key."""
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"admin_key_file {path} cannot be read: {error.strerror}") from error
    if len(key) < MIN_KEY_LENGTH:
        raise ValueError(f"admin_key_file {path} holds {len(key)} characters, a key needs at least {MIN_KEY_LENGTH}")
    return key


class Operations:
    """The operator's routes of one replica. `serve` is Serve's controller, None outside of Serve."""

    def __init__(
        self,
        model: ServedModel,
        replica: Replica,
        peers: Peers,
        serve: Serve | None = None,
        admin_key: bytes | None = None,
        names: tuple[str, str] = (APP, DEPLOYMENT),
    ) -> None:
        self._model = model
        self._peers = peers
        self._serve = serve
        self._admin_key = admin_key
        self._names = names
        self._trial = Trial(model, replica)
        self._page = (Path(__file__).with_name("ui.html")).read_text(encoding="utf-8")

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application, and the exchange between replicas to its life."""

        @asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            async with self._peers.exchanging():
                yield

        router = APIRouter(lifespan=lifespan)
        router.add_api_route("/metrics", self._metrics, methods=["GET"])
        router.add_api_route("/ui", self._ui, methods=["GET"])
        router.add_api_route("/ui/state", self._state, methods=["GET"])
        router.add_api_route("/ui/replicas", self._set, methods=["POST"])
        router.add_api_route("/ui/try", self._trial.respond, methods=["POST"])
        app.include_router(router)

    async def _metrics(self) -> Response:
        return Response(exposition(self._model.name, await self._peers.gather()), media_type=CONTENT_TYPE)

    async def _ui(self) -> Response:
        return HTMLResponse(self._page, headers=PAGE_HEADERS)

    async def _state(self) -> Response:
        reports, (scaling, problem) = await asyncio.gather(self._peers.gather(), self._scaling())
        up = [report for report, is_up in reports if is_up]
        body = {
            "model": self._model.name,
            "version": self._model.fingerprint,
            "time": time.time(),
            "replicas": {
                "running": len(up) if scaling is None else scaling.running,
                "wanted": None if scaling is None else scaling.wanted,
                "states": {} if scaling is None else scaling.states,
                "list": [_one(report) for report in up],
            },
            "scaling": {
                "kind": "unknown" if scaling is None else scaling.kind,
                "minimum": None if scaling is None else scaling.minimum,
                "maximum": None if scaling is None else scaling.maximum,
                "enabled": problem is None and self._admin_key is not None,
                "reason": problem or (NO_KEY if self._admin_key is None else None),
            },
            **_sums([report for report, _ in reports], up),
        }
        return JSONResponse(body, headers={"cache-control": "no-store"})

    async def _scaling(self) -> tuple[Scaling | None, str | None]:
        """What Serve says of the deployment, or why it says nothing."""
        if self._serve is None:
            return None, NO_SERVE
        try:
            return scaling_of(await asyncio.to_thread(self._serve.details), *self._names), None
        except Exception as error:  # the controller is being restarted, perhaps; the rest of the page still holds
            logger.warning("Serve's controller gave no answer: %s: %s", type(error).__name__, error)
            return None, f"Ray Serve's controller gave no answer: {type(error).__name__}: {error}"

    async def _set(self, request: Request) -> Response:
        if self._admin_key is None:
            raise ApiError(403, NO_KEY, code="admin_key_missing")
        if not hmac.compare_digest(request.headers.get("x-admin-key", "").encode(HEADER_ENCODING), self._admin_key):
            raise ApiError(401, "the admin key is missing or wrong", code="invalid_admin_key")
        if self._serve is None:
            raise unavailable(NO_SERVE)
        count = _wanted(await read_body(request, MAX_BODY_BYTES))
        try:
            before = await asyncio.to_thread(set_replicas, self._serve, count, count, *self._names)
        except ValueError as error:
            raise ApiError(409, str(error), code="cannot_scale") from error
        except RuntimeError as error:
            raise unavailable(f"Ray Serve's controller gave no answer: {error}") from error
        logger.info("the operations page set %d replicas; before: %s", count, before)
        return JSONResponse({"replicas": count, "before": before.wanted, "kind": before.kind}, status_code=202)


def _wanted(body: bytes) -> int:
    """The number in the body of a request to scale."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    count = fields.get("replicas") if isinstance(fields, dict) and fields.keys() == {"replicas"} else None
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_REPLICAS:
        message = f'the body must be {{"replicas": N}} with N from 1 to {MAX_REPLICAS}'
        raise ApiError(400, message, "replicas", "invalid_value")
    return count


def _one(report: Report) -> dict[str, Any]:
    """A replica's line on the page."""
    state = report.snapshot
    return {
        "name": report.replica,
        "running": state.running,
        "waiting": state.waiting,
        "rows": report.rows,
        "kv_usage": kv_usage(state),
        "tokens": state.num_tokens,
        "blocks": state.num_blocks,
        "tau": state.tau,
    }


def _sums(reports: list[Report], up: list[Report]) -> dict[str, Any]:
    """What holds now, over the replicas that are up, and what has happened, over all there have been."""
    pages = sum(report.snapshot.total_pages for report in up)
    states = [report.snapshot for report in reports]
    finished: Counter[str] = Counter()
    for state in states:
        finished.update(state.num_finished)
    slots = max((len(state.accepted_at) for state in states), default=0)
    at = [sum(state.accepted_at[slot] for state in states if slot < len(state.accepted_at)) for slot in range(slots)]
    return {
        "requests": {
            "running": sum(report.snapshot.running for report in up),
            "waiting": sum(report.snapshot.waiting for report in up),
            "finished": dict(finished),
        },
        "waiting_tokens": sum(report.snapshot.waiting_tokens for report in up),
        "kv_usage": sum(report.snapshot.total_pages - report.snapshot.free_pages for report in up) / max(1, pages),
        "totals": {
            "tokens": sum(state.num_tokens for state in states),
            "blocks": sum(state.num_blocks for state in states),
            "block_tokens": sum(state.num_block_tokens for state in states),
            "drafted": sum(state.num_drafted for state in states),
            "accepted": sum(state.num_accepted for state in states),
            "accepted_at": at,
        },
    }
