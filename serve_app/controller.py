"""Ray Serve's controller, asked from inside a replica.

Place in the flow: the operations page scales through it. It is what the dashboard's REST API does, without an address
that may not be reachable from the replica's node and without a token: the replica is part of the cluster. Serve has no
public function for either, so this depends on the release that pyproject.toml pins.
"""

from __future__ import annotations

import json
from typing import Any

import ray
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema


class Controller:
    """As `dashboard.Dashboard`. Every method waits for the controller: call it from a thread, not the event loop."""

    def details(self) -> dict[str, Any]:
        """What Serve is doing, in the words of the dashboard's JSON: the controller's own has enumerations."""
        return json.loads(json.dumps(_client().get_serve_details()))

    def deploy(self, config: dict[str, Any]) -> None:
        """Make `config` the whole of what Serve runs."""
        _client().deploy_apps(ServeDeploySchema.model_validate(config))

    def scale(self, app: str, deployment: str, num_replicas: int) -> None:
        """Want so many replicas of a deployment whose application has `external_scaler_enabled`."""
        wanted = _client()._controller.update_deployment_replicas.remote(DeploymentID(deployment, app), num_replicas)
        ray.get(wanted)


def _client() -> ServeControllerClient:
    client = _get_global_client()
    assert client is not None, "Serve does not run in this cluster"
    return client
