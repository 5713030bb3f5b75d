"""The API with the operator's routes over a fake engine, a Serve that is a script, and reports to make others from."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

from fakes import EchoEngine, echo_model, make_app
from fastapi import FastAPI

from serve_app.guard import Limits
from serve_app.metrics import Report
from serve_app.operations import Operations
from serve_app.peers import Ask, Peers
from serve_app.recorder import HISTOGRAMS, Histogram
from serve_app.replica import Replica, Snapshot
from serve_app.served_model import ServedModel

ADMIN_KEY = b"a key for the tests"
SNAPSHOT = Snapshot(
    running=3,
    decoding=2,
    waiting=2,
    waiting_tokens=70,
    total_pages=10,
    free_pages=4,
    num_steps=20,
    num_tokens=100,
    num_prompt_tokens=300,
    num_cached_tokens=128,
    num_preemptions=1,
    num_blocks=30,
    num_block_tokens=90,
    num_drafts=29,
    num_drafted=145,
    accepted_at=(25, 20, 15, 0, 0),
    stage_seconds=(0.5, 1.0, 4.0, 0.25),
    num_finished={"stop": 4, "abort": 1},
)


def report(name: str, at: float | None = None, **changes: Any) -> Report:
    """A replica's report, of now and with SNAPSHOT's values where nothing else is said."""
    histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
    at, reloads = time.time() if at is None else at, {"refused": 2}
    return Report(name, at, 8, replace(SNAPSHOT, **changes), histograms, num_weight_reloads=reloads)


def application(**changes: Any) -> dict[str, Any]:
    """The config of an autoscaled application."""
    endpoint = {
        "name": "Endpoint",
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "upscale_delay_s": 7.0},
    }
    return {"name": "lilicorr", "import_path": "serve_app.app:build_app", "deployments": [endpoint], **changes}


class FakeServe:
    """Serve by a script: what it is told to want runs one poll later."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = application() if config is None else config
        self.other = {"name": "other", "import_path": "other:app"}
        self.wanted, self.running = 1, 1
        self.status, self.message = "RUNNING", ""
        self.num_building = 0  # polls until the application is built
        self.deployed: list[dict[str, Any]] = []
        self.scaled: list[tuple[str, str, int]] = []

    def details(self) -> dict[str, Any]:
        states = self.running * ["RUNNING"] + (self.wanted - self.running) * ["STARTING"]
        self.running = self.wanted
        override = next(iter(self.config.get("deployments", [])), {})
        endpoint = {
            "target_num_replicas": self.wanted,
            "deployment_config": {"autoscaling_config": override.get("autoscaling_config")},
            "replicas": [{"state": state} for state in states],
            "message": self.message,
        }
        applications = {
            "lilicorr": {
                "status": self.status,
                "message": "",
                "deployments": {"Endpoint": endpoint},
                "deployed_app_config": self.config,
            },
            "other": {"status": "RUNNING", "deployments": {}, "deployed_app_config": self.other},
        }
        if self.num_building > 0:
            self.num_building -= 1
            applications["lilicorr"] |= {"status": "DEPLOYING", "deployments": {}}
        options = {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": 8000}}
        return copy.deepcopy({**options, "grpc_options": None, "applications": applications})

    def deploy(self, config: dict[str, Any]) -> None:
        self.deployed.append(config)
        self.config = next(application for application in config["applications"] if application["name"] == "lilicorr")
        (override,) = self.config["deployments"]
        scaling = override.get("autoscaling_config")
        self.wanted = scaling["initial_replicas"] if scaling else override["num_replicas"]

    def scale(self, app: str, deployment: str, num_replicas: int) -> None:
        self.scaled.append((app, deployment, num_replicas))
        self.wanted = num_replicas


def operated_app(
    engine: EchoEngine,
    serve: FakeServe | None = None,
    admin_key: bytes | None = ADMIN_KEY,
    ask: Ask | None = None,
    limits: Limits | None = None,
) -> tuple[FastAPI, Replica]:
    """The API with the operator's routes; close the replica afterwards."""
    app, replica = make_app(engine, limits=limits)
    add_operations(app, echo_model(), replica, engine.max_running, ask, serve, admin_key)
    return app, replica


def add_operations(
    app: FastAPI,
    model: ServedModel,
    replica: Replica,
    num_rows: int,
    ask: Ask | None = None,
    serve: FakeServe | None = None,
    admin_key: bytes | None = None,
) -> None:
    """Add the operator's routes of a replica with so many rows."""

    def own() -> Report:
        return Report("own", time.time(), num_rows, replica.snapshot(), replica.recorder.histograms())

    Operations(model, replica, Peers(own, ask), serve, admin_key).add_to(app)
