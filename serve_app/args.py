"""Arguments of the application: what stands under `args` of a Serve config.

Place in the flow: `app.build_app` gets them, `served_model` builds models and engine from them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lilicorr.config import EngineConfig, from_dict


def _object(value: Any) -> Any:
    """An object as it is, or as JSON: `serve run` passes nothing but strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object, got {value!r}: {error}") from error


JsonObject = Annotated[dict[str, Any], BeforeValidator(_object)]
OptionalJsonObject = Annotated[dict[str, Any] | None, BeforeValidator(_object)]


class AppArgs(BaseModel):
    """Arguments of the application, as they stand under `args` of a Serve config."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: str  # folder of a draft model, the same on every node
    target: str = "embedded"  # as `target.source` of a profile
    target_revision: str | None = None
    target_dtype: str = "float32"
    mask_token_id: int | None = None
    template_kwargs: JsonObject = {"enable_thinking": False}
    model_name: str = "lilicorr"
    yarn: OptionalJsonObject = None  # of the drafter, as `deploy.yarn` of a profile
    max_model_len: int | None = None  # prompt and answer together; None: the target's context
    engine: JsonObject = {}  # the other fields of `lilicorr.config.EngineConfig`: max_running, num_pages, ...
    num_replicas: int = Field(1, ge=1)
    gpus: float = Field(0.0, ge=0)  # per replica; 0 decodes on the CPU
    cpus: float = Field(1.0, ge=0)
    max_queue: int = Field(64, ge=0)  # requests waiting for a row; more are answered 429
    max_ongoing_requests: int = Field(128, ge=1)  # what Serve sends to one replica at a time
    max_queued_requests: int = Field(256, ge=1)  # what Serve's proxy holds back, as while no replica runs
    max_body_bytes: int = Field(4 * 2**20, ge=1)  # of a request; larger ones are answered 413
    api_key_file: str | None = None  # keys, one a line, of which a request must have one; the same on every node
    stall_s: float = Field(300.0, gt=0)  # a longer step counts as a dead replica
    admin_key_file: str | None = None  # the key that setting replicas on the page /ui asks for; the same on every node
    version: str = ""  # of weights and code; a changed one is a new deployment; empty: the hash of the checkpoint

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's configuration. Raises ValueError for a field that it does not have or a value out of range."""
        if "max_model_len" in self.engine:
            raise ValueError("engine.max_model_len stands outside of engine: set max_model_len")
        return replace(from_dict(EngineConfig, self.engine, "engine."), max_model_len=self.max_model_len)

    @property
    def max_requests(self) -> int:
        """Requests that one replica takes, running and waiting."""
        return self.engine_config.max_running + self.max_queue

    @model_validator(mode="after")
    def _room_for_refusals(self) -> AppArgs:
        if self.max_requests >= self.max_ongoing_requests:
            raise ValueError(
                f"engine.max_running + max_queue = {self.max_requests} must be below max_ongoing_requests = "
                f"{self.max_ongoing_requests}: what exceeds the queue has to reach the replica to be answered 429"
            )
        return self
