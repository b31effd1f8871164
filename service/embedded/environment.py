"""The environment that the embedded cluster's processes run in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from everstep.options.serve import SECRET_VARIABLES
from service.embedded.processes import CLUSTER_DIR_VARIABLE

_HOST_MODULES = (
    "ray.train.v2._internal.execution.worker_group.worker",
    "train_fn.ray_train.worker_actor",
)
_RANK_MODULES = (
    "torch",
    "torch._dynamo",
    "ray.train.torch",
    "train_fn.ray_train.user_function",
    "train_fn.ranks.main",
    "train_fn.loop.attempt",
)
_CONTROLLER_MODULES = (
    "ray.train.torch",
    "train_fn.ray_train.controller",
    "train_fn.ray_train.journal_actor",
)

_DRIVER_MODULES = (
    "train_fn.driver.command",
    "train_fn.driver.last_save",
    "train_fn.ray_train.journal_actor",
    "train_fn.ray_train.group.placement",
    "train_fn.ray_train.trainer",
)

PRELOADED_MODULES = tuple(
    dict.fromkeys((*_HOST_MODULES, *_RANK_MODULES, *_CONTROLLER_MODULES, *_DRIVER_MODULES))
)
"""The imports of the fork server: those of all its workers."""

HEAD_VARIABLES = {
    "RAY_preload_python_modules": ",".join(_CONTROLLER_MODULES),
    # Ray starts as many processes at a time as a node has CPUs, and the head offers none.
    "RAY_worker_maximum_startup_concurrency": "4",
}
NODE_CORES_VARIABLE = "EVERSTEP_NODE_CORES"
"""The cores of a node's ranks, separated by commas; empty if the node has no cores of its own."""

WORKER_NODE_VARIABLES = {"RAY_preload_python_modules": ",".join(_HOST_MODULES)}
"""The imports of hosts. Ray logs and skips a missing module."""

INHERITED = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE LC_* TZ TERM HOSTNAME TMPDIR TEMP TMP "
    "XDG_CACHE_HOME XDG_RUNTIME_DIR VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD "
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE "
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH "
    "PYTHON* MALLOC_* GLIBC_TUNABLES OMP_* GOMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* "
    "TORCH* PYTORCH_* TRITON_* HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE "
    "NCCL_* GLOO_* UCX_* FI_* CUDA_* CUDNN_* CUBLAS_* NVIDIA_* HIP_* HSA_* ROCR_* "
    "RAY_* EVERSTEP_HOME EVERSTEP_SECRETS_DIR EVERSTEP_RECOVERY_*"
)
"""Variables of the service that the cluster inherits, with spaces between; ``*`` stands for any
suffix. Code of every run can read them."""

MLFLOW_URI = "EVERSTEP_MLFLOW_TRACKING_URI"
_TRACKING = (MLFLOW_URI, "MLFLOW_TRACKING_*")
"""The variables with which a driver reports to a tracking server."""
_NOT_INHERITED = frozenset(
    {
        "RAY_ADDRESS",
        "RAY_AUTH_TOKEN",
        "RAY_TMPDIR",
        "RAY_REDIS_PASSWORD",
        "RAY_RUNTIME_ENV_HOOK",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        *SECRET_VARIABLES,
    }
)
"""Never inherited, whatever else names them: they lead to another cluster, open this one, or hold
a secret of the service, which a flag may have set."""

_FIXED = {
    "RAY_AUTH_MODE": "token",
    # Ray replaces 127.0.0.1 by the machine's outer address unless clusters are off. All parts stay
    # on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}

_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Stacks and flame graphs in Ray's dashboard. Who may start them is decided by the service, and
    # nobody else has the token.
    "RAY_DASHBOARD_ENABLE_PROFILING": "1",
    # Train aborts cleanly on SIGINT only.
    "RAY_JOB_STOP_SIGNAL": "SIGINT",
    "RAY_JOB_STOP_WAIT_TIME_S": "10",
    # All ranks and attempts iterate sets in one order: data and weights may be built from them.
    "PYTHONHASHSEED": "0",
    # On a busy machine a raylet needs longer than Ray's 30 s, and another try begins anew.
    "RAY_raylet_start_wait_time_s": "60",
    # There is no network between nodes, so a silent node is dead.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # A process that is killed has nothing to save: ranks keep their state before.
    "RAY_kill_worker_timeout_milliseconds": "500",
    # Ranks run first; the keeper lowers the priority of the control processes instead.
    "RAY_worker_niceness": "0",
    # Ray's agents collect the dashboard's figures with the ranks' CPU.
    "REPORTER_UPDATE_INTERVAL_MS": "10000",
    "METRICS_RECORD_INTERVAL_S": "60",
    "RAY_metrics_report_interval_ms": "30000",
    "RAY_DASHBOARD_AGENT_LOOP_MONITOR_INTERVAL_S": "5",
    # Frequent checks of raylets and agents, and records for Ray's developers, take a sixth of an
    # idle cluster's CPU.
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "2000",
    "RAY_debug_dump_period_milliseconds": "60000",
    "RAY_event_stats": "0",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "30",
    # The embedded cluster has no autoscaler.
    "EVERSTEP_RECOVERY_AUTOSCALER_REQUESTS": "0",
}


def inherited_by_cluster(
    environ: Mapping[str, str], patterns: Iterable[str] = ()
) -> dict[str, str]:
    """Return the variables that the cluster inherits: those of INHERITED and of the operator's
    ``patterns``."""
    tracking = _TRACKING if environ.get(MLFLOW_URI) else ()
    wanted = (*INHERITED.split(), *tracking, *patterns)
    exact = {pattern for pattern in wanted if not pattern.endswith("*")}
    prefixes = tuple(pattern[:-1] for pattern in wanted if pattern.endswith("*"))
    return {
        name: value
        for name, value in environ.items()
        if name not in _NOT_INHERITED and (name in exact or name.startswith(prefixes))
    }


def cluster_environment(
    environ: Mapping[str, str],
    *,
    temp_dir: str,
    token_path: Path,
    cpus_per_node: int,
    patterns: Iterable[str] = (),
) -> dict[str, str]:
    """Return the environment of the keeper, which every process of the cluster inherits.

    Ranks run user code, so tokens and cloud credentials stay out unless the operator names them,
    and the service's own secrets always stay out. Ray's timers that the operator set are kept.

    Args:
        environ: The service's environment.
        temp_dir: Directory of this cluster.
        token_path: File with the cluster's token.
        cpus_per_node: CPUs of each node.
        patterns: Variables that the operator passes on; ``*`` stands for any suffix.
    """
    kept = inherited_by_cluster(environ, patterns)
    defaults = dict(_DEFAULTS)
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
