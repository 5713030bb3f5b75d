"""`serve_app.autoscaling`: replicas by what the engines hold and what waits; the module Serve ships by value."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from models import ROOT

from serve_app.autoscaling import EnginePolicy, stats


def wanted(*replicas: dict[str, float], queued: float = 0.0, target: int = 2, **settings: Any) -> int:
    """What the policy answers when these replicas report."""
    metrics: dict[str, dict[str, float]] = {}
    for name, reported in enumerate(replicas):
        for key, value in reported.items():
            metrics.setdefault(key, {})[str(name)] = value
    context = SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued, target_num_replicas=target)
    counts, state = EnginePolicy(**settings)({"Endpoint": context})
    assert counts.keys() == {"Endpoint"} and state == {}
    return counts["Endpoint"]


def one(running: int = 0, used: int = 0, waiting: int = 0) -> dict[str, float]:
    """A replica of 10 rows and 100 pages."""
    return stats(running, 10, used, 100, waiting)


@pytest.mark.parametrize(
    ("replicas", "count"),
    [
        ([one()], 1),
        ([one(), one(), one()], 1),
        ([one(running=8)], 1),  # as it is meant to be
        ([one(running=9)], 2),
        ([one(used=81)], 2),  # long requests fill the pages before the rows
        ([one(running=8, used=80)], 1),  # the larger share counts, not both
        ([one(running=8), one(running=8)], 2),
        ([one(running=4), one(running=4)], 1),
        ([one(running=4), one(running=5)], 2),
        ([one(running=10, waiting=1000)], 3),  # 1.25 for what runs, 1 for what waits
        ([one(running=10, waiting=3000), one()], 5),
    ],
)
def test_the_loads_add_up(replicas: list[dict[str, float]], count: int) -> None:
    assert wanted(*replicas, target_waiting_tokens=1000) == count


def test_requests_that_no_replica_has_count_by_rows() -> None:
    assert wanted(one(running=8), queued=8) == 2
    assert wanted(one(running=8), queued=9) == 3


def test_without_reports_nothing_changes() -> None:
    assert wanted(target=3) == 3
    context = SimpleNamespace(aggregated_metrics=None, total_queued_requests=5.0, target_num_replicas=2)
    assert EnginePolicy()({"Endpoint": context}) == ({"Endpoint": 2}, {})


@pytest.mark.parametrize("settings", [{"target_usage": 0}, {"target_usage": 1.1}, {"target_waiting_tokens": 0}])
def test_targets_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}.*{next(iter(settings.values()))}"):
        EnginePolicy(**settings)


def test_it_works_where_this_project_is_not_installed() -> None:
    """As in Serve's controller, which gets the class by value."""
    code = """
import sys, ray.cloudpickle as pickle
sys.path.insert(0, sys.argv[1])
import serve_app.autoscaling as module
pickle.register_pickle_by_value(module)
sys.stdout.buffer.write(pickle.dumps(module.EnginePolicy))
"""
    pickled = subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True, capture_output=True, cwd="/").stdout
    code = """
import sys, ray.cloudpickle as pickle
policy = pickle.loads(sys.stdin.buffer.read())(target_usage=0.5)
assert "serve_app" not in sys.modules
print(policy.load({"kv_usage": 0.25}))
"""
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, input=pickled, check=True, capture_output=True, cwd="/").stdout == b"0.5\n"
