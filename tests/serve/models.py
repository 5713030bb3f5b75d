"""A small random target and draft model on disk, and what a local Ray instance needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lilicorr.checkpoint import save_draft_model
from lilicorr.config import DrafterConfig, TargetConfig
from lilicorr.draft_model import build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.target import Target, default_layer_ids, load_target
from pipelines import local

ROOT = Path(__file__).parents[2]
DRAFTER = DrafterConfig(num_layers=2, block_size=4, num_candidates=3)
HEAD = {"hidden_size": 16, "num_heads": 2, "factor_dim": 8}


def load(target: Path) -> Target:
    return load_target(TargetConfig(str(target)), layer_ids=default_layer_ids(6, DRAFTER.num_layers))


def save_random_checkpoint(
    folder: Path,
    target: Path,
    seed: int,
    head: str = "lilicorr",
    settings: dict[str, Any] = HEAD,
    drafter: DrafterConfig = DRAFTER,
) -> None:
    loaded = load(target)
    torch.manual_seed(seed)
    shape = drafter_shape(drafter, loaded.config)
    spec = block_spec(drafter, loaded.config, loaded.mask_token_id, HEADS[head].layouts[0])
    draft_model = build_draft_model(shape, spec, head, settings, loaded)
    save_draft_model(folder, draft_model, {}, dtype="float32")


def deploy(target: Path, checkpoint: Path, **arguments: Any) -> None:
    """Make the real application what Serve runs, under the name `tiny`, and wait until all of it is of this kind."""
    from ray import serve

    from serve_app.app import AppArgs, build_app

    named = {"checkpoint": str(checkpoint), "target": str(target), "model_name": "tiny", "cpus": 0.5} | arguments
    serve.run(build_app(AppArgs(**named)), name="lilicorr", route_prefix="/", external_scaler_enabled=True)


@contextmanager
def serving(target: Path, checkpoint: Path, **arguments: Any) -> Iterator[str]:
    """The application on the Ray instance of this process; yields its URL."""
    from ray import serve

    port = local.free_port(set())
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    deploy(target, checkpoint, **arguments)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def running_replicas() -> list[dict[str, Any]]:
    """What this process's Serve says of the replicas that are running."""
    from serve_app.controller import Controller

    deployments = Controller().details()["applications"]["lilicorr"]["deployments"]  # none while it is being built
    replicas = deployments["Endpoint"]["replicas"] if deployments else []
    return [replica for replica in replicas if replica["state"] == "RUNNING"]


def replica_pids() -> list[int]:
    """The processes of those replicas."""
    return sorted(replica["pid"] for replica in running_replicas())
