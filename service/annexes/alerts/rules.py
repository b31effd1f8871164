"""Alerts of a run: which hold, from facts alone, and what their messages say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from everstep.spec.plain_text import printable
from everstep.text import failure as failure_words
from everstep.text.words import count, duration
from everstep.wire import Failure, RunStatus, Straggler, Verdict
from everstep.wire.alerts import (
    AlertCost,
    AlertEvent,
    AlertFailure,
    AlertMessage,
    AlertRun,
    AlertWhen,
)
from service.annexes.alerts.tables import AlertRow
from service.model.rows import EventRow, to_time
from service.model.run_rows import RunRow
from service.projections.attempts import failure_of, first_line

HOUR_S: Final = 3600.0
WHOLE_RUN: Final = "run"
"""Subject of an incident that is not about one rank."""
_WORKING: Final = frozenset({RunStatus.STARTING, RunStatus.RUNNING, RunStatus.RECOVERING})
"""Statuses in which a run should make steps."""


class Rule(Protocol):
    """When an alert triggers."""

    @property
    def when(self) -> AlertWhen: ...
    @property
    def more_than(self) -> int | None: ...
    @property
    def stalled_s(self) -> float | None: ...


@dataclass(frozen=True)
class AlertFacts:
    """What rules depend on. Times are unix seconds."""

    status: RunStatus
    recovered_at: tuple[float, ...] = ()
    """Recoveries, at least those of the last hour."""
    slow: tuple[Straggler, ...] = ()
    """Ranks of the current attempt that slow their peers down."""
    progressed_at: float | None = None
    """The last step, or the start of work after a queue or pause. None if the run reports no
    steps."""


@dataclass(frozen=True)
class IncidentChanges:
    """Incidents, by subject, that begin and end now."""

    triggered: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()


def holding(rule: Rule, facts: AlertFacts, now: float) -> frozenset[str]:
    """Return the subjects for which the rule holds now.

    What holds for a run that has ended is final: ``failed`` and ``finished`` are never resolved.
    """
    match rule.when:
        case "failed":
            holds = facts.status is RunStatus.FAILED
        case "finished":
            holds = facts.status.terminal
        case "recovered":
            recent = sum(now - HOUR_S < at for at in facts.recovered_at)
            holds = not facts.status.terminal and recent > (rule.more_than or 0)
        case "stalled":
            silent_s = 0.0 if facts.progressed_at is None else now - facts.progressed_at
            holds = facts.status in _WORKING and silent_s >= (rule.stalled_s or HOUR_S)
        case "straggler":
            slow = facts.slow if facts.status in _WORKING else ()
            return frozenset(f"rank {each.rank}" for each in slow)
    return frozenset({WHOLE_RUN} if holds else ())


def changes(
    rule: Rule, facts: AlertFacts, now: float, open_ones: frozenset[str]
) -> IncidentChanges:
    """Return what triggers and what is resolved, given the subjects of the open incidents."""
    holds = holding(rule, facts, now)
    return IncidentChanges(tuple(sorted(holds - open_ones)), tuple(sorted(open_ones - holds)))


# ---------------------------------------------------------------- alert messages

# What an alert says about a run: the message that every format is made from.

_ENDS: Final = {
    RunStatus.SUCCEEDED: "has succeeded",
    RunStatus.FAILED: "has failed",
    RunStatus.CANCELLED: "was cancelled",
}


def message_of(
    alert: AlertRow,
    run: RunRow,
    facts: AlertFacts,
    *,
    event: AlertEvent,
    subject: str,
    now: float,
) -> dict[str, Any]:
    """Return the JSON of an ``AlertMessage``. Its sender adds id, links and ``with_failure``.

    Args:
        alert: The rule.
        run: The run as it is now.
        facts: The facts that the rule was applied to.
        event: Whether an incident begins or ends.
        subject: What the incident is about: the run, or a rank.
        now: Unix seconds.
    """
    say = _resolved if event == "resolve" else _triggered
    return AlertMessage(
        id="",
        alert=alert.name,
        alert_id=alert.id,
        when=alert.when,
        event=event,
        incident=f"{alert.id}/{run.id}/{subject}",
        at=to_time(now),
        summary=first_line(say(alert, run, facts, subject, now)),
        run=_run(run),
        failure=None,
        cost=AlertCost(restarts=run.restarts, steps_lost=run.steps_lost, recovery_s=0.0),
    ).model_dump(mode="json")


def with_failure(message: Mapping[str, Any], failures: Sequence[Failure]) -> dict[str, Any]:
    """Return the JSON of an alert's or webhook's message with the run's last failure, and what all
    of them have cost.

    Finding them takes as long as the history is, so the transaction that queues it does not."""
    if not failures:
        return dict(message)
    last = failures[-1]
    cost = {
        "steps_lost": sum(each.steps_lost or 0 for each in failures),
        "recovery_s": sum(each.recovery_s or 0.0 for each in failures),
    }
    found = {
        **message,
        "failure": failure_of(last).model_dump(mode="json"),
        "cost": {**message["cost"], **cost},
    }
    if message.get("event") == "trigger" and message["when"] == "recovered":
        found["summary"] = first_line(f"{message['summary']}; last: {failure_words.headline(last)}")
    return found


def example_message(alert: AlertRow, now: float) -> dict[str, Any]:
    """Return the message of a test, about a run and a failure that are made up."""
    fault = AlertFailure(
        at=to_time(now),
        verdict=Verdict.WORKER_LOST,
        first_rank=1,
        node_id="0" * 12,
        step=150,
        exception=None,
        action="restart",
        drill=None,
        steps_lost=0,
        detect_s=0.2,
        recovery_s=1.2,
    )
    return AlertMessage(
        id="",
        alert=alert.name,
        alert_id=alert.id,
        when=alert.when,
        event="test",
        incident=f"{alert.id}/test",
        at=to_time(now),
        summary=f"This is a test of the alert {printable(alert.name)}: nothing has happened.",
        run=AlertRun(
            id="run_example",
            name="example",
            project=alert.project,
            status=RunStatus.RUNNING,
            reason=None,
            step=150,
            total_steps=500,
            url=None,
        ),
        failure=fault,
        cost=AlertCost(restarts=1, steps_lost=0, recovery_s=1.2),
    ).model_dump(mode="json")


def _run(run: RunRow) -> AlertRun:
    return AlertRun(
        id=run.id,
        name=run.name,
        project=run.project,
        status=run.status,
        reason=first_line(run.reason_message) if run.reason_message else None,
        step=run.step,
        total_steps=run.total_steps,
        url=None,
    )


def _triggered(
    alert: AlertRow,
    run: RunRow,
    facts: AlertFacts,
    subject: str,
    now: float,
) -> str:
    match alert.when:
        case "failed":
            why = run.reason_message or "no reason is known"
            return f"{run.name} has failed at step {run.step}: {why}"
        case "finished":
            return f"{run.name} {_ENDS[run.status]} at step {run.step}"
        case "recovered":
            times = count(len(facts.recovered_at), "time")
            return f"{run.name} has recovered {times} within an hour"
        case "stalled":
            silent_s = now - (facts.progressed_at or now)
            status = run.status.lower()
            return f"{run.name} has made no step for {duration(silent_s)}; it is {status}"
        case "straggler":
            slow = next(each for each in facts.slow if f"rank {each.rank}" == subject)
            return (
                f"{run.name}: {subject} on node {slow.node_id[:8]} slows its peers down: "
                f"{1000 * slow.own_s:.0f} ms a step, its peers {1000 * slow.peers_s:.0f} ms"
            )


def _resolved(
    alert: AlertRow,
    run: RunRow,
    facts: AlertFacts,
    subject: str,
    now: float,
) -> str:
    if run.status.terminal:
        return f"{run.name} {_ENDS[run.status]} at step {run.step}"
    match alert.when:
        case "recovered":
            times = count(len(facts.recovered_at), "time")
            return f"{run.name} has recovered only {times} within the last hour"
        case "straggler":
            return f"{run.name}: {subject} no longer slows its peers down"
        case _:
            return f"{run.name} is at step {run.step}; it is {run.status.lower()}"


# ---------------------------------------------------------------- webhooks

# What a webhook says, which a run's spec asks for by ``notify``.


NO_FAILURE: Final = {"failure": None, "cost": {"steps_lost": 0, "recovery_s": 0.0}}


def webhook_of(run: RunRow, event: EventRow) -> dict[str, Any]:
    """Return the body for the status that a run has just reached, by its event. Its sender adds
    the link and ``with_failure``."""
    return {
        "run_id": run.id,
        "name": run.name,
        "project": run.project,
        "status": run.status.value,
        "reason": event.data["reason"],
        "step": run.step,
        "seq": event.seq,
        "at": event.at,
        **NO_FAILURE,
    }
