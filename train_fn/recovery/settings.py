"""Settings of recovery, read once from the driver's environment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    warm_pool: bool = True
    """Keep idle worker processes on every node, if the cluster's raylets preload modules. Off on
    the embedded cluster, which forks its workers."""
    warm_spares: int = 1
    """Idle processes for each rank of a node. Two also cover a second failure seconds after the
    first."""
    warm_delay_s: float = 1.0
    """Seconds between a group's start and the refill of the pool, so that the refill does not
    compete with the first steps."""
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
    in_process: bool = True
    """Whether survivors may keep their processes, in runs whose spec sets ``recovery.in_process``.
    Off, every attempt gets fresh processes."""
    no_progress_limit: int = 20
    """System failures in a row without a new step after which the run fails."""
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
            if field not in defaults:
                raise ValueError(
                    f"{name} is not a recovery setting; use one of {', '.join(sorted(defaults))}"
                )
            values[field] = _parse(name, text, defaults[field])
        return dataclasses.replace(cls(), **values)  # type: ignore[arg-type]


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
