"""A clock that is set back by an hour, as after a boot without the network: nothing waits for that
hour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from everstep.wire import RunStatus
from service.db.engine import Database
from service.db.lease import LeaseStore
from service.model.run_rows import RunRow
from service.reconciler.decide import STOP_GRACE_S, decide
from service.reconciler.facts import Decision, EndJob, Facts, JobFact, NodeState, Start, TailFact
from service.reconciler.observe import facts_of
from tests.support.api_service import NOON, ManualClock
from tests.support.projected_events import run_row

pytest_plugins = ["tests.support.database_fixtures"]

NODES = (NodeState("n", {"CPU": 4.0}),)


def first(row: RunRow, job: JobFact, wanted: Callable[[Decision], bool], back_s: float) -> float:
    """Return the seconds until this is decided about a run, after the clock was set back."""
    for waited_s in range(0, 300, 5):
        now = NOON - back_s + waited_s
        run = facts_of(row, job=job, tail=TailFact.DRAINED, now=now)
        if any(map(wanted, decide(Facts(now=now, nodes=NODES, runs=(run,))))):
            return waited_s
    return float("inf")


@pytest.mark.parametrize("submission", [1, 6])
def test_a_driver_that_died_is_replaced(submission: int) -> None:
    row = replace(run_row(), submission=submission, ray_job_id="job", submitted_at=NOON)

    def starts(decision: Decision) -> bool:
        return isinstance(decision, Start)

    straight = first(row, JobFact.ENDED, starts, 0.0)
    assert straight <= 60 and first(row, JobFact.ENDED, starts, 3600.0) == straight


def test_a_stop_is_enforced() -> None:
    row = replace(
        run_row(RunStatus.STOPPING),
        stop_requested="cancel",
        stop_requested_at=NOON,
        submitted_at=1.0,
    )

    def ends(decision: Decision) -> bool:
        return isinstance(decision, EndJob)

    straight = first(row, JobFact.ALIVE, ends, 0.0)
    assert STOP_GRACE_S["cancel"] < straight == first(row, JobFact.ALIVE, ends, 3600.0)


def test_another_process_takes_over(database: Database, clock: ManualClock) -> None:
    leases = LeaseStore(database, clock)
    assert leases.take("lead", "one") is not None
    if database.is_sqlite:
        clock.now -= 3600
    else:
        with database.write() as connection:
            connection.exec_driver_sql("UPDATE leases SET expires_at = expires_at + 3600")
    found = leases.take("lead", "two")
    assert found is not None and found.fence == 2
