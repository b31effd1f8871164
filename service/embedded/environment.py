"""The environment that the embedded cluster's processes run in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from everstep.options.serve import SECRET_VARIABLES
from service.embedded.processes import CLUSTER_DIR_VARIABLE

_RANK_MODULES = (
    "torch",
    "torch._dynamo",
    "ray.train.torch",
    "ray.train.v2._internal.execution.worker_group.worker",
    "train_fn.ray_train.worker_actor",
    "train_fn.ray_train.rank_process",
    "train_fn.loop.attempt",
)
_CONTROLLER_MODULES = (
    "ray.train.torch",
    "train_fn.ray_train.controller",
    "train_fn.journal.server",
)

PRELOADED_MODULES = tuple(dict.fromkeys((*_RANK_MODULES, *_CONTROLLER_MODULES)))
"""What the fork server imports, for all of them."""

HEAD_VARIABLES = {
    "RAY_preload_python_modules": ",".join(_CONTROLLER_MODULES),
    # Ray starts as many processes at a time as a node has CPUs, and the head has none to give.
    "RAY_worker_maximum_startup_concurrency": "4",
}
NODE_CORES_VARIABLE = "EVERSTEP_NODE_CORES"
"""Numbers of the cores that a node's ranks keep to, with commas between; of a node, and none where
it has no cores of its own."""

WORKER_NODE_VARIABLES = {"RAY_preload_python_modules": ",".join(_RANK_MODULES)}
"""What a rank, or what stands beside a driver, imports anyway. A module that is missing is logged
and passed over."""

INHERITED = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "LC_*",
        "TZ",
        "TERM",
        "HOSTNAME",
        "TMPDIR",
        "TEMP",
        "TMP",
    ),
    *(
        "XDG_CACHE_HOME",
        "XDG_RUNTIME_DIR",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
    ),
    *(
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "no_proxy",
    ),
    *(
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    ),
    *(
        "PYTHON*",
        "MALLOC_*",
        "GLIBC_TUNABLES",
        "OMP_*",
        "GOMP_*",
        "KMP_*",
        "MKL_*",
        "OPENBLAS_*",
        "NUMEXPR_*",
    ),
    *("TORCH*", "PYTORCH_*", "TRITON_*", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    *(
        "NCCL_*",
        "GLOO_*",
        "UCX_*",
        "FI_*",
        "CUDA_*",
        "CUDNN_*",
        "CUBLAS_*",
        "NVIDIA_*",
        "HIP_*",
        "HSA_*",
        "ROCR_*",
    ),
    *("RAY_*", "EVERSTEP_HOME", "EVERSTEP_SECRETS_DIR", "EVERSTEP_RECOVERY_*"),
)
"""Variables of the service that the cluster inherits; ``*`` stands for any end of a name. Code of
every run can read them."""

MLFLOW_URI = "EVERSTEP_MLFLOW_TRACKING_URI"
_TRACKING = (MLFLOW_URI, "MLFLOW_TRACKING_*")
"""What a driver needs to keep a tracking server up to date, where the operator names one."""
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
    # Ray turns 127.0.0.1 into the machine's outer address unless clusters are off: everything here
    # stays on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}

_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    # Train aborts cleanly on SIGINT only.
    "RAY_JOB_STOP_SIGNAL": "SIGINT",
    "RAY_JOB_STOP_WAIT_TIME_S": "10",
    # Sets are listed in one order by all ranks and in all attempts: data and weights may be built
    # from them.
    "PYTHONHASHSEED": "0",
    # One machine, no network between: a silent node is a dead one.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # A process that is to go has nothing to save: the ranks keep their state before.
    "RAY_kill_worker_timeout_milliseconds": "500",
    # Ranks do the work of the machine; what gives way to them is the cluster's own processes
    # (keeper).
    "RAY_worker_niceness": "0",
    # What Ray's agents look at for its dashboard they look at with the ranks' CPU.
    "REPORTER_UPDATE_INTERVAL_MS": "10000",
    "METRICS_RECORD_INTERVAL_S": "60",
    "RAY_metrics_report_interval_ms": "30000",
    "RAY_DASHBOARD_AGENT_LOOP_MONITOR_INTERVAL_S": "5",
    # What raylets and agents look at several times a second, or write down for Ray's developers: a
    # sixth of an idle cluster's CPU.
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "2000",
    "RAY_debug_dump_period_milliseconds": "60000",
    "RAY_event_stats": "0",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "30",
    # A forked worker is there at once: none need wait idle, none need be started ahead.
    "EVERSTEP_RECOVERY_WARM_POOL": "0",
    # No autoscaler listens here.
    "EVERSTEP_RECOVERY_AUTOSCALER_REQUESTS": "0",
}


def inherited_by_cluster(
    environ: Mapping[str, str], patterns: Iterable[str] = ()
) -> dict[str, str]:
    """Return the variables that the cluster inherits: those of INHERITED, and those that the
    operator's ``patterns`` name."""
    tracking = _TRACKING if environ.get(MLFLOW_URI) else ()
    wanted = (*INHERITED, *tracking, *patterns)
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
    """Return the environment of the keeper and, through it, of every process of the cluster.

    Ranks run user code, so the service's own secrets (the database's URL, tokens, cloud
    credentials) stay out unless the operator names them. Ray's timers that the operator set stay.

    Args:
        environ: The service's environment.
        temp_dir: Directory of this cluster.
        token_path: File with the cluster's token.
        cpus_per_node: CPUs of each node.
        patterns: Variables that the operator passes on; ``*`` stands for any end of a name.
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
