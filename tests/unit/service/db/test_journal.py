"""Journals applied to a real database: once, in order, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.spec.parsing import parse_spec
from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.db.engine import Unstorable
from service.db.events import EventPage, EventStore, JournalGap, SeriesStore
from service.db.runs import RunStore
from service.model.rows import METRIC_NAME_CHARS, EventRow
from service.model.run_rows import RunRow
from service.reconciler.facts import TailFact
from service.reconciler.tail import JournalTail
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.api_service import NOON, Journal, ManualClock, spec
from tests.support.prepared_database import prepared_database


class Stores:
    def __init__(self, url: str) -> None:
        self.database = prepared_database(url)
        self.clock = ManualClock()
        self.runs = RunStore(self.database, self.clock)
        self.events = EventStore(self.database, self.clock)
        self.series = SeriesStore(self.database)

    def submitted(self) -> RunRow:
        run, _ = self.runs.create(parse_spec(spec()), "tok_test")
        return self.runs.claim_submission(run.id, 0)

    def history(self, run_id: str) -> list[EventRow]:
        return self.events.after(run_id, 0, 10_000)


@pytest.fixture
def stores(database_url: str) -> Iterator[Stores]:
    stores = Stores(database_url)
    yield stores
    stores.database.close()


MIB = 1 << 20


def padded(journal: Journal, *sizes_bytes: int) -> list[JournalEvent]:
    """Events with so much text each; it is two bytes a character, as the database keeps it."""
    return [
        journal.event(EventKind.EPOCH_HOOK_DONE, pad="\u00e9" * (size // 2)) for size in sizes_bytes
    ]


def test_a_page_of_events_is_bounded_by_its_bytes_and_never_empty(stores: Stores) -> None:
    run = stores.submitted()
    before = len(stores.history(run.id))
    journal = Journal()
    sizes = [3 * MIB, 3 * MIB, 3 * MIB, 100, 7 * MIB, 9 * MIB, 100, 100]
    stores.events.apply_journal(run.id, 1, padded(journal, *sizes), "c")
    cut, after = [], before
    while True:
        page = stores.events.page(run.id, after, 3)
        cut.append([row.seq - before for row in page.rows])
        assert (
            len(page.rows) == 1 or sum(len(row.data["pad"].encode()) for row in page.rows) < 8 * MIB
        ), cut
        after = page.rows[-1].seq
        if not page.more:
            break
    assert cut == [[1, 2], [3, 4], [5], [6], [7, 8]]
    assert stores.events.page(run.id, after, 3) == EventPage((), more=False)
    [first, *_] = stores.events.page(run.id, 0, 1).rows
    assert first.kind == "run_created"
    hooks = stores.events.page(run.id, 0, 100, {EventKind.EPOCH_HOOK_DONE})
    assert ([row.seq - before for row in hooks.rows], hooks.more) == ([1, 2], True)


def whole_run(submission: int = 1) -> list[JournalEvent]:
    """From the submission's first event to its last, with a failure in the middle."""
    journal = Journal(submission)
    events = [journal.event(EventKind.SUBMISSION_STARTED, ray_job_id="job"), *journal.start()]
    events += [journal.steps(1, 2, 3, at=NOON + 1), journal.checkpoint(3)]
    events += [
        journal.event(EventKind.FAILURE, verdict="worker_lost", step=5),
        journal.event(EventKind.ATTEMPT_ENDED, cause="worker_lost", last_step=5),
    ]
    journal.attempt = 2
    events += [
        *journal.start(3, 1, source="checkpoint"),
        journal.event(EventKind.RECOVERED, steps_lost=2),
        journal.steps(4, 5),
    ]
    events += [
        journal.event(EventKind.EVALUATED, step=5, epoch=0, metrics={"accuracy": 0.9}),
        journal.event(
            EventKind.EPOCH_COMPLETED,
            epoch=0,
            samples=5,
            used_once=5,
            duplicates=0,
            missing=0,
            digest="d",
            seconds=1.0,
        ),
        journal.checkpoint(5, accuracy=0.9),
        journal.event(EventKind.ATTEMPT_ENDED, cause="finished", last_step=5),
        journal.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=5),
    ]
    return events


