"""Environment that the driver sets for itself, its controller and its ranks.

The job carries no runtime_env, and neither do its actors: with one, none of them would find a warm
process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from everstep.spec.run_spec import RunSpec
from train_fn.recovery.settings import RecoverySettings

COMMUNICATOR_S = 120
"""Longest creation of NCCL's communicator, in seconds: where a peer dies in it, nobody else ends
it."""

NCCL_ENV = {
    # CleanUpOnly: abort the communicator on errors and time-outs, leave the process alive
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # the dump would hold up the abort; the controller keeps every rank's stack
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # a communicator that is being created can be aborted, too
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(COMMUNICATOR_S),
    # the process holds the state: neither the watchdog of a broken device nor the monitor of a
    # watchdog that hangs may end it
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What torch reads when it makes a process group over NCCL."""

_DETERMINISTIC_ENV = {
    # cuBLAS reads it when it is first used
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # one order of summation, whatever NCCL would measure or choose by size
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


_NODE_DEFAULTS = {
    # InfiniBand and RoCE send again 7 times, after 4.096 us * 2**19 each: 15 s, as silent_peer_s
    "NCCL_IB_TIMEOUT": "19",
    "NCCL_IB_RETRY_CNT": "7",
}
"""What holds where neither the node's environment nor the spec says otherwise."""


def take_environment(env: Mapping[str, str]) -> None:
    """Give this process a rank's environment, before anything reads it."""
    os.environ.update(env)
    for name, value in _NODE_DEFAULTS.items():
        os.environ.setdefault(name, value)


def device_env(spec: RunSpec) -> dict[str, str]:
    """Return what torch, cuBLAS and NCCL are to read before a rank uses its GPU: torch's defaults
    that would cost the state, and with ``train.deterministic: true`` an order of summation."""
    return NCCL_ENV | (_DETERMINISTIC_ENV if spec.train.deterministic is True else {})


def ray_train_env(settings: RecoverySettings) -> dict[str, str]:
    """What Ray Train reads in driver and controller."""
    return {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(settings.poll_s),
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(settings.health_timeout_s),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(settings.placement_s),
        # a process per attempt; the policy reads drain notices itself
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1" if settings.state_tracking else "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # Ray's own controller does it
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def rank_env(spec: RunSpec, settings: RecoverySettings) -> dict[str, str]:
    """What every rank is given before its process group exists: Ray's and torch's, and the user's
    over them."""
    return {
        **ray_train_env(settings),
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # both would take the output that rank_logging keeps
        **device_env(spec),
        **spec.env,
    }
