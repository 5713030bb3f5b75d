"""The Ray Serve application: one deployment whose replicas each load the models, decode and answer HTTP.

Place in the flow: `build_app` is what `serve run`, `serve deploy` and `pipelines/deploy.py` import. FastAPI
runs inside the replica, so a request makes one hop from the proxy, and a chunk one hop back.

    serve run serve_app.app:build_app checkpoint=/abs/path/train/lilicorr/final

A replica that is shut down gets no new requests and has `DRAIN_S` to finish those it has.
"""

# No `from __future__ import annotations` here: Serve reads the class that annotates the builder's argument.

import json
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve

from lilicorr.chat import render_prompt
from lilicorr.checkpoint import load_draft_model
from lilicorr.config import TargetConfig, YarnConfig, from_dict
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.target import Target, load_target
from serve_app.api import ServedModel, build_api
from serve_app.detokenize import token_table
from serve_app.replica import ReferenceEngine, Replica

DRAIN_S = 600.0
WARM_UP_TOKENS = 8


class AppArgs(BaseModel):
    """Arguments of the application, as they stand under `args` of a Serve config."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: str  # folder of a draft model, the same on every node
    target: str = "embedded"  # as `target.source` of a profile
    target_revision: str | None = None
    target_dtype: str = "float32"
    mask_token_id: int | None = None
    template_kwargs: dict[str, Any] = {"enable_thinking": False}
    model_name: str = "lilicorr"
    yarn: dict[str, Any] | None = None  # of the drafter, as `deploy.yarn` of a profile
    max_model_len: int | None = None  # prompt and answer together; None: the target's context
    num_replicas: int = Field(1, ge=1)
    gpus: float = Field(0.0, ge=0)  # per replica; 0 decodes on the CPU
    cpus: float = Field(1.0, ge=0)
    max_running: int = Field(4, ge=1)  # requests decoded in turn by one replica
    max_queue: int = Field(32, ge=0)  # requests waiting for their turn; more are answered 429
    max_ongoing_requests: int = Field(64, ge=1)  # what Serve sends to one replica at a time
    stall_s: float = Field(300.0, gt=0)  # a longer step counts as a dead replica
    version: str = ""  # of weights and code; a changed one is a new deployment

    @model_validator(mode="after")
    def _room_for_refusals(self) -> "AppArgs":
        if self.max_running + self.max_queue >= self.max_ongoing_requests:
            raise ValueError(
                f"max_running + max_queue = {self.max_running + self.max_queue} must be below max_ongoing_requests = "
                f"{self.max_ongoing_requests}: what exceeds the queue has to reach the replica to be answered 429"
            )
        return self


@serve.deployment(
    name="Endpoint",
    graceful_shutdown_timeout_s=DRAIN_S,
    health_check_period_s=10,
    health_check_timeout_s=30,
    max_constructor_retry_count=3,
)
@serve.ingress()
class Endpoint:
    """A replica: target, draft model, decoding thread and the HTTP side."""

    def __init__(self, args: AppArgs) -> None:
        target = _load_target(args)
        yarn = from_dict(YarnConfig, args.yarn, "yarn.") if args.yarn else None
        decoder = Decoder(target, load_draft_model(Path(args.checkpoint), target, yarn=yarn))
        self._model = _served_model(args, target)
        _warm_up(decoder, self._model)
        self._replica = Replica(
            ReferenceEngine(decoder, args.max_running), args.max_running + args.max_queue, args.stall_s
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the HTTP side once the replica is constructed."""
        return build_api(self._model, self._replica)

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._replica.check()


def _load_target(args: AppArgs) -> Target:
    """The target, capturing the layers that the draft model reads."""
    path = Path(args.checkpoint) / "config.json"
    if not path.is_file():
        raise ValueError(f"checkpoint {args.checkpoint} is not a draft model: config.json is missing")
    layer_ids = json.loads(path.read_text(encoding="utf-8")).get("dflash_config", {}).get("target_layer_ids")
    if not layer_ids:
        raise ValueError(f"{path}: field dflash_config.target_layer_ids is missing")
    config = TargetConfig(args.target, args.target_revision, args.target_dtype, args.mask_token_id)
    return load_target(config, "cuda" if args.gpus > 0 else "cpu", tuple(layer_ids))


def _served_model(args: AppArgs, target: Target) -> ServedModel:
    max_model_len = args.max_model_len or target.max_length
    if max_model_len > target.max_length:
        raise ValueError(f"max_model_len {max_model_len} is more than the target's context of {target.max_length}")
    return ServedModel(
        name=args.model_name,
        tokenizer=target.tokenizer,
        token_table=token_table(target.tokenizer),
        template_kwargs=args.template_kwargs,
        stop_ids=target.eos_ids,
        max_model_len=max_model_len,
        fingerprint=args.version,
        created=int(time.time()),
    )


def _warm_up(decoder: Decoder, model: ServedModel) -> None:
    """Decode a few tokens, so that what cannot work fails here and not in the first request."""
    prompt_ids = render_prompt(model.tokenizer, [{"role": "user", "content": "Hello"}], model.template_kwargs)
    decoder.generate(prompt_ids, SamplingParams(WARM_UP_TOKENS, temperature=1.0, top_p=0.9))


def build_app(args: AppArgs) -> serve.Application:
    """The application for `serve.run` or a Serve config's `import_path: serve_app.app:build_app`."""
    deployment = Endpoint.options(
        num_replicas=args.num_replicas,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        max_ongoing_requests=args.max_ongoing_requests,
    )
    return deployment.bind(args)
