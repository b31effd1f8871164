"""Runs in a real SQLite database."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import literal_column, select, text
from sqlalchemy.exc import IntegrityError

from everstep.spec.parsing import parse_spec
from everstep.wire import Reason, ReasonCode, RunStatus
from service.db.engine import Database
from service.db.events import EventStore
from service.db.ids import ALPHABET, RUN_ID_PATTERN, IdempotencyConflict, IdempotencyKey, new_id
from service.db.run_lookup import RunFilter
from service.db.runs import RunStore
from service.db.tables import IS_LIVE
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from tests.support.api_service import NOON, ManualClock, spec
from tests.support.prepared_database import prepared_database

pytest_plugins = ["tests.support.database_fixtures"]

WAITING = Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message="2 CPUs are missing")


def create(runs: RunStore, **fields: Any) -> RunRow:
    return runs.create(parse_spec(spec(**fields)), "tok_test")[0]


def test_a_new_run_is_queued_with_its_history(runs: RunStore, events: EventStore) -> None:
    run = create(runs, tags={"team": "vision"})
    assert RUN_ID_PATTERN.fullmatch(run.id)
    assert runs.get(run.id) == run
    fields = (run.status, run.submission, run.created_at, run.last_seq)
    assert fields == (RunStatus.QUEUED, 0, NOON, 2)
    assert run.spec["train"]["global_batch_size"] == 128, "the spec is stored as resolved"
    assert [(row.seq, row.kind, row.data) for row in events.after(run.id, 0, 10)] == [
        (1, "run_created", {"name": "digits", "project": "default"}),
        (2, "status", {"from": None, "to": "QUEUED", "reason": None}),
    ]
    [first] = runs.transitions([run.id])[run.id]
    assert (first.from_status, first.to_status, first.seq) == (None, "QUEUED", 2)


def test_ids_sort_by_time_and_differ_within_a_millisecond() -> None:
    ids = [new_id("run", NOON + second) for second in range(1000)]
    assert ids == sorted(ids)
    assert len({new_id("run", NOON) for _ in range(50)}) > 40
    assert sorted(ALPHABET) == list(ALPHABET) and len(set(ALPHABET)) == 32


def test_an_id_that_is_taken_is_drawn_again(
    runs: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = create(runs)
    drawn = iter([first.id, first.id, "run_000000000001"])
    monkeypatch.setattr("service.db.runs.new_id", lambda _kind, _now: next(drawn))
    assert create(runs).id == "run_000000000001"


def test_a_key_of_a_deleted_run_stays_used(runs: RunStore) -> None:
    key = IdempotencyKey("tok_a", "key", "body")
    run, _ = runs.create(parse_spec(spec()), "tok_a", key)
    runs.request_stop(run.id, "cancel")
    runs.delete(run.id)
    with pytest.raises(IdempotencyConflict, match="was deleted"):
        runs.create(parse_spec(spec()), "tok_a", key)


@pytest.mark.parametrize(
    "where",
    [
        RunFilter(tags=(("team", "vision"),)),
        RunFilter(
            tags=(("team", "vision"), ("stage", None)),
            statuses=(RunStatus.QUEUED, RunStatus.PAUSED),
        ),
        RunFilter(statuses=(RunStatus.CANCELLED, RunStatus.QUEUED, RunStatus.QUEUED)),
        RunFilter(
            statuses=(RunStatus.CANCELLED, RunStatus.PAUSED), project="default", search="VIS"
        ),
        RunFilter(project="default", statuses=(RunStatus.PAUSED,)),
    ],
    ids=["tag", "tags and statuses", "statuses", "statuses and search", "project and status"],
)
def test_pages_of_every_kind_are_the_whole_list_cut(
    runs: RunStore, clock: ManualClock, where: RunFilter
) -> None:
    for index in range(24):
        clock.now = NOON + index // 3
        made = create(runs, tags={"team": ("vision", "text")[index % 2], "stage": "x"})
        if index % 3:
            runs.request_stop(made.id, ("cancel", "pause")[index % 3 - 1])
    everything = [runs.get(run.id) for run in runs.find(RunFilter(), 100)]
    team = dict(where.tags).get("team") or ("vision" if where.search else None)
    wanted = {
        run.id
        for run in everything
        if run
        and (not where.statuses or run.status in where.statuses)
        and team in (None, run.tags["team"])
    }
    seen, before = [], None
    while page := runs.page(where, 2, before):
        seen += page
        before = (seen[-1].created_at, seen[-1].id)
    assert len(seen) == len(wanted) > 2 and {run.id for run in seen} == wanted
    assert [run.created_at for run in seen] == sorted(
        (run.created_at for run in seen), reverse=True
    )


def test_filters_hold_together_whatever_they_are(runs: RunStore) -> None:
    made = [
        create(runs, name="alpha", project="p1", tags={"team": "vision", "stage": "dev"}),
        create(runs, name="beta", project="p1", tags={"team": "speech"}),
        create(runs, name="alpha", project="p2", tags={"team": "vision", "stage": "dev", "a": "b"}),
    ]
    runs.request_stop(made[2].id, "cancel")
    made = [row for run in made if (row := runs.get(run.id))]
    filters = itertools.product(
        (None, "p1"),
        (None, "alpha"),
        ((), (RunStatus.QUEUED,), (RunStatus.QUEUED, RunStatus.CANCELLED)),
        (None, "VIS"),
        (
            (),
            (("team", "vision"),),
            (("team", "vision"), ("stage", "dev")),
            (("team", "vision"), ("stage", None), ("a", "b")),
        ),
    )
    num_asked = 0
    for project, name, statuses, search, tags in filters:
        where = RunFilter(project=project, name=name, statuses=statuses, search=search, tags=tags)
        expected = {
            run.id
            for run in made
            if project in (None, run.project)
            and name in (None, run.name)
            and (not statuses or run.status in statuses)
            and (search is None or "vis" in str(run.tags))
            and all(
                value in (None, run.tags[key]) if key in run.tags else False for key, value in tags
            )
        }
        assert {run.id for run in runs.find(where, 100)} == expected, where
        assert {run.id for run in runs.page(where, 100, None)} == expected, where
        num_asked += 1
    assert num_asked == 2 * 2 * 3 * 2 * 4


def test_live_runs_are_those_with_work_left(runs: RunStore) -> None:
    queued, paused, started, ended = (create(runs) for _ in range(4))
    runs.request_stop(paused.id, "pause")
    runs.claim_submission(started.id, 0)
    runs.request_stop(ended.id, "cancel")
    assert {run.id for run in runs.live()} == {queued.id, started.id}
    counts = runs.count_by_status()
    assert [counts[RunStatus(name)] for name in ("QUEUED", "PAUSED", "RUNNING")] == [1, 1, 0]


def test_sqlite_finds_live_runs_among_ended_ones_by_their_index(tmp_path: Path) -> None:
    database = prepared_database(f"sqlite:///{tmp_path / 'e.db'}")
    query = select(literal_column("id")).where(IS_LIVE)
    sql = query.compile(compile_kwargs={"literal_binds": True})
    with database.read() as connection:
        plan = connection.execute(text(f"EXPLAIN QUERY PLAN {sql}")).all()
    database.close()
    assert "ix_runs_unended" in str(plan)


def test_a_transition_is_guarded_by_status_and_submission(runs: RunStore) -> None:
    run = create(runs)
    with pytest.raises(TransitionConflict):
        runs.transition(run.id, RunStatus.RUNNING, RunStatus.FAILED)
    with pytest.raises(TransitionConflict, match="submission is 0, not 3"):
        runs.transition(run.id, RunStatus.QUEUED, RunStatus.STARTING, submission=3)
    reason = Reason(code=ReasonCode.DEADLINE_EXCEEDED, message="too late")
    failed = runs.transition(
        run.id,
        {RunStatus.QUEUED, RunStatus.STARTING},
        RunStatus.FAILED,
        reason,
        columns={"priority": 7},
    )
    assert (failed.status, failed.reason, failed.finished_at, failed.priority) == (
        RunStatus.FAILED,
        reason,
        NOON,
        7,
    )
    with pytest.raises(TransitionConflict) as gone:
        runs.transition("run_000000000000", RunStatus.QUEUED, RunStatus.FAILED)
    assert gone.value.found is None


def test_one_of_many_claims_wins(runs: RunStore) -> None:
    run = create(runs)
    barrier = threading.Barrier(8)

    def claim(_: int) -> int | None:
        barrier.wait()
        try:
            return runs.claim_submission(run.id, 0).submission
        except TransitionConflict:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [answer for answer in pool.map(claim, range(8)) if answer is not None]
    assert won == [1]


def test_claims_follow_the_run(runs: RunStore) -> None:
    run = create(runs)
    assert runs.claim_submission(run.id, 0).status == RunStatus.STARTING
    recorded = runs.record_job(run.id, 1, "job-1")
    assert (recorded.ray_job_id, recorded.submitted_at) == ("job-1", NOON)
    runs.transition(run.id, RunStatus.STARTING, RunStatus.RUNNING)
    second = runs.claim_submission(run.id, 1)
    assert (second.status, second.submission, second.ray_job_id, second.submitted_at) == (
        RunStatus.RECOVERING,
        2,
        None,
        None,
    )
    with pytest.raises(TransitionConflict):
        runs.record_job(run.id, 1, "job-1")
    assert runs.claim_submission(run.id, 2).status == RunStatus.RECOVERING
    runs.request_stop(run.id, "cancel")
    with pytest.raises(TransitionConflict):
        runs.claim_submission(run.id, 3)


def test_reasons_are_said_in_one_go_where_runs_are_as_they_were(runs: RunStore) -> None:
    run, other = create(runs), create(runs)
    before = runs.live_versions()
    assert before == {row.id: row.row_version for row in runs.live()}
    runs.set_reasons(
        [
            (run.id, RunStatus.QUEUED, WAITING),
            (other.id, RunStatus.RUNNING, WAITING),
            ("run_gone", RunStatus.QUEUED, None),
        ]
    )
    found = runs.rows([run.id, other.id, "run_gone"])
    assert {name: row.reason for name, row in found.items()} == {run.id: WAITING, other.id: None}
    after = runs.live_versions()
    assert (
        list(after) == list(before)
        and after[run.id] > before[run.id]
        and after[other.id] == before[other.id]
    )
    runs.set_reason(run.id, RunStatus.QUEUED, None)
    assert {row.reason for row in runs.live()} == {None}
    runs.set_reason(run.id, RunStatus.QUEUED, WAITING)
    assert runs.claim_submission(run.id, 0).reason is None, "what it waited for is over"
    runs.set_reason(run.id, RunStatus.QUEUED, WAITING)
    assert {row.reason for row in runs.live()} == {None}


def test_a_submitted_run_is_asked_to_stop(
    runs: RunStore, events: EventStore, clock: ManualClock
) -> None:
    run = create(runs)
    runs.claim_submission(run.id, 0)
    clock.now += 5
    stopping = runs.request_stop(run.id, "pause")
    assert (stopping.status, stopping.stop_requested, stopping.stop_requested_at) == (
        RunStatus.STOPPING,
        "pause",
        NOON + 5,
    )
    assert runs.request_stop(run.id, "pause") == stopping, "asking again changes nothing"
    cancelled = runs.request_stop(run.id, "cancel")
    assert (cancelled.status, cancelled.stop_requested) == (RunStatus.STOPPING, "cancel")
    with pytest.raises(TransitionConflict, match="being cancelled"):
        runs.request_stop(run.id, "pause")
    kinds = [(row.kind, row.data.get("stop")) for row in events.after(run.id, 3, 10)]
    assert kinds == [("stop_requested", "pause"), ("status", None), ("stop_requested", "cancel")]


def test_only_what_has_ended_is_deleted(
    runs: RunStore, events: EventStore, database: Database
) -> None:
    run, other = create(runs, tags={"a": "b"}), create(runs)
    with pytest.raises(TransitionConflict, match="only a run that has ended"):
        runs.delete(run.id)
    runs.request_stop(run.id, "cancel")
    runs.delete(run.id)
    assert runs.get(run.id) is None
    assert len(events.after(run.id, 0, 100)) == 0 and len(events.after(other.id, 0, 100)) == 2
    with database.read() as connection:
        for table in ("run_tags", "transitions"):
            assert (
                connection.execute(
                    text(f"SELECT count(*) FROM {table} WHERE run_id = :id"), {"id": run.id}
                ).scalar_one()
                == 0
            )
    with pytest.raises(TransitionConflict) as gone:
        runs.delete(run.id)
    assert gone.value.found is None


def test_a_writer_that_raises_leaves_no_trace_and_no_lock(
    database: Database, runs: RunStore
) -> None:
    class Boom(Exception):
        pass

    with pytest.raises(Boom), database.write() as connection:
        connection.execute(text("DELETE FROM tokens"))
        raise Boom
    assert create(runs).status == RunStatus.QUEUED


@pytest.mark.parametrize(
    "last",
    [
        "INSERT OR ROLLBACK INTO projects (name, created_at) VALUES ('first', 0)",
        "INSERT INTO run_tags (run_id, key, value) VALUES ('nobody', 'k', 'v')",
    ],
    ids=["SQLite ends the transaction itself", "the commit fails"],
)
def test_a_transaction_that_sqlite_gave_up_has_written_nothing(tmp_path: Path, last: str) -> None:
    database = Database(f"sqlite:///{tmp_path / 'e.db'}")
    database.migrate()

    def write(*statements: str) -> None:
        with database.write() as connection:
            for statement in statements:
                connection.execute(text(statement))

    first = "INSERT INTO projects (name, created_at) VALUES ('first', 0)"
    with pytest.raises(IntegrityError):
        write("PRAGMA defer_foreign_keys=ON", first, last)
    write(first)
    database.close()


_SUBMIT_FOREVER = """
import sys
from everstep.spec.parsing import parse_spec
from service.db.engine import Database
from service.db.ids import IdempotencyKey
from service.db.runs import RunStore
from tests.support.api_service import spec
database = Database(sys.argv[1])
database.migrate()
runs = RunStore(database)
wanted = parse_spec(spec())
for index in range(10**9):
    key = IdempotencyKey("tok_a", str(index), "body")
    print(runs.create(wanted, "tok_a", key)[0].id, flush=True)
"""


def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'e.db'}"
    process = subprocess.Popen(
        [sys.executable, "-c", _SUBMIT_FOREVER, url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(200)]
    os.kill(process.pid, signal.SIGKILL)
    acknowledged += process.stdout.read().split()
    process.stdout.close()
    process.wait()
    database = Database(url)
    database.migrate()
    found = {run.id for run in RunStore(database).find(RunFilter(), 100_000)}
    database.close()
    whole = [run_id for run_id in acknowledged if RUN_ID_PATTERN.fullmatch(run_id)]
    assert len(whole) >= 200 and set(whole) <= found
    assert len(found) <= len(whole) + 1, "at most the one that was under way"