def test_a_whole_run(stores: Stores) -> None:
    run = stores.submitted()
    stores.clock.now += 10
    ended = stores.events.apply_journal(run.id, 1, whole_run(), "end")
    assert stores.runs.get(run.id) == ended
    assert (ended.status, ended.step, ended.attempt, ended.restarts, ended.steps_lost) == (
        RunStatus.SUCCEEDED,
        5,
        2,
        1,
        2,
    )
    assert (ended.world_size, ended.workers, ended.journal_cursor, ended.journal_submission) == (
        None,
        [],
        "end",
        1,
    )
    assert ended.metrics == {"loss": 0.5, "val_accuracy": 0.9}
    assert ended.latest_checkpoint is not None and ended.latest_checkpoint["step"] == 5
    assert (ended.started_at, ended.finished_at) == (NOON + 1, NOON + 1), (
        "by the clock of where it happened, not of the tail"
    )
    history = stores.history(run.id)
    assert [row.seq for row in history] == list(range(1, ended.last_seq + 1))
    statuses = [row.to_status for row in stores.runs.transitions([run.id])[run.id]]
    assert statuses == ["QUEUED", "STARTING", "RUNNING", "RECOVERING", "RUNNING", "SUCCEEDED"]
    assert (history[-1].kind, history[-1].data["to"]) == ("status", "SUCCEEDED")
    assert [(point.step, point.value) for point in stores.series.points(run.id, "loss")] == [
        (n, 0.5) for n in range(1, 6)
    ]
    assert stores.series.names(run.id) == ["loss", "val_accuracy"]


def test_a_gap_is_refused_and_nothing_is_written(stores: Stores) -> None:
    run, batch = stores.submitted(), whole_run()
    before = stores.events.apply_journal(run.id, 1, batch[:4], "four")
    with pytest.raises(JournalGap, match="event 6 follows 4"):
        stores.events.apply_journal(run.id, 1, batch[5:], "end")
    assert stores.runs.get(run.id) == before


def test_an_empty_batch_moves_the_cursor_only(stores: Stores) -> None:
    run = stores.submitted()
    moved = stores.events.apply_journal(run.id, 1, [], "behind a mark")
    assert (moved.journal_cursor, moved.last_seq) == ("behind a mark", run.last_seq)
    assert (
        stores.events.apply_journal(run.id, 1, [], "behind a mark").row_version == moved.row_version
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_any_way_of_reading_gives_the_same_run(stores: Stores, cuts: list[tuple[int, int]]) -> None:
    """Batches that repeat, overlap and leave gaps, as a tail that was killed may hand them over,
    then the rest."""
    batch = whole_run()
    reference = stores.submitted()
    expected = stores.events.apply_journal(reference.id, 1, batch, "end")
    run = stores.submitted()
    for first, last in cuts:
        try:
            stores.events.apply_journal(
                run.id, 1, batch[first : max(first, last)], f"cursor-{last}"
            )
        except JournalGap:
            continue
    applied = stores.events.apply_journal(run.id, 1, batch, "end")
    differing = {"id", "row_version", "spec", "journal_cursor"}
    assert {k: v for k, v in applied.columns().items() if k not in differing} == {
        k: v for k, v in expected.columns().items() if k not in differing
    }
    assert [(row.seq, row.kind, row.data) for row in stores.history(run.id)] == [
        (row.seq, row.kind, row.data) for row in stores.history(reference.id)
    ]


def test_an_older_submission_is_not_heard_any_more(stores: Stores) -> None:
    run, batch = stores.submitted(), whole_run()
    stores.events.apply_journal(run.id, 1, batch[:6], "six")
    stores.runs.claim_submission(run.id, 1)
    assert stores.events.apply_journal(run.id, 1, batch[:7], "seven").journal_n == 7, (
        "its ranks leave while the next driver starts"
    )
    taken = stores.events.apply_journal(run.id, 2, whole_run(2)[:2], "two")
    assert (taken.journal_submission, taken.journal_n, taken.journal_cursor) == (2, 2, "two")
    assert stores.events.apply_journal(run.id, 1, batch, "end") == taken
    assert stores.events.apply_journal(run.id, 3, whole_run(3)[:2], "two") == taken, (
        "a submission that nobody claimed"
    )


def test_nothing_is_heard_after_the_end(stores: Stores) -> None:
    run = stores.submitted()
    ended = stores.runs.transition(run.id, RunStatus.STARTING, RunStatus.CANCELLED)
    assert stores.events.apply_journal(run.id, 1, whole_run(), "end") == ended


def test_events_of_a_clock_that_runs_ahead_do_not_book_the_future(stores: Stores) -> None:
    run, journal = stores.submitted(), Journal(at=NOON + 3600)
    stores.clock.now = NOON + 5
    batch = [
        *journal.start(),
        journal.steps(1),
        journal.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=1),
    ]
    ended = stores.events.apply_journal(run.id, 1, batch, "end")
    assert ended.finished_at == NOON + 5


