"""Set the number of replicas of the endpoint, whichever way it was deployed, and wait until they run.

Place in the flow: an operator's command, and what the operations page's control does.

    python -m serve_app.scale 3                     # three replicas
    python -m serve_app.scale 1..4                  # autoscaled endpoint: let the autoscaler choose again
    python -m serve_app.scale 3 --address http://HEAD:8265 --timeout 600

    deployed with                                what N does                               what MIN..MAX does
    autoscaling_config (config.yaml)             minimum = maximum = N                     minimum, maximum
    external_scaler_enabled (config.manual.yaml) the dashboard's scale request             refused
    neither (pipelines/deploy.py)                num_replicas of the deployment            refused

None of these restarts a replica that runs. The first and the last deploy the config of all applications again with
that one change. The address is --address, else RAY_API_SERVER_ADDRESS or RAY_DASHBOARD_ADDRESS, else port 8265 of this
machine; the token is found as `dashboard.cluster_token` says.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.dashboard import Dashboard, cluster_token, dashboard_address, wait_for

logger = logging.getLogger(__name__)

APP = "lilicorr"
DEPLOYMENT = "Endpoint"
TIMEOUT_S = 1800.0  # weights of a large target take minutes
AUTOSCALED, EXTERNAL, FIXED = "autoscaled", "external", "fixed"
SHARED_OPTIONS = ("proxy_location", "http_options", "grpc_options", "target_capacity")


class BeingBuiltError(ValueError):
    """Serve is building the application, as after its deployment, and it has no deployments until then."""


class Serve(Protocol):
    """Serve, by the dashboard or from inside."""

    def details(self) -> dict[str, Any]:
        """What Serve is doing."""

    def deploy(self, config: dict[str, Any]) -> None:
        """Make `config` the whole of what Serve runs."""

    def scale(self, app: str, deployment: str, num_replicas: int) -> None:
        """Want so many replicas of an externally scaled deployment."""


@dataclass(frozen=True)
class Scaling:
    """How a deployment is scaled, and how far it has come."""

    kind: str  # autoscaled | external | fixed
    minimum: int
    maximum: int
    wanted: int
    states: dict[str, int]  # replicas by state
    status: str  # of the application
    message: str

    @property
    def running(self) -> int:
        """Replicas that take requests."""
        return self.states.get("RUNNING", 0)

    def __str__(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items())) or "none"
        return f"{self.status}, {self.wanted} wanted, replicas: {states}" + (
            f"; {self.message}" if self.message else ""
        )


def scaling_of(details: dict[str, Any], app: str = APP, deployment: str = DEPLOYMENT) -> Scaling:
    """What `Serve.details` says of a deployment. Raises ValueError for one that is not there, BeingBuiltError for one
    that is not there yet."""
    application, config = _application(details, app)
    found = application["deployments"].get(deployment)
    if found is None:
        names = ", ".join(sorted(application["deployments"])) or f"none; it is {application.get('status')}"
        building = application.get("status") == "DEPLOYING" and not application["deployments"]
        kind = BeingBuiltError if building else ValueError
        raise kind(f"the application {app!r} has no deployment {deployment!r}; it has: {names}")
    autoscaling = found["deployment_config"].get("autoscaling_config")
    wanted = found.get("target_num_replicas", 0)
    if autoscaling:
        kind, minimum, maximum = AUTOSCALED, autoscaling["min_replicas"], autoscaling["max_replicas"]
    else:
        kind = EXTERNAL if config.get("external_scaler_enabled") else FIXED
        minimum = maximum = wanted
    return Scaling(
        kind=kind,
        minimum=minimum,
        maximum=maximum,
        wanted=wanted,
        states=dict(Counter(replica["state"] for replica in found.get("replicas", []))),
        status=str(application.get("status")),
        message="; ".join(filter(None, (application.get("message"), found.get("message")))),
    )


def set_replicas(serve: Serve, minimum: int, maximum: int, app: str = APP, deployment: str = DEPLOYMENT) -> Scaling:
    """Want so many replicas, or for different bounds as many as the autoscaler chooses; returns what was before.

    Raises ValueError for bounds out of order, a deployment that is not there, an application that was not deployed from
    a config, and different bounds where there is no autoscaler.
    """
    if not 1 <= minimum <= maximum:
        raise ValueError(f"replicas must be at least 1 and MIN at most MAX, got {minimum}..{maximum}")
    details = serve.details()
    before = scaling_of(details, app, deployment)
    if before.kind != AUTOSCALED and minimum != maximum:
        raise ValueError(
            f"{app}/{deployment} has no autoscaler ({before.kind}): give one number, or deploy serve_app/config.yaml"
        )
    if before.kind == EXTERNAL:
        serve.scale(app, deployment, minimum)
    else:
        serve.deploy(_changed(details, app, deployment, before, minimum, maximum))
    return before


def wait_until_built(serve: Serve, timeout_s: float, app: str = APP, deployment: str = DEPLOYMENT) -> None:
    """Poll until the deployment is there: a config that is deployed while Serve builds begins the building again.

    Raises ValueError as `scaling_of`, RuntimeError as `wait_for`.
    """

    def look() -> bool | str:
        try:
            scaling_of(serve.details(), app, deployment)
        except BeingBuiltError as error:
            return str(error)
        return True

    wait_for(look, f"{app}/{deployment}", timeout_s)


def wait_until_scaled(
    serve: Serve, minimum: int, maximum: int, timeout_s: float, app: str = APP, deployment: str = DEPLOYMENT
) -> Scaling:
    """Poll until as many replicas run as are wanted, within the bounds.

    A dashboard too busy to answer is asked again, and an application that somebody deploys meanwhile is waited for.

    Raises RuntimeError if the application fails, or with its state after `timeout_s`.
    """
    last: list[Scaling] = []

    def look() -> bool | str:
        try:
            now = scaling_of(serve.details(), app, deployment)
        except (RuntimeError, BeingBuiltError) as error:
            return str(error)
        if now.status == "DEPLOY_FAILED":
            raise RuntimeError(f"{app}/{deployment} failed: {now}")
        last[:] = [now]
        return (minimum <= now.wanted <= maximum and now.running == now.wanted) or str(now)

    wait_for(look, f"{app}/{deployment}", timeout_s)
    return last[0]


def _application(details: dict[str, Any], app: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An application of `details`, and the config it was deployed with."""
    applications = details.get("applications") or {}
    if app not in applications:
        raise ValueError(f"Serve runs no application {app!r}; it runs: {', '.join(sorted(applications)) or 'none'}")
    return applications[app], applications[app].get("deployed_app_config") or {}


