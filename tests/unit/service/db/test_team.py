"""Preemption, quotas, the audit log and leases, on both databases."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from everstep.spec.parsing import parse_spec
from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import EventKind
from everstep.wire.team import Quotas
from service.db.audit import AuditedCall, AuditStore, begin_entry
from service.db.engine import Database, DatabaseError
from service.db.events import EventStore
from service.db.lease import LEASE_S, LeaseLost, LeaseStore
from service.db.projects import ProjectStore, QuotaExceeded
from service.db.runs import RunStore
from service.db.tokens import TokenStore
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from service.reconciler.loop import RENEW_S, Leadership
from tests.support.api_service import NOON, Journal, ManualClock, spec
from tests.support.postgres_server import PostgresServer

pytest_plugins = ["tests.support.database_fixtures"]


def create(runs: RunStore, **fields: Any) -> RunRow:
    return runs.create(parse_spec(spec(**fields)), "tok_test")[0]


def started(runs: RunStore, limit: int | None = None) -> RunRow:
    run = create(runs)
    runs.claim_submission(run.id, 0, limit)
    return runs.record_job(run.id, 1, f"{run.id}-s001")


def statuses(runs: RunStore, run_id: str) -> list[tuple[str, str | None]]:
    return [(row.to_status, row.reason_code) for row in runs.transitions([run_id])[run_id]][2:]


# ---------------------------------------------------------------- preemption


def test_a_preempted_run_queues_again_in_the_transaction_that_pauses_it(
    runs: RunStore, database: Database
) -> None:
    run, urgent = started(runs, limit=3), create(runs)
    assert run.workers_limit == 3
    stopping = runs.preempt(run.id, 1, urgent.id)
    assert (stopping.status, stopping.stop_requested, stopping.preempted_by) == (
        RunStatus.STOPPING,
        "pause",
        urgent.id,
    )
    with pytest.raises(TransitionConflict):
        runs.preempt(run.id, 1, "run_other")
    journal, events = Journal(), EventStore(database, runs.clock)
    events.apply_journal(run.id, 1, journal.start(), "b")
    finished = journal.event(
        EventKind.FINISHED,
        outcome="stopped",
        reason={"code": "paused_by_user", "message": "x"},
        step=7,
    )
    back = events.apply_journal(run.id, 1, [finished], "c")
    assert (back.status, back.step, back.stop_requested, back.preempted_by) == (
        RunStatus.QUEUED,
        7,
        None,
        None,
    )
    assert back.reason is not None and urgent.id in back.reason.message
    preempted = ReasonCode.PREEMPTED_BY_PRIORITY.value
    assert statuses(runs, run.id) == [
        ("STOPPING", preempted),
        ("PAUSED", preempted),
        ("QUEUED", preempted),
    ]
    again = runs.claim_submission(run.id, 1)
    assert (again.status, again.submission, again.workers_limit) == (RunStatus.STARTING, 2, None)
    on = events.apply_journal(run.id, 2, Journal(2, attempt=2).start(7), "d")
    assert (on.attempt, on.restarts) == (2, 1), "no owner paused it"


def test_a_user_s_pause_outlasts_the_scheduler_s(runs: RunStore) -> None:
    run = started(runs)
    runs.preempt(run.id, 1, "run_urgent")
    runs.request_stop(run.id, "pause")
    assert runs.transition(run.id, RunStatus.STOPPING, RunStatus.PAUSED).status == RunStatus.PAUSED


def test_a_cancel_ends_a_preempted_run(runs: RunStore) -> None:
    run = started(runs)
    runs.preempt(run.id, 1, "run_urgent")
    runs.request_stop(run.id, "cancel")
    ended = runs.transition(run.id, RunStatus.STOPPING, RunStatus.CANCELLED)
    assert (ended.status, ended.preempted_by) == (RunStatus.CANCELLED, None)


# ---------------------------------------------------------------- projects


def test_a_project_comes_with_its_first_run_or_token_and_its_queue_has_an_end(
    runs: RunStore, database: Database
) -> None:
    projects, tokens = ProjectStore(database), TokenStore(database)
    create(runs, project="seen")
    tokens.create("t", "viewer", "tokened")
    assert [row.name for row, _ in projects.all()] == ["default", "seen", "tokened"]
    assert projects.put("seen", Quotas(max_queued=2))[1] is False
    assert projects.quotas() == {"seen": Quotas(max_queued=2)}
    waiting = create(runs, project="seen")
    with pytest.raises(QuotaExceeded, match="has 2 waiting runs"):
        create(runs, project="seen")
    runs.request_stop(waiting.id, "cancel")
    create(runs, project="seen")


# ---------------------------------------------------------------- audit log


def test_an_entry_is_written_with_what_it_tells_of_or_not_at_all(
    runs: RunStore, database: Database, clock: ManualClock
) -> None:
    audit = AuditStore(database, clock)
    database.companion = audit.join
    entry = AuditedCall(
        "POST",
        "/v1/runs" + "x" * 600,
        "10.0.0.1",
        token_id="tok_a",
        token_name="a",
        role="submitter",
        status=201,
    )
    begin_entry(entry)
    try:
        with pytest.raises(ZeroDivisionError), database.write():
            raise ZeroDivisionError
        assert entry.seq is None and audit.page(10) == []
        run = create(runs)
        create(runs)
    finally:
        begin_entry(None)
    [row] = audit.page(10)
    assert (row.token_id, row.target, row.status, row.at, len(row.path)) == (
        "tok_a",
        run.id,
        201,
        NOON,
        512,
    )
    create(runs)
    assert len(audit.page(10)) == 1, "the reconciler's writes are nobody's call"


# ---------------------------------------------------------------- leases


def expire(database: Database, clock: ManualClock) -> None:
    """As if the holder had been silent for long enough."""
    clock.now += LEASE_S + 1
    with database.write() as connection:
        connection.execute(
            text("UPDATE leases SET expires_at = expires_at - :s"), {"s": LEASE_S + 1}
        )


def test_one_holder_at_a_time_and_an_old_one_writes_nothing(
    database: Database, clock: ManualClock
) -> None:
    leases = LeaseStore(database, clock)
    first = leases.take("reconciler", "a")
    assert first is not None and leases.take("reconciler", "a") == first, (
        "renewed under the same fence"
    )
    assert leases.take("reconciler", "b") is None
    old = RunStore(database.guarded(first.check), clock)
    run = create(old)
    expire(database, clock)
    old.set_reason(run.id, RunStatus.QUEUED, None)  # nobody took over: it is still the only one
    second = leases.take("reconciler", "b")
    assert second is not None and second.fence > first.fence
    with pytest.raises(LeaseLost):
        old.claim_submission(run.id, 0)
    assert (
        RunStore(database.guarded(second.check), clock).claim_submission(run.id, 0).submission == 1
    )
    leases.release(second)
    assert leases.take("reconciler", "a") is not None, "given back, not waited for"
    leases.release(first)
    assert leases.take("reconciler", "b") is None, "an old lease gives nothing back"


def test_a_lease_does_not_change_hands_in_the_middle_of_a_write(
    database: Database, clock: ManualClock
) -> None:
    leases = LeaseStore(database, clock)
    first = leases.take("reconciler", "a")
    assert first is not None
    expire(database, clock)
    inside, taken = threading.Event(), []

    def take_over() -> None:
        inside.wait(60)
        taken.append(leases.take("reconciler", "b"))

    thread = threading.Thread(target=take_over)
    thread.start()
    with database.guarded(first.check).write() as connection:
        inside.set()
        thread.join(0.3)
        assert taken == []
        connection.execute(text("DELETE FROM idempotency_keys"))
    thread.join(60)
    assert taken[0] is not None and taken[0].holder == "b"


def test_a_lease_that_is_renewed_while_another_asks_stays(
    postgresql: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgresql.database() as url:
        database = Database(url)
        mine, other = LeaseStore(database), LeaseStore(database)
        assert mine.take("reconciler", "a") is not None
        renewal, ask = threading.Thread(target=mine.take, args=("reconciler", "a")), other._now

        def slowly(connection: Connection) -> float:
            now = ask(connection)
            renewal.start()
            renewal.join(0.5)
            return now

        monkeypatch.setattr(other, "_now", slowly)
        assert other.take("reconciler", "b") is None
        renewal.join(60)
        database.close()


# ---------------------------------------------------------------- addresses and lost connections


@pytest.mark.parametrize("url", ["mysql://a/b", "nonsense", ""])
def test_an_address_that_is_not_served_says_what_is(url: str) -> None:
    with pytest.raises(DatabaseError, match=r"postgresql\+psycopg"):
        Database(url)


def test_an_address_may_name_any_driver(tmp_path: Path) -> None:
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'everstep.db'}")
    database.migrate()
    assert [row.name for row, _ in ProjectStore(database).all()] == ["default"]
    database.close()


def test_submissions_at_the_same_moment_do_not_pass_a_quota_together(
    database: Database, clock: ManualClock
) -> None:
    runs, projects = RunStore(database, clock), ProjectStore(database, clock)
    projects.put("default", Quotas(max_queued=3))
    together = threading.Barrier(8)

    def submit(_: int) -> bool:
        together.wait(30)
        try:
            create(runs)
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(submit, range(8))) == 3


def test_a_run_hears_of_another_project_s_run_only_that_it_is_one(
    database: Database, clock: ManualClock
) -> None:
    runs = RunStore(database, clock)
    runs_of_both = [create(runs, project=name) for name in ("default", "theirs")]
    for urgent, named in zip(runs_of_both, (True, False), strict=True):
        shrunk, paused = started(runs), started(runs)
        runs.shrink(shrunk.id, 1, 1, urgent.id)
        [limited] = EventStore(database, clock).of_kinds(shrunk.id, {EventKind.WORKERS_LIMITED})
        stopping = runs.preempt(paused.id, 1, urgent.id)
        assert stopping.reason_message is not None
        texts = (str(limited.data["by"]), stopping.reason_message)
        assert [urgent.id in text for text in texts] == [named, named] and (
            named or "another project" in texts[1]
        )


async def test_a_lease_that_others_had_meanwhile_is_not_taken_back_in_the_middle_of_a_tick(
    database: Database, clock: ManualClock
) -> None:
    """What that tick saw may no longer be so, although nobody holds the lease now."""
    leases = LeaseStore(database, clock)
    mine, other = Leadership(leases), Leadership(leases)
    assert await mine.hold()
    await mine.renew()
    assert mine.leads
    held = mine._lease
    assert held is not None
    leases.release(held)  # as if it had expired
    assert await other.hold()
    await other.release()
    await mine.renew()
    assert not mine.leads
    with database.read() as connection, pytest.raises(LeaseLost):
        mine.check(connection)
    await asyncio.sleep(RENEW_S)
    assert await mine.hold(), "but the next tick may"