def test_steps_done_again_replace_their_metrics(stores: Stores) -> None:
    run, journal = stores.submitted(), Journal()
    stores.events.apply_journal(run.id, 1, [*journal.start(), journal.steps(1, 2, loss=1.0)], "a")
    stores.events.apply_journal(
        run.id, 1, [journal.steps(2, at=NOON + 1, loss=None), journal.steps(3, loss=3.0)], "b"
    )
    points = stores.series.points(run.id, "loss")
    assert [(point.step, point.at, point.value) for point in points] == [
        (1, NOON, 1.0),
        (2, NOON + 1, None),
        (3, NOON + 1, 3.0),
    ]


@pytest.mark.parametrize(
    ("stop", "given_code", "status", "code"),
    [
        ("cancel", None, RunStatus.CANCELLED, ReasonCode.CANCELLED_BY_USER),
        ("pause", None, RunStatus.PAUSED, ReasonCode.PAUSED_BY_USER),
        ("cancel", "paused_by_user", RunStatus.CANCELLED, ReasonCode.CANCELLED_BY_USER),
    ],
)
def test_a_stopped_driver_ends_as_was_asked(
    stores: Stores, stop: str, given_code: str | None, status: RunStatus, code: ReasonCode
) -> None:
    run, journal = stores.submitted(), Journal()
    stores.events.apply_journal(run.id, 1, [*journal.start(), journal.steps(1)], "a")
    stores.runs.request_stop(run.id, "cancel" if stop == "cancel" else "pause")
    reason = {"code": given_code, "message": "heard"} if given_code else None
    batch = [
        journal.steps(2),
        journal.event(EventKind.FINISHED, outcome="stopped", reason=reason, step=2),
    ]
    stopping = stores.events.apply_journal(run.id, 1, batch[:1], "b")
    assert (stopping.status, stopping.step) == (RunStatus.STOPPING, 2), (
        "last steps do not make it RUNNING again"
    )
    ended = stores.events.apply_journal(run.id, 1, batch, "c")
    assert ended.status == status
    assert ended.reason is not None and ended.reason.code == code
    assert ended.stop_requested == ("cancel" if stop == "cancel" else None)


def test_a_run_that_fails_while_it_stops_says_why(stores: Stores) -> None:
    run, journal = stores.submitted(), Journal()
    stores.events.apply_journal(run.id, 1, [*journal.start(), journal.steps(1)], "a")
    stores.runs.request_stop(run.id, "cancel")
    reason = {"code": "user_error", "message": "KeyError: 'a'"}
    finished = journal.event(EventKind.FINISHED, outcome="failed", reason=reason, step=1)
    ended = stores.events.apply_journal(run.id, 1, [finished], "b")
    assert ended.status == RunStatus.FAILED and ended.reason is not None
    assert (ended.reason.code, ended.reason.message) == (ReasonCode.USER_ERROR, "KeyError: 'a'")


def test_words_and_names_that_no_column_can_hold_stop_no_journal(
    stores: Stores, tmp_path: Path
) -> None:
    """A file name that is not UTF-8 in an error's message, a metric whose name has no end."""
    storage = open_storage(str(tmp_path))
    run, journal = stores.submitted(), Journal(1)
    started = journal.start()
    named = [{"step": 3, "at": NOON, "values": {"x" * 500: 1.0, "n\x00\udce9": 2.0}}]
    odd = [
        journal.event(EventKind.METRICS, points=named),
        journal.event(
            EventKind.FAILURE,
            verdict="user_error",
            step=3,
            exception="OSError: bad file \udce9\x00.jpg",
        ),
    ]
    with JournalWriter(RunDir(storage, run.id), 1) as writer:
        writer.append([*started, *odd, journal.steps(4)])
    run, fact = JournalTail(storage, stores.events).drain(run)
    assert (fact, run.step) == (TailFact.DRAINED, 4)
    [failure] = stores.events.of_kinds(run.id, {"failure"})
    assert failure.data["exception"] == "OSError: bad file \\udce9\\x00.jpg"
    assert [name for name in stores.series.names(run.id) if name != "loss"] == [
        "n\\x00\\udce9",
        "x" * METRIC_NAME_CHARS,
    ]


def test_a_value_that_the_database_cannot_hold_is_no_trouble_of_the_database(
    stores: Stores,
) -> None:
    if stores.database.is_sqlite:
        assert stores.runs.get("run_\x00") is None
        return
    with pytest.raises(Unstorable, match="NUL"):
        stores.runs.get("run_\x00")
