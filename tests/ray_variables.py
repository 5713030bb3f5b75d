"""The variables under which the tests start Ray, as the tests' own processes and as commands."""

from __future__ import annotations

RAY_VARIABLES = {
    "RAY_AUTH_MODE": "disabled",  # the default writes a token into the home folder
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback interface only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # the default of 15 starves the workers on a machine with other work
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_raylet_start_wait_time_s": "600",  # a busy machine is slow, not broken
    "RAY_worker_register_timeout_seconds": "600",
}
