"""Build the reasons that a run shows for its status."""

from __future__ import annotations

from typing import Any

from everstep.wire import Reason, ReasonCode


def cancelled_by_user() -> Reason:
    return Reason(code=ReasonCode.CANCELLED_BY_USER, message="Cancelled through the API.")


def paused_by_user() -> Reason:
    return Reason(
        code=ReasonCode.PAUSED_BY_USER,
        message="Paused through the API; POST …/resume continues it.",
    )


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
