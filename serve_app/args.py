"""Arguments of the application: what stands under `args` of a Serve config.

Place in the flow: `app.build_app` gets them, `served_model` builds models and engine from them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

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

# What is no setting of vLLM's, and what of vLLM's settings other arguments say.
OURS_ALONE = ("yarn", "max_queue", "max_body_bytes", "stall_s", "admin_key_file")
OUTSIDE_OF_ENGINE = {
    "model": "set target",
    "revision": "set target_revision",
    "served_model_name": "set model_name",
    "dtype": "set target_dtype",
    "max_model_len": "set max_model_len",
    "speculative_config": "it follows from checkpoint",
    "distributed_executor_backend": "a replica's GPUs are on one node",
    "api_key": "set api_key_file",
    "default_chat_template_kwargs": "set template_kwargs",
    "data_parallel_size": "set num_replicas or autoscaling_config, a replica is one engine",
    "config": "its settings stand in engine",
    # Ray Serve listens, not vLLM
    "host": "set http_options of the Serve config",
    "port": "set http_options of the Serve config",
    "uds": "set http_options of the Serve config",
    "ssl_keyfile": "set http_options of the Serve config",
    "ssl_certfile": "set http_options of the Serve config",
    "root_path": "set route_prefix of the Serve config",
}


class AppArgs(BaseModel):
    """Arguments of the application, as they stand under `args` of a Serve config."""

    model_config = ConfigDict(extra="forbid")

    backend: Literal["lilicorr", "vllm"] = "lilicorr"  # whose engine decodes: ours, or vLLM as it is (`vllm_backend`)
    checkpoint: str  # folder of a draft model, the same on every node
    target: str = "embedded"  # as `target.source` of a profile
    target_revision: str | None = None
    target_dtype: str = "float32"
    mask_token_id: int | None = None
    template_kwargs: JsonObject = {"enable_thinking": False}
    model_name: str = "lilicorr"
    yarn: OptionalJsonObject = None  # of the drafter, as `deploy.yarn` of a profile
    max_model_len: int | None = None  # prompt and answer together; None: the target's context
    engine: JsonObject = {}  # other fields of `lilicorr.config.EngineConfig` (max_running, ...), or arguments of vLLM
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
    def _fits_the_backend(self) -> AppArgs:
        if self.backend == "vllm":
            self._check_for_vllm()
        elif self.max_requests >= self.max_ongoing_requests:
            raise ValueError(
                f"engine.max_running + max_queue = {self.max_requests} must be below max_ongoing_requests = "
                f"{self.max_ongoing_requests}: what exceeds the queue has to reach the replica to be answered 429"
            )
        return self

    def _check_for_vllm(self) -> None:
        for name in OURS_ALONE:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with backend vllm: leave it out, got {getattr(self, name)!r}")
        if self.gpus < 1 or self.gpus % 1:
            raise ValueError(f"gpus must be a whole number of at least 1 with backend vllm, got {self.gpus}")
        for name, value in self.engine.items():
            if not name.isidentifier():  # "api-key" would pass for a setting that is refused as "api_key"
                raise ValueError(f"engine.{name} must be spelled with underscores: {name.strip('-').replace('-', '_')}")
            if name in OUTSIDE_OF_ENGINE:
                raise ValueError(f"engine.{name} stands outside of engine: {OUTSIDE_OF_ENGINE[name]}")
            if not isinstance(value, str | int | float | dict):
                raise ValueError(f"engine.{name} must be a text, a number, a bool or an object, got {value!r}")
        sizes = self.engine.get("tensor_parallel_size", int(self.gpus)), self.engine.get("pipeline_parallel_size", 1)
        if not all(type(size) is int for size in sizes) or sizes[0] * sizes[1] != self.gpus:
            raise ValueError(
                f"engine.tensor_parallel_size * engine.pipeline_parallel_size must be gpus = {self.gpus:g}, got {sizes}"
            )