def _changed(
    details: dict[str, Any], app: str, deployment: str, before: Scaling, minimum: int, maximum: int
) -> dict[str, Any]:
    """The config of all that Serve runs, with other bounds for one deployment. A deployment of a config replaces all of
    it, so the other applications have to be in it."""
    if not _application(details, app)[1]:
        raise ValueError(f"the application {app!r} was not deployed from a config file; deploy serve_app/config.yaml")
    configs = [application.get("deployed_app_config") for application in details["applications"].values()]
    config = {name: details[name] for name in SHARED_OPTIONS if details.get(name) is not None}
    config["applications"] = copy.deepcopy([c for c in configs if c])
    application = next(c for c in config["applications"] if c["name"] == app)
    overrides = application.setdefault("deployments", [])
    override = next((o for o in overrides if o["name"] == deployment), None)
    if override is None:
        override = {"name": deployment}
        overrides.append(override)
    if before.kind == FIXED:
        override["num_replicas"] = minimum
    else:
        bounds = {"min_replicas": minimum, "max_replicas": maximum}
        initial = {"initial_replicas": min(max(before.wanted, minimum), maximum)}
        override["autoscaling_config"] = (override.get("autoscaling_config") or {}) | bounds | initial
    return config


def _bounds(text: str) -> tuple[int, int]:
    """`3` or `1..4`."""
    first, dots, second = text.partition("..")
    try:
        return int(first), int(second if dots else first)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number or MIN..MAX, got {text!r}") from error


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module's first lines."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.scale", description="Replicas of the endpoint.")
    parser.add_argument("replicas", type=_bounds, help="N, or MIN..MAX for an autoscaled endpoint")
    parser.add_argument("--address", default=dashboard_address(), help="of the Ray dashboard (default: %(default)s)")
    parser.add_argument("--app", default=APP, help="default: %(default)s")
    parser.add_argument("--deployment", default=DEPLOYMENT, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds to wait (default: %(default)s)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    minimum, maximum = options.replicas
    dashboard, name = Dashboard(options.address, cluster_token()), (options.app, options.deployment)
    try:
        wait_until_built(dashboard, options.timeout, *name)
        before = set_replicas(dashboard, minimum, maximum, *name)
        logger.info("%s/%s is %s; before: %s", *name, before.kind, before)
        after = wait_until_scaled(dashboard, minimum, maximum, options.timeout, *name)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    logger.info("now: %s", after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
