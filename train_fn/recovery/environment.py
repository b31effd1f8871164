"""Environment that the driver sets for itself, its controller and its ranks.

The job carries no runtime_env, and neither do its actors: with one, none of them would find a warm
process.
"""

from __future__ import annotations

from everstep.spec.run_spec import RunSpec
from train_fn.recovery.settings import RecoverySettings

NCCL_ENV = {
    # CleanUpOnly: abort the communicator on errors and time-outs, leave the process alive
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # the dump would hold up the abort; the controller keeps every rank's stack
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""What torch reads when it makes a process group over NCCL."""


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
        **NCCL_ENV,
        **spec.env,
    }
