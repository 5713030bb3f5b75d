"""The Ray Serve application: one deployment whose replicas each load the models, decode and answer HTTP.

Place in the flow: `build_app` is what `serve run`, `serve deploy` and `pipelines/deploy.py` import. FastAPI
runs inside the replica, so a request makes one hop from the proxy, and a chunk one hop back.

    serve run serve_app.app:build_app checkpoint=/abs/path/train/lilicorr/final

A replica that is shut down gets no new requests and has `DRAIN_S` to finish those it has.
"""

# No `from __future__ import annotations` here: Serve reads the class that annotates the builder's argument.

from fastapi import FastAPI
from ray import serve

from serve_app.api import build_api
from serve_app.args import AppArgs
from serve_app.guard import Limits, read_keys
from serve_app.replica import Replica
from serve_app.served_model import open_model

DRAIN_S = 600.0


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
        self._limits = Limits(args.max_body_bytes, read_keys(args.api_key_file))
        self._model, engine = open_model(args)
        self._replica = Replica(engine, args.max_requests, args.stall_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the HTTP side once the replica is constructed."""
        return build_api(self._model, self._replica, self._limits)

    def __del__(self) -> None:
        """Serve calls it when the requests of a replica that shuts down are answered, or their time is over."""
        if hasattr(self, "_replica"):  # else the models could not be loaded
            self._replica.drain()
            self._replica.close()

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._replica.check()


def build_app(args: AppArgs) -> serve.Application:
    """The application for `serve.run` or a Serve config's `import_path: serve_app.app:build_app`."""
    deployment = Endpoint.options(
        num_replicas=args.num_replicas,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        max_ongoing_requests=args.max_ongoing_requests,
    )
    return deployment.bind(args)
