"""Ray Serve by the REST API of a cluster's dashboard, and the token it asks for.

Place in the flow: `pipelines/deploy.py` deploys through it, `python -m serve_app.scale` scales. Ray 2.60 asks for a
token wherever RAY_AUTH_MODE is `token`, and its own local clusters are in that mode by default.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

APPLICATIONS = "/api/serve/applications/"
SCALE = "/api/v1/applications/{app}/deployments/{deployment}/scale"
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
REQUEST_TIMEOUT_S = 180.0  # the first answer of a dashboard on a loaded machine takes a minute
SHUTDOWN_TIMEOUT_S = 120.0
POLL_S = 1.0
REPORT_S = 15.0


class Dashboard:
    """The REST API of a Ray cluster. Raises RuntimeError with what it answered if that is an error."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        self._token = token

    def details(self) -> dict[str, Any]:
        """What Serve is doing; without `http_options` it is not running."""
        return json.loads(self._ask("GET", APPLICATIONS))

    def deploy(self, config: dict[str, Any]) -> None:
        """Make `config` the whole of what Serve runs."""
        self._ask("PUT", APPLICATIONS, config)

    def scale(self, app: str, deployment: str, num_replicas: int) -> None:
        """Want so many replicas of a deployment whose application has `external_scaler_enabled`."""
        path = SCALE.format(app=urllib.parse.quote(app, safe=""), deployment=urllib.parse.quote(deployment, safe=""))
        self._ask("POST", path, {"target_num_replicas": num_replicas})

    def shut_down_serve(self) -> None:
        """End Serve, and wait until it has ended."""
        self._ask("DELETE", APPLICATIONS)
        wait_for(lambda: not self.details().get("http_options"), f"the end of Serve of {self.url}", SHUTDOWN_TIMEOUT_S)

    def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code in (401, 403):
                text += "; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to the file that holds the cluster's token"
            raise RuntimeError(f"the Ray dashboard {self.url} answered {error.code} to {method}: {text}") from error
        except (OSError, http.client.HTTPException) as error:  # the second one: it ended in the middle of its answer
            raise RuntimeError(f"the Ray dashboard {self.url} does not answer: {error}") from error


def wait_for(look: Callable[[], bool | str], what: str, timeout_s: float) -> None:
    """Look every `POLL_S` until `look` says True; a text is how far it is, which the log gets every `REPORT_S`.

    Raises what `look` raises, and RuntimeError with its last words after `timeout_s`.
    """
    started = reported = time.monotonic()
    while (found := look()) is not True:
        now = time.monotonic()
        if now - started > timeout_s:
            raise RuntimeError(f"{what} is not there after {timeout_s:.0f} s: {found or 'no sign of it'}")
        if now - reported > REPORT_S:
            reported = now
            logger.info("after %.0f s, waiting for %s: %s", now - started, what, found)
        time.sleep(POLL_S)


def cluster_token() -> str | None:
    """The token of the cluster, found where Ray's own commands look for it; None where authentication is off."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return None
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def dashboard_address() -> str:
    """The dashboard that Ray's own commands would talk to, else the one on this machine."""
    named = (os.environ.get(name) for name in ("RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS"))
    return next(filter(None, named), DEFAULT_ADDRESS)
