"""How many replicas the load of the engines asks for: the policy of Serve's autoscaler.

Place in the flow: every replica gives `stats` to Serve (`record_autoscaling_stats`), Serve averages them over
`look_back_period_s` and asks `EnginePolicy` in its controller; delays, factors, minimum and maximum of
`autoscaling_config` are applied by Serve to what it answers.

Requests are a poor measure: one of 100 tokens and one of 4,000 count the same. The load of a replica is what runs, the
larger share of pages and of rows in use over the share that is meant to be used, and what waits, prompt tokens over
those that are meant to wait. The sum over replicas is the number of replicas wanted.

A config file names it as the application's `autoscaling_policy`: that one Serve ships by value from the application's
code to its controller, so this module imports nothing of the project. The policy of a deployment's
`autoscaling_config` would be imported where the file is checked, in the dashboard, which does not have this code.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve._private.common import DeploymentID
    from ray.serve.config import AutoscalingContext


def stats(running: int, rows: int, used_pages: int, total_pages: int, waiting_tokens: int) -> dict[str, float]:
    """What a replica reports to the autoscaler."""
    return {
        "kv_usage": used_pages / total_pages,
        "row_usage": running / rows,
        "rows": float(rows),
        "waiting_tokens": float(waiting_tokens),
    }


class EnginePolicy:
    """Replicas for a use of `target_usage` of pages and rows, with `target_waiting_tokens` waiting at each replica.

    Raises ValueError for a target out of range.
    """

    def __init__(self, target_usage: float = 0.8, target_waiting_tokens: float = 4096.0) -> None:
        if not 0 < target_usage <= 1:
            raise ValueError(f"target_usage must be above 0 and at most 1, got {target_usage}")
        if target_waiting_tokens <= 0:
            raise ValueError(f"target_waiting_tokens must be above 0, got {target_waiting_tokens}")
        self.target_usage = target_usage
        self.target_waiting_tokens = target_waiting_tokens

    def __call__(
        self, contexts: dict[DeploymentID, AutoscalingContext]
    ) -> tuple[dict[DeploymentID, int], dict[DeploymentID, dict[str, Any]]]:
        """The number of replicas of every deployment that scales, and no state to keep."""
        return {deployment: self.replicas(context) for deployment, context in contexts.items()}, {}

    def replicas(self, context: AutoscalingContext) -> int:
        """The number of replicas; while none has reported, as many as there are to be."""
        metrics = context.aggregated_metrics or {}
        rows = metrics.get("rows") or {}
        if not rows:
            return context.target_num_replicas
        load = sum(self.load({name: values[replica] for name, values in metrics.items() if replica in values})
                   for replica in rows)  # fmt: skip
        # What the proxies hold back has reached no engine, and its tokens are unknown: each takes a row.
        load += context.total_queued_requests / (self.target_usage * max(rows.values()))
        return max(1, math.ceil(load - 1e-9))

    def load(self, reported: dict[str, float]) -> float:
        """Of one replica: 1 where it has what it is meant to have."""
        usage = max(reported.get("kv_usage", 0.0), reported.get("row_usage", 0.0))
        return usage / self.target_usage + reported.get("waiting_tokens", 0.0) / self.target_waiting_tokens
