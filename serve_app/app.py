"""The Ray Serve application: one deployment whose replicas each load the models, decode and answer HTTP.

Place in the flow: `build_app` is what `serve run`, `serve deploy` and `pipelines/deploy.py` import. FastAPI
runs inside the replica, so a request makes one hop from the proxy, and a chunk one hop back.

    serve run serve_app.app:build_app checkpoint=/abs/path/train/lilicorr/final

A replica that is shut down gets no new requests and has `DRAIN_S` to finish those it has.
"""

# No `from __future__ import annotations` here: Serve reads the class that annotates the builder's argument.

import time

from fastapi import FastAPI
from ray import serve

from serve_app import autoscaling
from serve_app.api import build_api
from serve_app.args import AppArgs
from serve_app.controller import Controller
from serve_app.guard import Limits, read_keys
from serve_app.metrics import Report
from serve_app.operations import Operations, read_admin_key
from serve_app.peers import Peers
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
        admin_key = read_admin_key(args.admin_key_file)
        self._model, engine = open_model(args)
        self._rows = args.engine_config.max_running
        self._replica = Replica(engine, args.max_requests, args.stall_s)
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
            self._replica.drain()
            self._replica.close()

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._replica.check()

    async def exchange(self, report: Report) -> dict[str, Report]:
        """Another replica's report for all that are known here, see `peers`."""
        return self._peers.exchange(report)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler's policy reads, see `autoscaling`."""
        state = self._replica.snapshot()
        used = state.total_pages - state.free_pages
        return autoscaling.stats(state.running, self._rows, used, state.total_pages, state.waiting_tokens)

    def _report(self) -> Report:
        recorder = self._replica.recorder
        return Report(self._name, time.time(), self._rows, self._replica.snapshot(), recorder.histograms())

    async def _ask_others(self, report: Report) -> list[dict[str, Report]]:
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return await handle.broadcast("exchange", report).results_async()


def build_app(args: AppArgs) -> serve.Application:
    """The application for `serve.run` or a Serve config's `import_path: serve_app.app:build_app`."""
    deployment = Endpoint.options(
        num_replicas=args.num_replicas,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        max_ongoing_requests=args.max_ongoing_requests,
    )
    return deployment.bind(args)
