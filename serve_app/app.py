"""The Ray Serve application: one deployment whose replicas each load the models, decode and answer HTTP.

Place in the flow: `build_app` is what `serve run`, `serve deploy` and `pipelines/deploy.py` import. FastAPI
runs inside the replica, so a request makes one hop from the proxy, and a chunk one hop back.

    serve run serve_app.app:build_app checkpoint=/abs/path/train/lilicorr/final

Serve sends nothing new to a replica that is to go, and waits up to `DRAIN_S` until its requests are answered.
"""

# No `from __future__ import annotations` here: Serve reads the class that annotates the builder's argument.

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig

from serve_app import autoscaling
from serve_app.api import build_api
from serve_app.args import AppArgs
from serve_app.controller import Controller
from serve_app.guard import Limits, read_keys
from serve_app.metrics import Report
from serve_app.operations import Operations, read_admin_key
from serve_app.peers import Peers, Plain
from serve_app.reload import Reloader
from serve_app.replica import Replica
from serve_app.scale import DEPLOYMENT
from serve_app.served_model import check_weights, open_model
from serve_app.vllm_backend import VLLMEndpoint, serve_arguments

DRAIN_S = 600.0
RETRY_AFTER_S = 5.0  # after a refusal of the proxy, whose queue fills while no replica runs


deployed = serve.deployment(
    name=DEPLOYMENT,
    graceful_shutdown_timeout_s=DRAIN_S,
    health_check_period_s=10,
    health_check_timeout_s=30,
    max_constructor_retry_count=3,
    backpressure_config=BackpressureConfig(status_code=503, retry_after_s=RETRY_AFTER_S),
)


@deployed
@serve.ingress()
class Endpoint:
    """A replica: target, draft model, decoding thread and the HTTP side."""

    def __init__(self, args: AppArgs) -> None:
        self._limits = Limits(args.max_body_bytes, read_keys(args.api_key_file), behind_proxy=True)
        admin_key = read_admin_key(args.admin_key_file)
        self._model, engine = open_model(args)
        self._rows = args.engine_config.max_running
        self._replica = Replica(engine, args.max_requests, args.stall_s)
        self._reloader = Reloader(args, engine, self._model, self._replica)
        context = serve.get_replica_context()
        self._name, names = context.replica_id.unique_id, (context.app_name, context.deployment)
        self._peers = Peers(self._report, self._ask_others)
        self._operations = Operations(self._model, self._replica, self._peers, Controller(), admin_key, names)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the HTTP side once the replica is constructed."""
        app = build_api(self._model, self._replica, self._limits)
        self._operations.add_to(app)
        return app

    def __del__(self) -> None:
        """Serve calls it when the requests of a replica that shuts down are answered, or their time is over."""
        if hasattr(self, "_replica"):  # else the models could not be loaded
            self._replica.close()

    async def reconfigure(self, user_config: Any, rank: Any) -> None:
        """Serve calls it for another `user_config`, see `reload`; where it asks for `rank`, for one taken away, too."""
        await self._reloader.apply(user_config)

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._replica.check()

    async def exchange(self, report: Plain) -> dict[str, Plain]:
        """Another replica's report for all that are known here, see `peers`."""
        return self._peers.exchange(report)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler's policy reads, see `autoscaling`."""
        state = self._replica.snapshot()
        used = state.total_pages - state.free_pages
        return autoscaling.stats(state.running, self._rows, used, state.total_pages, state.waiting_tokens)

    def _report(self) -> Report:
        state, histograms = self._replica.snapshot(), self._replica.recorder.histograms()
        reloads = dict(self._reloader.counts)
        return Report(self._name, time.time(), self._rows, state, histograms, num_weight_reloads=reloads)

    async def _ask_others(self, report: Plain) -> Sequence[dict[str, Plain] | BaseException]:
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return await handle.broadcast("exchange", report).results_async(return_exceptions=True)


def build_app(args: AppArgs) -> serve.Application:
    """The application for `serve.run` or a Serve config's `import_path: serve_app.app:build_app`.

    Raises ValueError for a checkpoint that was not made for the target: Serve then leaves what runs as it is.
    """
    if args.backend == "vllm":
        serve_arguments(args)
    else:
        check_weights(args)
    chosen = deployed(VLLMEndpoint) if args.backend == "vllm" else Endpoint
    deployment = chosen.options(
        num_replicas=args.num_replicas,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        max_ongoing_requests=args.max_ongoing_requests,
        max_queued_requests=args.max_queued_requests,
    )
    return deployment.bind(args)
