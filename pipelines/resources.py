"""Whether a stage can ever have what it asks Ray for, on a cluster that may still have to grow.

Place in the flow: `regenerate`, `train` and `evaluate` ask before they start anything; what fits waits for its nodes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
NODE_WAIT_S = 1800  # for an autoscaler to start nodes; Ray Train's own minute ends before a GPU node is there
MAXIMUM_VARIABLE = "LILICORR_MAX_RESOURCES"  # CPU=768,GPU=32: of all nodes an autoscaler may have; set on the head


def check_resources(count: int, what: str, each: dict[str, float], options: str) -> None:
    """Raise ValueError where the cluster, grown as far as its autoscaler may, has less than `count` times `each`.

    Ray 2.60's own autoscalers tell nobody how far they may go, so the cluster's file says it in MAXIMUM_VARIABLE;
    what a platform has reported to Ray itself counts as well. `what` is counted and `options` are the config keys to
    lower, for the message.
    """
    import ray
    from ray._private.state import state

    reported = state.get_max_resources_from_cluster_config() or {}
    known = (ray.cluster_resources(), reported, declared_maximum())
    for name, amount in each.items():
        wanted, most = count * amount, max(resources.get(name, 0.0) for resources in known)
        if wanted > most:
            raise ValueError(
                f"{count} {what} of {amount:g} {name} each need {wanted:g} {name}, the cluster has {most:g}; lower "
                f"{options}, add nodes, or give {MAXIMUM_VARIABLE} on the head what its autoscaler may have"
            )


def declared_maximum() -> dict[str, float]:
    """MAXIMUM_VARIABLE by resource, nothing where it is not set. Raises ValueError for a text that is none."""
    text = os.environ.get(MAXIMUM_VARIABLE, "")
    if not text:
        return {}
    found: dict[str, float] = {}
    for name, _, amount in (part.partition("=") for part in text.split(",")):
        try:
            name, number = name.strip(), float(amount)
        except ValueError:
            number = math.nan
        if not name or name in found or not 0 <= number < math.inf:
            raise ValueError(f"{MAXIMUM_VARIABLE} must be like CPU=768,GPU=32, got {text!r}")
        found[name] = number
    return found


@contextlib.contextmanager
def patience(all_workers: bool) -> Iterator[None]:
    """Have the controller that Ray Train starts meanwhile wait NODE_WAIT_S for its workers, unless the user says.

    Where not `all_workers` are needed Ray's minute stays: it ends the wait for a node that is lost, and fewer start.
    """
    ours = all_workers and START_TIMEOUT not in os.environ
    if ours:
        os.environ[START_TIMEOUT] = str(NODE_WAIT_S)  # one of those that Ray hands to its controller
    try:
        yield
    finally:
        if ours:
            del os.environ[START_TIMEOUT]
