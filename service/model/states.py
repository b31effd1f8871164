"""The life of a run: which status may follow which. Every change goes through ``service.db.runs``
by a guarded UPDATE."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from everstep.wire import RunStatus

_ENDS: Final = frozenset({RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED})

TRANSITIONS: Final = MappingProxyType(
    {
        RunStatus.QUEUED: frozenset(
            {RunStatus.STARTING, RunStatus.PAUSED, RunStatus.CANCELLED, RunStatus.FAILED}
        ),
        RunStatus.STARTING: _ENDS
        | {RunStatus.RUNNING, RunStatus.RECOVERING, RunStatus.STOPPING, RunStatus.PAUSED},
        RunStatus.RUNNING: _ENDS | {RunStatus.RECOVERING, RunStatus.STOPPING, RunStatus.PAUSED},
        RunStatus.RECOVERING: _ENDS | {RunStatus.RUNNING, RunStatus.STOPPING, RunStatus.PAUSED},
        RunStatus.STOPPING: _ENDS | {RunStatus.PAUSED},
        RunStatus.PAUSED: frozenset({RunStatus.QUEUED, RunStatus.CANCELLED}),
        RunStatus.SUCCEEDED: frozenset[RunStatus](),
        RunStatus.FAILED: frozenset[RunStatus](),
        RunStatus.CANCELLED: frozenset[RunStatus](),
    }
)
"""Statuses that may follow each status. A run that never fits stays QUEUED with a reason; trouble
of the control plane is FAILED only after hours; a lost driver leads to RECOVERING, from which the
next submission goes on."""

SUBMITTED: Final = frozenset(
    {RunStatus.STARTING, RunStatus.RUNNING, RunStatus.RECOVERING, RunStatus.STOPPING}
)
"""Statuses in which a Ray job of the run may exist."""

LIVE: Final = SUBMITTED | {RunStatus.QUEUED}
"""Statuses that the reconciler has work with."""


class StateError(Exception):
    """Base of this module's errors."""


class TransitionConflict(StateError):
    """The run was not in the status that a change expected: someone else was first, or the change
    is illegal."""

    def __init__(self, run_id: str, found: RunStatus | None, wanted: str) -> None:
        super().__init__(f"run {run_id} is {found or 'gone'}; {wanted}")
        self.run_id = run_id
        self.found = found
        self.wanted = wanted


def is_legal(before: RunStatus, after: RunStatus) -> bool:
    """Whether ``after`` may follow ``before``; staying in a status is not a transition."""
    return after in TRANSITIONS[before]


def check_legal(run_id: str, before: RunStatus, after: RunStatus) -> None:
    """Raises TransitionConflict where ``after`` may not follow ``before``."""
    if not is_legal(before, after):
        raise TransitionConflict(
            run_id, before, f"{after} may follow only {_names(_sources(after))}"
        )


def _sources(after: RunStatus) -> frozenset[RunStatus]:
    return frozenset(before for before, followers in TRANSITIONS.items() if after in followers)


def _names(statuses: frozenset[RunStatus]) -> str:
    return ", ".join(status for status in RunStatus if status in statuses) or "nothing"
