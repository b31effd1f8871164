"""The environment that the embedded cluster's processes run in."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from service.embedded.processes import CLUSTER_DIR_VARIABLE

PRELOADED_MODULES = (
    "torch",
    "torch._dynamo",
    "ray.train.torch",
    "ray.train.v2._internal.execution.worker_group.worker",
    "train_fn.worker",
    "train_fn.loop",
)
"""What a training process imports anyway: a worker that waits idle has them done. One that is missing is logged and passed over."""

WORKER_NODE_VARIABLES = {"RAY_preload_python_modules": ",".join(PRELOADED_MODULES)}
"""Only for nodes that train: the head starts small actors, which should not wait for torch."""

_NOT_INHERITED = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR", "RAY_RUNTIME_ENV_HOOK", "RAY_JOB_CONFIG_JSON_ENV_VAR")

_FIXED = {
    "RAY_AUTH_MODE": "token",
    # Ray turns 127.0.0.1 into the machine's outer address unless clusters are off: everything here stays on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}

_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    # Train aborts cleanly on SIGINT only.
    "RAY_JOB_STOP_SIGNAL": "SIGINT",
    "RAY_JOB_STOP_WAIT_TIME_S": "10",
    # One machine, no network between: a silent node is a dead one.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # Idle workers with torch imported are the pool that makes recovery fast: keep them.
    "RAY_idle_worker_killing_time_threshold_ms": "1000000000",
}


def cluster_environment(inherited: Mapping[str, str], *, temp_dir: str, token_path: Path, cpus_per_node: int) -> dict[str, str]:
    """Environment of the keeper and, through it, of every process of the cluster.

    What the operator set for Ray's timers stays; what would lead to another cluster or another token does not.
    """
    kept = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    # A pool of two a node beside the ranks: one to take over at once, one that is being made ready.
    defaults = {**_DEFAULTS, "RAY_num_workers_soft_limit": str(cpus_per_node + 2)}
    if cpus_per_node == 1:
        defaults["OMP_NUM_THREADS"] = "1"
    scripts = str(Path(sys.executable).parent)
    return {
        **defaults,
        **kept,
        **_FIXED,
        CLUSTER_DIR_VARIABLE: temp_dir,
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "PATH": os.pathsep.join([scripts, *filter(None, [kept.get("PATH")])]),
        "PYTHONUNBUFFERED": "1",
    }
