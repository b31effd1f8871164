"""decide(): single rules by example, and whole histories of a run, Ray and this process at
random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everstep.wire import Reason, ReasonCode, RunStatus
from service.model.states import LIVE, SUBMITTED, TRANSITIONS
from service.reconciler.decide import (
    DEADLINE_GRACE_S,
    MANY_FRUITLESS,
    MOST_FRUITLESS,
    STOP_GRACE_S,
    backoff_s,
    decide,
)
from service.reconciler.facts import (
    ChangeStatus,
    Decision,
    DeliverStop,
    EndJob,
    Facts,
    JobFact,
    NodeState,
    RunFacts,
    SetReason,
    Start,
    SubmitClaimed,
    TailFact,
)

NODES = (NodeState("n0", {"CPU": 1.0}), NodeState("n1", {"CPU": 1.0}))
NOW = 1000.0


def run(status: RunStatus = RunStatus.RUNNING, **values: Any) -> RunFacts:
    submitted = (
        {}
        if status == RunStatus.QUEUED
        else {"submission": 1, "job_recorded": True, "submitted_at": NOW - 100}
    )
    return RunFacts(**{"id": "run_a", "status": status, "created_at": 0.0, **submitted, **values})


def decided(one: RunFacts, **values: Any) -> tuple[Decision, ...]:
    return decide(Facts(**{"now": NOW, "runs": (one,), "nodes": NODES, **values}))


def test_a_queued_run_says_what_it_waits_for_once() -> None:
    [decision] = decided(run(RunStatus.QUEUED), nodes=None, ray_problem="connection refused")
    assert isinstance(decision, SetReason)
    assert decision.reason is not None and decision.reason.code is ReasonCode.WAITING_FOR_CLUSTER
    said = run(RunStatus.QUEUED, reason=decision.reason)
    assert decided(said, nodes=None, ray_problem="connection reset") == ()
    assert decided(run(RunStatus.QUEUED), nodes=None) == (), "Ray was not asked: nothing is known"


@pytest.mark.parametrize("status", [RunStatus.STARTING, RunStatus.RUNNING, RunStatus.RECOVERING])
def test_a_job_that_is_gone_without_a_verdict_is_replaced(status: RunStatus) -> None:
    for job in (JobFact.MISSING, JobFact.ENDED):
        assert decided(run(status, job=job, tail=TailFact.DRAINED)) == (Start("run_a", 1),)
        assert decided(run(status, job=job, tail=TailFact.BEHIND)) == (), (
            "its journal may still hold the verdict"
        )
    for job in (JobFact.ALIVE, JobFact.UNKNOWN):
        assert decided(run(status, job=job, tail=TailFact.DRAINED)) == ()


def test_a_claim_without_a_job_is_submitted_under_the_same_number() -> None:
    claimed = run(RunStatus.STARTING, job_recorded=False, submitted_at=None)
    for job in (JobFact.MISSING, JobFact.ALIVE):
        assert decided(replace(claimed, job=job, tail=TailFact.DRAINED)) == (
            SubmitClaimed("run_a", 1),
        )
    assert decided(claimed) == (), "while Ray is silent the job may be there"


def test_fruitless_submissions_come_slower_and_are_told_of_and_end_a_run_after_hours() -> None:
    lost = run(RunStatus.RECOVERING, job=JobFact.ENDED, tail=TailFact.DRAINED, submitted_at=NOW - 1)
    assert decided(replace(lost, fruitless=1)) == (Start("run_a", 1),)
    assert decided(replace(lost, fruitless=2)) == ()
    assert decided(replace(lost, fruitless=2, submitted_at=NOW - backoff_s(2))) == (
        Start("run_a", 1),
    )
    many = replace(lost, fruitless=MANY_FRUITLESS)
    [said] = decided(many)
    assert isinstance(said, SetReason) and said.reason is not None
    assert (said.expected, said.reason.code) == (RunStatus.RECOVERING, ReasonCode.NO_PROGRESS)
    assert decided(replace(many, reason=said.reason, submitted_at=NOW - 60)) == (Start("run_a", 1),)
    waits = [backoff_s(count) for count in range(MANY_FRUITLESS)]
    assert waits == sorted(waits) and waits[0] == 0 and waits[-1] == 60
    most = replace(lost, fruitless=MOST_FRUITLESS, reason=said.reason, submitted_at=NOW - 3600)
    [failed] = decided(most)
    assert isinstance(failed, ChangeStatus) and failed.to is RunStatus.FAILED
    [paused] = decided(replace(most, storage_problem="node-7: /mnt has no id"))
    assert isinstance(paused, ChangeStatus) and paused.to == RunStatus.PAUSED
    assert sum(map(backoff_s, range(MOST_FRUITLESS))) > 8 * 3600


@pytest.mark.parametrize(
    ("stop", "end"), [("cancel", RunStatus.CANCELLED), ("pause", RunStatus.PAUSED)]
)
def test_a_stop_is_delivered_then_forced_then_recorded(stop: Any, end: RunStatus) -> None:
    stopping = run(
        RunStatus.STOPPING, stop=stop, stop_at=NOW - 1, job=JobFact.ALIVE, tail=TailFact.DRAINED
    )
    assert decided(stopping) == (DeliverStop("run_a", 1, stop),)
    delivered = replace(stopping, stop_delivered=True)
    assert decided(delivered) == ()
    late = replace(delivered, stop_at=NOW - STOP_GRACE_S[stop] - 1)
    assert decided(late) == (EndJob("run_a-s001"),)
    [ended] = decided(replace(delivered, job=JobFact.ENDED))
    assert isinstance(ended, ChangeStatus) and ended.to == end
    assert decided(replace(delivered, job=JobFact.ENDED, tail=TailFact.BEHIND)) == (), (
        "the driver may have said how it ended"
    )


def test_a_deadline_ends_a_waiting_run_at_once_and_a_driver_that_is_silent_after_a_grace() -> None:
    [waiting] = decided(run(RunStatus.QUEUED, deadline_at=NOW - 1))
    assert isinstance(waiting, ChangeStatus) and waiting.reason.code is ReasonCode.DEADLINE_EXCEEDED
    late = run(deadline_at=NOW - 1, job=JobFact.ALIVE, tail=TailFact.DRAINED)
    assert decided(late) == (), "its driver stops it with a last checkpoint, and says so"
    silent = replace(
        late, deadline_at=NOW - DEADLINE_GRACE_S - 1, submitted_at=NOW - DEADLINE_GRACE_S - 9
    )
    for job in (JobFact.ALIVE, JobFact.UNKNOWN):
        change, end = decided(replace(silent, job=job))
        assert change == replace(waiting, expected=RunStatus.RUNNING, submission=1)
        assert end == EndJob("run_a-s001"), "only after the run has its verdict"
    assert decided(replace(silent, submitted_at=NOW - 1)) == (), (
        "a driver that has just begun learns of it first"
    )
    assert decided(run(deadline_at=NOW + 1, job=JobFact.ALIVE)) == ()


def test_a_lost_driver_is_not_replaced_after_the_deadline() -> None:
    for job in (JobFact.ENDED, JobFact.MISSING):
        change, _ = decided(run(deadline_at=NOW - 1, job=job, tail=TailFact.DRAINED))
        assert (
            isinstance(change, ChangeStatus) and change.reason.code is ReasonCode.DEADLINE_EXCEEDED
        )


@pytest.mark.parametrize("job", list(JobFact))
def test_a_run_that_may_have_finished_is_not_failed_by_its_deadline(job: JobFact) -> None:
    """However late: its driver may have written ``finished``, and only the end of the journal
    tells."""
    late = run(deadline_at=NOW - 10_000, job=job)
    assert decided(replace(late, tail=TailFact.BEHIND)) == ()
    done = replace(late, steps_done=True)
    for tail in TailFact:
        assert not any(
            isinstance(decision, ChangeStatus) for decision in decided(replace(done, tail=tail))
        )


class OneRunsLife(RuleBasedStateMachine):
    """A run, its jobs and its drivers under a reconciler that may see little and die at any line.

    The model is the world: it plays database, Ray and drivers, and applies decisions as execute()
    does, cut off anywhere.
    """

    @initialize()
    def begin(self) -> None:
        self.status, self.submission, self.recorded, self.stop = RunStatus.QUEUED, 0, False, None
        self.reason: Reason | None = None
        self.jobs: dict[int, JobFact] = {}
        self.finished: set[int] = set()
        self.now = NOW
        self.stop_at: float | None = None
        self.submitted_at: float | None = None
        self.fruitful = 0
        self.terminal_at: RunStatus | None = None

    @rule(seconds=st.sampled_from([0.1, 5.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.status not in (RunStatus.PAUSED,) and not self.status.terminal)
    @rule(asked=st.booleans(), drained=st.booleans(), room=st.booleans(), cut=st.integers(0, 4))
    def tick(self, asked: bool, drained: bool, room: bool, cut: int) -> None:
        """One tick of a process that dies after ``cut`` steps; 4 is never."""
        submitted = self.status in SUBMITTED
        job = (
            self.jobs.get(self.submission, JobFact.MISSING)
            if asked and submitted
            else JobFact.UNKNOWN
        )
        if drained and submitted and self.submission in self.finished:
            self.apply_verdict()
            if self.status not in LIVE:
                return
        facts = RunFacts(
            id="run_a",
            status=self.status,
            created_at=0.0,
            reason=self.reason,
            stop=self.stop,
            stop_at=self.stop_at,
            submission=self.submission,
            job_recorded=self.recorded,
            submitted_at=self.submitted_at,
            fruitless=self.submission - self.fruitful,
            job=job,
            tail=TailFact.DRAINED if drained and submitted else TailFact.BEHIND,
        )
        nodes = NODES if room and asked else None
        decisions = decide(Facts(self.now, (facts,), nodes))
        assert decisions == decide(Facts(self.now, (facts,), nodes)), "deciding is pure"
        for decision in decisions:
            cut = self.carry_out(decision, cut)
            if cut <= 0:
                return

    def carry_out(self, decision: Decision, cut: int) -> int:
        """Returns how many steps are left before the process dies."""
        match decision:
            case Start(_, after):
                assert after == self.submission, "a number is claimed only behind the newest"
                assert self.status != RunStatus.STOPPING
                job = self.jobs.get(self.submission)
                assert self.status == RunStatus.QUEUED or job in (
                    None,
                    JobFact.ENDED,
                    JobFact.MISSING,
                ), "replaces no live job"
                self.change(
                    RunStatus.STARTING if self.status == RunStatus.QUEUED else RunStatus.RECOVERING
                )
                self.submission, self.recorded, self.submitted_at = after + 1, False, None
                return self.submit(cut - 1)
            case SubmitClaimed(_, submission):
                assert submission == self.submission
                return self.submit(cut)
            case ChangeStatus():
                assert decision.expected == self.status and decision.submission == self.submission
                assert decision.to != RunStatus.FAILED, (
                    "without a deadline only the driver's verdict fails a run"
                )
                self.change(decision.to)
                self.reason = decision.reason
            case EndJob(job_id):
                number = int(job_id.rpartition("-s")[2])
                if number in self.jobs:
                    self.jobs[number] = JobFact.ENDED
            case SetReason(_, expected, reason):
                assert expected == self.status
                self.reason = reason
        return cut - 1

    def submit(self, cut: int) -> int:
        if cut > 0:
            self.jobs.setdefault(self.submission, JobFact.ALIVE)
        if cut > 1:
            self.recorded, self.submitted_at = True, self.now
        return cut - 2

    def change(self, to: RunStatus) -> None:
        assert to == self.status or to in TRANSITIONS[self.status], f"{self.status} -> {to}"
        self.status, self.reason = to, None

    def apply_verdict(self) -> None:
        self.change(RunStatus.CANCELLED if self.stop else RunStatus.SUCCEEDED)

    @precondition(lambda self: self.jobs.get(self.submission) == JobFact.ALIVE)
    @rule(finishes=st.booleans(), checkpoint=st.booleans())
    def driver_ends(self, finishes: bool, checkpoint: bool) -> None:
        if checkpoint:
            self.fruitful = self.submission
        if finishes:
            self.finished.add(self.submission)
        self.jobs[self.submission] = JobFact.ENDED

    @rule()
    def cluster_is_lost(self) -> None:
        self.jobs.clear()

    @precondition(
        lambda self: (
            self.status in (RunStatus.STARTING, RunStatus.RECOVERING)
            and self.jobs.get(self.submission)
        )
    )
    @rule()
    def training_starts(self) -> None:
        self.change(RunStatus.RUNNING)

    @precondition(lambda self: self.status in LIVE and self.status != RunStatus.STOPPING)
    @rule(stop=st.sampled_from(["cancel", "pause"]))
    def user_stops(self, stop: Any) -> None:
        self.stop, self.stop_at = stop, self.now
        if self.status == RunStatus.QUEUED:
            self.change(RunStatus.CANCELLED if stop == "cancel" else RunStatus.PAUSED)
            self.stop = None
        else:
            self.change(RunStatus.STOPPING)

    @precondition(lambda self: self.status == RunStatus.PAUSED)
    @rule()
    def user_resumes(self) -> None:
        self.stop = None
        self.change(RunStatus.QUEUED)

    @invariant()
    def at_most_one_job_lives(self) -> None:
        if not hasattr(self, "jobs"):
            return
        alive = [number for number, job in self.jobs.items() if job == JobFact.ALIVE]
        assert len(alive) <= 1
        assert not alive or alive == [self.submission]

    @invariant()
    def terminal_is_terminal(self) -> None:
        if getattr(self, "terminal_at", None) is not None:
            assert self.status == self.terminal_at
        if hasattr(self, "status") and self.status.terminal:
            self.terminal_at = self.status

    def teardown(self) -> None:
        """With Ray back and drivers that finish, every run that is not paused ends."""
        if not hasattr(self, "status"):
            return
        for _ in range(200):
            if self.status.terminal or self.status == RunStatus.PAUSED:
                return
            self.now += 200
            self.tick(asked=True, drained=True, room=True, cut=9)
            if self.jobs.get(self.submission) == JobFact.ALIVE:
                self.driver_ends(finishes=True, checkpoint=True)
        raise AssertionError(f"the run hangs in {self.status}")


OneRunsLife.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=40)
TestOneRunsLife = OneRunsLife.TestCase
