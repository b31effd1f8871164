"""Settings of recovery, read once from the driver's environment."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a script's first import reads this file
    from everstep.spec.run_spec import RunSpec

logger = logging.getLogger(__name__)

PREFIX = "EVERSTEP_RECOVERY_"
SCRIPT_GROWTH_S = 600.0
"""Shortest time in seconds that a script's group runs before it grows."""


@dataclass(frozen=True)
class RecoverySettings:
    """All settings of recovery. ``EVERSTEP_RECOVERY_POLL_S=0.2`` sets ``poll_s``, and likewise for
    every field."""

    poll_s: float = 0.2
    """Seconds between two polls of the ranks while they start or end, and of the nodes while the
    controller waits for some."""
    quiet_poll_s: float = 1.0
    """Seconds between two polls of the nodes and of the ranks' progress while all ranks train."""
    ask_ranks_s: float = 10.0
    """Seconds between two calls to every rank while it trains. Reports and ends arrive at once; the
    call finds a rank that does not answer."""
    probe_timeout_s: float = 1.0
    """Seconds within which a node's raylet must accept a TCP connection. A dead one refuses at
    once, an unreachable one times out."""
    silent_peer_s: float = 15.0
    """Seconds of silence after which a rank closes its connections to a host; 0 for never."""
    apart_s: float = 60.0
    """Seconds for which a node gets no rank if other nodes could not reach it although the head
    could, or if it runs other versions than the driver's node. Longer each time."""
    preflight: bool = True
    """Test every node before it gets ranks of a run for the first time: compute, memory, disk, and
    its links to the others."""
    hold_s: float = 20.0
    """Longest wait for survivors to leave the step and write their snapshots, before a group is
    shut down; a second more for each 300 MB of their state."""
    group_start_s: float = 120.0
    """Longest start of a worker group, from its actors to the running training function. A slower
    group is killed."""
    placement_s: float = 10.0
    """Longest wait for a placement group. Its resources were free, so a longer wait means that they
    are gone."""
    health_timeout_s: float = 60.0
    """Seconds without an answer after which a rank counts as hung."""
    hang_min_s: float = 60.0
    """Shortest time without a step after which ranks count as hung, if the spec does not set
    ``hang_timeout_s``."""
    hang_factor: float = 10.0
    """The same as a multiple of the 99th percentile of recent steps. The larger of both counts."""
    hang_start_s: float = 600.0
    """Longest setup of an attempt without progress: data, model, restoring the state."""
    hang_first_step_s: float = 1200.0
    """Longest first step of an attempt, which may compile the model."""
    hang_evaluation_s: float = 3600.0
    """Longest evaluation or final checkpoint without progress."""
    stacks_after_s: float = 60.0
    """Seconds without progress after which the ranks' stacks are reported, and again after twice as
    long; 0 for never."""
    collective_timeout_s: int = 1800
    """Timeout of torch's process group. Survivors are freed long before it, by the first of them to
    leave."""
    resize_interval_s: float = 1.0
    """Seconds between two checks for room to grow."""
    growth_settle_s: float = 2.0
    """Seconds that new capacity must stay before the group grows onto it, because nodes may
    flap."""
    growth_cooldown_s: float = 5.0
    """Seconds after a group's start before it may grow."""
    yield_timeout_s: float = 60.0
    """Longest wait for ranks to save and leave before a planned resize. After that the resize is
    abandoned."""
    backoff_max_s: float = 30.0
    """Longest pause between attempts that make no progress."""
    autoscaler_requests: bool = True
    """Tell Ray's autoscaler how many workers the run wants. Off saves a process on clusters without
    an autoscaler."""
    state_tracking: bool = False
    """Keep Ray Train's state for Ray's dashboard; costs a process on the head."""

    def for_own_function(self) -> RecoverySettings:
        """Return the settings for a user's Ray Train function, which shows progress by its reports
        only: a whole epoch may lie between two."""
        return dataclasses.replace(
            self,
            hang_min_s=max(self.hang_min_s, self.hang_evaluation_s),
            hang_first_step_s=max(self.hang_first_step_s, self.hang_evaluation_s),
            yield_timeout_s=max(self.yield_timeout_s, self.hang_evaluation_s),
        )

    def for_script(self) -> RecoverySettings:
        """Return the settings for a user's script, which may never report.

        It is interrupted to change its size, as by torchrun, so it grows seldom.
        """
        return dataclasses.replace(
            self.for_own_function(),
            hang_first_step_s=math.inf,
            yield_timeout_s=self.yield_timeout_s,
            growth_cooldown_s=max(self.growth_cooldown_s, SCRIPT_GROWTH_S),
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> RecoverySettings:
        """Return the settings with the environment's overrides. Raises ValueError naming a variable
        that is unknown or not a number."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for name, text in env.items():
            if not name.startswith(PREFIX):
                continue
            field = name.removeprefix(PREFIX).lower()
            if field in _WITHOUT_EFFECT:
                logger.warning("%s has no effect any more; remove it", name)
                continue
            if field not in defaults:
                raise ValueError(
                    f"{name} is not a recovery setting; use one of {', '.join(sorted(defaults))}"
                )
            values[field] = _parse(name, text, defaults[field])
        return dataclasses.replace(cls(), **values)  # type: ignore[arg-type]


_WITHOUT_EFFECT = frozenset(
    {"in_process", "warm_pool", "warm_spares", "warm_delay_s", "no_progress_limit"}
)
"""Settings of earlier versions."""


def _parse(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text.lower() not in {"0", "1", "true", "false"}:
            raise ValueError(f"{name} is {text!r}; set it to 0 or 1")
        return text.lower() in {"1", "true"}
    try:
        value = type(default)(text)  # type: ignore[call-arg]
    except ValueError as exc:
        raise ValueError(f"{name} is {text!r}; set it to a number") from exc
    if not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{name} is {text!r}; set it to 0 or more")
    return value


# ---------------------------------------------------------------- environment

# Environment variables that the driver sets for itself, its controller and its ranks.
#
# Neither the job nor its actors carry a runtime_env: with one, they could not use a warm process.

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

_KEEP_THE_PROCESS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_ENABLE_MONITORING",
)
"""Those of them without which torch may end a process that holds the state."""
_came_late: set[str] = set()
"""Variables that ``set_nccl_defaults`` set when there was a process group already."""

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


def set_nccl_defaults() -> None:
    """Set what nobody has set of ``NCCL_ENV``, in a process whose own code makes its process group.
    Does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and getattr(distributed, "is_initialized", bool)()
    for name in NCCL_ENV.keys() - os.environ.keys():
        os.environ[name] = NCCL_ENV[name]
        if has_group:
            _came_late.add(name)


def why_torch_ends_it(env: Mapping[str, str]) -> str | None:
    """Return why torch may end this process over NCCL when a peer dies or a device fails, and what
    to do; None if it does not."""
    chosen = [name for name in _KEEP_THE_PROCESS if env.get(name) != NCCL_ENV[name]]
    late = [name for name in _KEEP_THE_PROCESS if name in _came_late]
    ways_out = [f"leave {name} unset, or set it to {NCCL_ENV[name]}" for name in chosen]
    if late:
        ways_out.append(
            f"import everstep.train before init_process_group, which reads {', '.join(late)}"
        )
    if not ways_out:
        return None
    return (
        "over NCCL torch may end this process when a peer dies or its device fails, and the steps "
        f"since the last checkpoint are lost: {'; '.join(ways_out)}"
    )


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
