"""What an operator may tune about recovery; read once from the driver's environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "EVERSTEP_RECOVERY_"


@dataclass(frozen=True)
class RecoverySettings:
    """Every knob of the recovery engine. ``EVERSTEP_RECOVERY_POLL_S=0.2`` sets ``poll_s``, and so
    on for each field."""

    poll_s: float = 0.2
    """Seconds between two looks of the controller at its ranks while they start or end, and at
    nodes while it waits for some."""
    quiet_poll_s: float = 1.0
    """Seconds between two looks at nodes and at the ranks' progress while all ranks train."""
    ask_ranks_s: float = 10.0
    """Seconds between two calls of every rank meanwhile: reports and ends are told at once, a rank
    that does not answer is seen by such a call."""
    probe_timeout_s: float = 1.0
    """Seconds in which a node's raylet must accept a TCP connection; a dead one refuses at once, an
    unreachable one times out."""
    silent_peer_s: float = 15.0
    """Seconds after which a rank gives up its connections to a host that is not heard any more; 0
    for never."""
    apart_s: float = 60.0
    """Seconds for which a node takes no rank after others could not reach it, although the head
    could, or after it was found to run other versions than the driver's node; longer each time."""
    preflight: bool = True
    """Look at every node when a run's ranks come to it for the first time: compute, memory, disk,
    and its links to the others."""
    hold_s: float = 20.0
    """Longest wait, before a group is torn down, for survivors to leave the step and write their
    snapshots."""
    group_start_s: float = 120.0
    """Longest start of a worker group, from its actors to the running training function; past it
    the group is killed."""
    placement_s: float = 10.0
    """Longest wait for a placement group: its resources were seen free, so a longer wait means that
    they are gone."""
    health_timeout_s: float = 60.0
    """A rank whose process answers no poll for so long is taken for hung."""
    hang_min_s: float = 60.0
    """Shortest time without a step after which ranks are taken for hung, where the spec does not
    set ``hang_timeout_s``."""
    hang_factor: float = 10.0
    """The same as a multiple of the 99th percentile of the last steps; the larger of both
    counts."""
    hang_start_s: float = 600.0
    """Longest set-up of an attempt without a sign of life: data, model, restoring the state."""
    hang_first_step_s: float = 1200.0
    """Longest first step of an attempt, which may compile the model."""
    hang_evaluation_s: float = 3600.0
    """Longest evaluation, or final checkpoint, without a sign of life."""
    collective_timeout_s: int = 1800
    """Time-out of torch's process group; survivors are freed by the first of them to leave, long
    before it."""
    warm_pool: bool = True
    """Keep pre-imported worker processes idle on every node, where the cluster's raylets preload
    modules. Off on the embedded cluster, which forks its workers."""
    warm_spares: int = 1
    """Idle processes for each rank of a node; two also cover a second failure within seconds of the
    first."""
    warm_delay_s: float = 1.0
    """Seconds after a group's start before the pool is refilled, so that the refill does not
    compete with the first steps."""
    resize_interval_s: float = 1.0
    """Seconds between two looks for room to grow."""
    growth_settle_s: float = 2.0
    """Seconds that new capacity must stay before the group grows onto it: hysteresis against
    flapping nodes."""
    growth_cooldown_s: float = 5.0
    """Seconds after a group's start before it may grow."""
    yield_timeout_s: float = 60.0
    """Longest wait for ranks to save and leave before a planned resize; past it the resize is given
    up."""
    no_progress_limit: int = 20
    """System failures in a row without one new step after which the run is given up."""
    backoff_max_s: float = 30.0
    """Longest pause between attempts that make no progress."""
    autoscaler_requests: bool = True
    """Tell Ray's autoscaler how many workers the run wants; off saves a process where no autoscaler
    listens."""
    state_tracking: bool = False
    """Ray's own Train state for its dashboard; costs a process on the head."""

    def for_own_function(self) -> RecoverySettings:
        """The same for a user's Ray Train function, whose only signs of life are its reports: a
        whole epoch may lie between two."""
        return dataclasses.replace(
            self,
            hang_min_s=max(self.hang_min_s, self.hang_evaluation_s),
            hang_first_step_s=max(self.hang_first_step_s, self.hang_evaluation_s),
            yield_timeout_s=max(self.yield_timeout_s, self.hang_evaluation_s),
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> RecoverySettings:
        """Settings with the environment's overrides. Raises ValueError naming a variable that is
        unknown or not a number."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for name, text in env.items():
            if not name.startswith(PREFIX):
                continue
            field = name.removeprefix(PREFIX).lower()
            if field not in defaults:
                raise ValueError(
                    f"{name} is not a recovery setting; known are {', '.join(sorted(defaults))}"
                )
            values[field] = _parse(name, text, defaults[field])
        return dataclasses.replace(cls(), **values)  # type: ignore[arg-type]


def _parse(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text.lower() not in {"0", "1", "true", "false"}:
            raise ValueError(f"{name} must be 0 or 1, but is {text!r}")
        return text.lower() in {"1", "true"}
    try:
        value = type(default)(text)  # type: ignore[call-arg]
    except ValueError as exc:
        raise ValueError(f"{name} must be a number, but is {text!r}") from exc
    if not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{name} must not be negative, but is {text!r}")
    return value
