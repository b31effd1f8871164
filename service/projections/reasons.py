"""Build the reasons that a run shows for its status."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from everstep.wire import Reason, ReasonCode, RunStatus


def cancelled_by_user() -> Reason:
    return Reason(code=ReasonCode.CANCELLED_BY_USER, message="Cancelled through the API.")


def paused_by_user() -> Reason:
    return Reason(
        code=ReasonCode.PAUSED_BY_USER,
        message="Paused through the API; POST …/resume continues it.",
    )


BY_SWEEP: Final = MappingProxyType(
    {
        RunStatus.PAUSED: ReasonCode.PAUSED_BY_SWEEP,
        RunStatus.CANCELLED: ReasonCode.CANCELLED_BY_SWEEP,
    }
)
"""Reasons that a run keeps from the request to the end of its driver."""


def paused_by_sweep(sweep_id: str) -> Reason:
    message = (
        f"Paused at a rung by sweep {sweep_id}; it goes on from there, without losing a step, if "
        "it is among the best."
    )
    return Reason(code=ReasonCode.PAUSED_BY_SWEEP, message=message)


def cancelled_by_sweep(sweep_id: str, why: str) -> Reason:
    message = f"Cancelled by sweep {sweep_id}: {why}."
    return Reason(code=ReasonCode.CANCELLED_BY_SWEEP, message=message)


def preempted(by: str | None) -> Reason:
    """Return the reason for a pause in favour of run ``by``.

    None means a run of another project, which this project's users must not see.
    """
    whom = f"run {by}" if by else "a run of another project,"
    message = (
        f"Paused for {whom} of higher priority; it resumes by itself, from its last checkpoint, "
        "once there is room."
    )
    return Reason(code=ReasonCode.PREEMPTED_BY_PRIORITY, message=message)


def reason_of(data: dict[str, Any] | None) -> Reason | None:
    if not data:
        return None
    code = data.get("code")
    known = ReasonCode(code) if code in set(ReasonCode) else ReasonCode.SYSTEM_FAILURES_EXHAUSTED
    return Reason(code=known, message=str(data.get("message") or code))
