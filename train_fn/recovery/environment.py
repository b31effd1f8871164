"""Environment variables that the driver sets for itself, its controller and its ranks.

Neither the job nor its actors carry a runtime_env: with one, they could not use a warm process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from everstep.spec.run_spec import RunSpec
from train_fn.recovery.settings import RecoverySettings

COMMUNICATOR_S = 120
"""Longest creation of NCCL's communicator, in seconds. If a peer dies meanwhile, only this timeout
ends it."""

NCCL_ENV = {
    # CleanUpOnly: abort the communicator on errors and timeouts, keep the process alive
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # the dump would delay the abort; the controller has every rank's stack
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # the watchdog would wait four times this before it aborts, and whoever ends the group for it
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # the flight recorder tells which collectives the device has started
    "TORCH_NCCL_ENABLE_TIMING": "1",
    # a communicator can be aborted while it is created
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(COMMUNICATOR_S),
    # the process holds the state, so torch must not end it: neither the watchdog after a device
    # error nor the monitor of a watchdog that hangs
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Variables that torch reads when it creates a process group over NCCL."""

_DETERMINISTIC_ENV = {
    # cuBLAS reads it when it is first used
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # fix the order of summation, which NCCL would choose by size and by measurement
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


_NODE_DEFAULTS = {
    # InfiniBand and RoCE retry 7 times, after 4.096 us * 2**19 each: 15 s, like silent_peer_s
    "NCCL_IB_TIMEOUT": "19",
    "NCCL_IB_RETRY_CNT": "7",
    # pin memory with several threads: four times as fast
    "PYTORCH_CUDA_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
}
"""Defaults, if neither the node's environment nor the spec sets these variables."""

_OTHER_NAMES = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}
"""Newer names of the same variables."""


def take_environment(env: Mapping[str, str]) -> None:
    """Set a rank's environment in this process, before anything reads it."""
    os.environ.update(env)
    for name, value in _NODE_DEFAULTS.items():
        if _OTHER_NAMES.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)


def device_env(spec: RunSpec) -> dict[str, str]:
    """Return the variables that torch, cuBLAS and NCCL read before a rank uses its GPU.

    They keep torch from ending the process, which holds the state. With ``train.deterministic:
    true`` they also fix the order of summation.
    """
    return NCCL_ENV | (_DETERMINISTIC_ENV if spec.train.wants_determinism is True else {})


def ray_train_env(settings: RecoverySettings) -> dict[str, str]:
    """Return the variables that Ray Train reads in driver and controller."""
    return {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(settings.poll_s),
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(settings.health_timeout_s),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(settings.placement_s),
        # it needs a process per attempt; the policy reads drain notices itself
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1" if settings.state_tracking else "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # Ray's own controller does it
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def rank_env(spec: RunSpec, settings: RecoverySettings) -> dict[str, str]:
    """Return each rank's variables, set before its process group exists. The user's override Ray's
    and torch's."""
    return {
        **ray_train_env(settings),
        # both would capture the output that process_output keeps
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        **device_env(spec),
        **spec.env,
    }
