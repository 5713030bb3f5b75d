"""Ray Serve's controller, asked from inside a replica.

Place in the flow: the operations page scales through it. It is what the dashboard's REST API does, without an address
that may not be reachable from the replica's node and without a token: the replica is part of the cluster. Serve has no
public function for either, so this depends on the release that pyproject.toml pins.
"""

from __future__ import annotations

import json
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

ANSWER_S = 5.0


class Controller:
    """As `dashboard.Dashboard`. Every method waits for the controller: call it from a thread, not the event loop.

    Raises RuntimeError where there is no controller or it does not answer within `ANSWER_S`; what it was asked to
    change it may change later.
    """

    def details(self) -> dict[str, Any]:
        """What Serve is doing, in the words of the dashboard's JSON: the controller's own has enumerations."""
        return json.loads(json.dumps(_ask("get_serve_instance_details")))

    def deploy(self, config: dict[str, Any]) -> None:
        """Make `config` the whole of what Serve runs."""
        _ask("apply_config", ServeDeploySchema.model_validate(config))

    def scale(self, app: str, deployment: str, num_replicas: int) -> None:
        """Want so many replicas of a deployment whose application has `external_scaler_enabled`."""
        _ask("update_deployment_replicas", DeploymentID(deployment, app), num_replicas)


def _ask(method: str, *arguments: Any) -> Any:
    """What the controller answers; without a limit, who waits for one that has gone would wait for ever."""
    try:
        client = _get_global_client()
        assert client is not None, "Serve does not run in this cluster"
        return ray.get(getattr(client._controller, method).remote(*arguments), timeout=ANSWER_S)
    except (GetTimeoutError, RayActorError, RayServeException) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
