"""The decisions from the facts. Pure functions, so that tests can try every rule on any history.

Rules, in this order for every run:

- A run past its deadline fails, unless all its steps are done. A queued run fails at once. A
  submitted one fails by its driver's report. If the driver is gone or silent for a grace period, it
  fails here, after its journal was read to the end.
- A stop request goes to the driver through the run directory. After a grace period Ray ends the
job.
  When the job is gone and the journal read to its end, the run is CANCELLED or PAUSED.
- A claimed submission that Ray never took is submitted again under the same id.
- A job that ended without a ``finished`` event in its journal is replaced by the next submission.
  Ray's status alone never ends a run. Three drivers of a new run that could not even begin do.
- On a storage that does not belong to the database nothing starts, and nothing is concluded from
  missing files.
- Queued runs start, and running ones shrink, pause and grow again, as schedule.py plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from everstep.wire import Reason, ReasonCode, RunStatus
from service.model.states import LIVE
from service.reconciler.facts import (
    ChangeStatus,
    Decision,
    DeliverLimit,
    DeliverStop,
    EndJob,
    Facts,
    Grow,
    JobFact,
    KeepLastWords,
    Preempt,
    RunFacts,
    SetReason,
    Shrink,
    Start,
    SubmitClaimed,
    TailFact,
    submission_id,
)
from service.reconciler.schedule import plan
from storage.run_control import Stop

STOP_GRACE_S: Final = {"cancel": 30.0, "pause": 120.0}
"""Longest time for a driver to commit its last checkpoint before Ray ends its job."""
DEADLINE_GRACE_S: Final = STOP_GRACE_S["pause"]
"""The same at the deadline, at which the driver stops by its own clock."""
FIRST_BACKOFF_S: Final = 2.0
LONGEST_BACKOFF_S: Final = 60.0
MANY_FRUITLESS: Final = 10
"""Submissions in a row without a checkpoint after which a run reports no_progress. It keeps trying:
drivers without a verdict are trouble of the control plane."""
MOST_FRUITLESS: Final = 500
"""So many end it, or pause it while its storage fails: it has tried for eight hours."""
MOST_NEVER_BEGUN: Final = 3
"""So many drivers of a run that end, by themselves, before any has begun, fail it."""
STRAY_GRACE_S: Final = 20.0
"""Longest time for a driver that has finished or was replaced to end by itself."""


def decide(facts: Facts) -> tuple[Decision, ...]:
    """Return what to do now. The same facts always give the same decisions."""
    decisions: list[Decision] = []
    queued: list[RunFacts] = []
    for run in facts.runs:
        if _is_late(run, facts):
            decisions.extend(_late(run, facts))
        elif run.status == RunStatus.QUEUED:
            queued.append(run)
        elif run.status == RunStatus.STOPPING:
            decisions.extend(_stopping(run, facts))
        elif not run.status.terminal and run.status != RunStatus.PAUSED:
            decisions.extend(_submitted(run, facts))
            if run.shrunk_to is not None and not run.shrink_delivered:
                decisions.append(DeliverLimit(run.id, run.submission, run.shrunk_to))
    decisions.extend(_queued(queued, facts))
    decisions.extend(
        EndJob(stray.submission_id) for stray in facts.strays if stray.seen_for_s >= STRAY_GRACE_S
    )
    return tuple(decisions)


def backoff_s(fruitless: int) -> float:
    """Return the seconds between two submissions after ``fruitless`` ones in a row without a
    checkpoint. The first retry is at once."""
    if fruitless <= 1:
        return 0.0
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(fruitless - 2, 16))


def _is_late(run: RunFacts, facts: Facts) -> bool:
    return (
        run.deadline_at is not None
        and facts.now >= run.deadline_at
        and not run.steps_done
        and run.status in LIVE - {RunStatus.STOPPING}
    )


def _late(run: RunFacts, facts: Facts) -> Iterator[Decision]:
    """Decide about a run past its deadline with steps left.

    The driver knows its deadline, stops the ranks with a last checkpoint, and reports it. The
    journal is the truth. While it may have unread events, the run may have finished in time, so
    nothing is decided.
    """
    if run.status == RunStatus.QUEUED:
        yield _deadline_exceeded(run)
        return
    gone = run.job in (JobFact.MISSING, JobFact.ENDED)
    began_at = max(run.deadline_at or 0.0, run.submitted_at or 0.0)
    if run.tail != TailFact.DRAINED or not (gone or facts.now - began_at > DEADLINE_GRACE_S):
        if not gone or facts.storage_problem is not None:
            yield from _submitted(run, facts)
        return
    yield _deadline_exceeded(run)
    # Ray ends the job afterwards: otherwise the driver could report an end of its own.
    yield EndJob(submission_id(run.id, run.submission))


def _deadline_exceeded(run: RunFacts) -> Decision:
    message = "recovery.deadline_s has passed since the run was created"
    reason = Reason(code=ReasonCode.DEADLINE_EXCEEDED, message=message)
    return ChangeStatus(run.id, run.status, run.submission, RunStatus.FAILED, reason)


def _stopping(run: RunFacts, facts: Facts) -> Iterator[Decision]:
    stop: Stop = run.stop or "cancel"
    if not run.stop_delivered:
        yield DeliverStop(run.id, run.submission, stop)
    if run.job in (JobFact.MISSING, JobFact.ENDED):
        if run.tail == TailFact.DRAINED:
            yield _stopped(run, stop)
        elif facts.storage_problem is not None:
            yield from _set_reason(run, ReasonCode.STORAGE_UNAVAILABLE, facts.storage_problem)
    elif run.job == JobFact.ALIVE:
        if facts.now - (run.stop_at or facts.now) > STOP_GRACE_S[stop]:
            yield EndJob(submission_id(run.id, run.submission))
    elif facts.ray_problem:
        yield from _set_reason(
            run, ReasonCode.WAITING_FOR_CLUSTER, f"stops once Ray answers: {facts.ray_problem}"
        )


def _stopped(run: RunFacts, stop: Stop) -> Decision:
    """Return the end of a stopped run whose job is gone without a report: the one requested."""
    if stop == "pause":
        reason = Reason(
            code=ReasonCode.PAUSED_BY_USER,
            message="Paused through the API; its driver ended before it could say so.",
        )
        return ChangeStatus(run.id, run.status, run.submission, RunStatus.PAUSED, reason)
    reason = Reason(code=ReasonCode.CANCELLED_BY_USER, message="Cancelled through the API.")
    return ChangeStatus(run.id, run.status, run.submission, RunStatus.CANCELLED, reason)


def _submitted(run: RunFacts, facts: Facts) -> Iterator[Decision]:
    """Decide about a run that should have a job: STARTING, RUNNING or RECOVERING."""
    if facts.storage_problem is not None and run.job in (JobFact.ENDED, JobFact.MISSING):
        yield from _set_reason(run, ReasonCode.STORAGE_UNAVAILABLE, facts.storage_problem)
        return
    if run.job == JobFact.UNKNOWN:
        if facts.ray_problem and run.status != RunStatus.RUNNING:
            yield from _set_reason(
                run, ReasonCode.WAITING_FOR_CLUSTER, f"waits for Ray: {facts.ray_problem}"
            )
        return
    if run.job == JobFact.ALIVE:
        if not run.job_recorded:
            # The process died between submission and record. Submitting again records the job.
            yield SubmitClaimed(run.id, run.submission)
        if run.reason is not None and run.reason.code == ReasonCode.WAITING_FOR_CLUSTER:
            yield SetReason(run.id, run.status, None)
        return
    if run.job == JobFact.MISSING and not run.job_recorded:
        yield SubmitClaimed(run.id, run.submission)
        return
    if run.tail == TailFact.DRAINED:
        yield from _replace(run, facts)


def _replace(run: RunFacts, facts: Facts) -> Iterator[Decision]:
    """Replace a job that is gone without a verdict in its journal by the next submission."""
    message = (
        f"the last {run.fruitless} submissions ended without a verdict and without a new "
        f"checkpoint. The Ray job's own log ({submission_id(run.id, run.submission)}) and the "
        "run's driver log say more"
    )
    if run.last_words is not None and run.never_began:
        reason = Reason(code=ReasonCode.DRIVER_NEVER_BEGAN, message=_never_began(run))
        if run.reason != reason:
            yield KeepLastWords(run.id, run.submission, run.last_words)
        if MOST_NEVER_BEGUN <= run.never_began == run.submission or run.fruitless >= MOST_FRUITLESS:
            yield ChangeStatus(run.id, run.status, run.submission, RunStatus.FAILED, reason)
            return
        if run.reason != reason:
            yield SetReason(run.id, run.status, reason)
    elif run.fruitless >= MOST_FRUITLESS and run.storage_problem is not None:
        reason = Reason(code=ReasonCode.STORAGE_UNAVAILABLE, message=run.storage_problem)
        yield ChangeStatus(run.id, run.status, run.submission, RunStatus.PAUSED, reason)
        return
    elif run.storage_problem is not None:
        yield from _set_reason(run, ReasonCode.STORAGE_UNAVAILABLE, run.storage_problem)
    elif run.fruitless >= MOST_FRUITLESS:
        reason = Reason(code=ReasonCode.NO_PROGRESS, message=message)
        yield ChangeStatus(run.id, run.status, run.submission, RunStatus.FAILED, reason)
    elif run.fruitless >= MANY_FRUITLESS and (
        run.reason is None or run.reason.code != ReasonCode.STORAGE_UNAVAILABLE
    ):
        message += f"; the next one comes {LONGEST_BACKOFF_S:g} s after the last"
        yield from _set_reason(run, ReasonCode.NO_PROGRESS, message)
    is_due = facts.now >= min(run.submitted_at or 0.0, facts.now) + backoff_s(run.fruitless)
    if is_due and run.fruitless < MOST_FRUITLESS:
        yield Start(run.id, run.submission)


def _never_began(run: RunFacts) -> str:
    drivers = "driver" if run.never_began == 1 else f"{run.never_began} drivers in a row"
    return (
        f"the {drivers} of this run ended before training began; the last one said: "
        f"{run.last_words}\nIf it lacks a module, install Everstep in the Python with which Ray "
        "runs on the head (`everstep doctor` checks it). Submit the run again if it has FAILED"
    )


def _queued(queued: list[RunFacts], facts: Facts) -> Iterator[Decision]:
    if not queued and all(run.shrunk_to is None for run in facts.runs):
        return
    if facts.storage_problem is not None:
        for run in queued:
            yield from _set_reason(run, ReasonCode.STORAGE_UNAVAILABLE, facts.storage_problem)
        return
    if facts.nodes is None:
        if facts.ray_problem:
            for run in queued:
                yield from _set_reason(
                    run, ReasonCode.WAITING_FOR_CLUSTER, f"waits for Ray: {facts.ray_problem}"
                )
        return
    holding = [
        run
        for run in facts.runs
        if run.status not in (RunStatus.QUEUED, RunStatus.PAUSED) and not run.status.terminal
    ]
    by_id = {run.id: run for run in (*queued, *holding)}
    planned = plan(queued, holding, facts.nodes, facts.quotas, facts.now)
    for run_id, by, to in ((one.run_id, one.by, one.to) for one in planned.preemptions):
        submission = by_id[run_id].submission
        yield Preempt(run_id, submission, by) if to is None else Shrink(run_id, submission, to, by)
    for run_id in planned.grown:
        yield Grow(run_id, by_id[run_id].submission)
    for admission in planned.admissions:
        run = by_id[admission.run_id]
        if admission.reason is None:
            yield Start(run.id, run.submission, admission.limit)
        elif admission.reason != run.reason:
            yield SetReason(run.id, run.status, admission.reason)


def _set_reason(run: RunFacts, code: ReasonCode, message: str) -> Iterator[Decision]:
    """Set a reason, unless the run already has one of this code: a changed text is not worth a
    write."""
    if run.reason is None or run.reason.code != code:
        yield SetReason(run.id, run.status, Reason(code=code, message=message))
