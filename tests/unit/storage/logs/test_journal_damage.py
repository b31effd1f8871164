"""A journal whose bytes are not what was written: never another event, never silently short, and
read on behind the damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.projections import attempts
from storage.checkpoints.retention import reported_checkpoints
from storage.errors import CorruptFile
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent, read_journal
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.fake_ray import FakeRay
from tests.support.reconciler_world import World
from tests.support.storage_places import event, quick_directory
from train_fn.recovery.history import read_history

pytest_plugins = ["tests.support.storage_fixtures", "tests.support.reconciler_fixtures"]


def journal_file(run_dir: RunDir, submission: int = 1) -> Path:
    return Path(run_dir.files.path(f"{run_dir.journal_stem(submission)}.jsonl"))


def write(run_dir: RunDir, events: list[JournalEvent], submission: int = 1) -> None:
    with JournalWriter(run_dir, submission) as writer:
        writer.append(events)


def failing(attempt: int, source_n: int) -> list[JournalEvent]:
    """An attempt that starts and fails."""
    workers = [{"rank": 0, "node_id": "n", "pid": 1}]
    started = event(source_n, EventKind.ATTEMPT_STARTED, data={"world_size": 1, "workers": workers})
    failed = event(source_n + 1, EventKind.FAILURE, data={"verdict": "worker_lost", "step": 7})
    return [JournalEvent(**{**vars(one), "attempt": attempt}) for one in (started, failed)]


def four_attempts(run_dir: RunDir) -> None:
    write(run_dir, [one for attempt in (1, 2, 3, 4) for one in failing(attempt, 2 * attempt)])


def flip(path: Path, line: int, at: int = 40) -> None:
    """Change one byte of a line, counted from 0."""
    lines = path.read_bytes().split(b"\n")
    spoilt = bytearray(lines[line])
    spoilt[at] ^= 0x01
    lines[line] = bytes(spoilt)
    path.write_bytes(b"\n".join(lines))


# ---------------------------------------------------------------- lines


@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_no_byte_can_be_changed_into_another_event(place: float, byte: int) -> None:
    with quick_directory() as directory:
        run_dir = RunDir(open_storage(directory), "run_d")
        write(
            run_dir,
            [
                event(number, EventKind.WAITING, data={"message": "17 rooms"})
                for number in (1, 2, 3)
            ],
        )
        written, path = read_journal(run_dir, 1)[0], journal_file(run_dir)
        data = bytearray(path.read_bytes())
        data[int(place * len(data))] = byte
        same = bytes(data) == path.read_bytes()
        path.write_bytes(bytes(data))
        found = read_journal(run_dir, 1, past_damage=True, is_over=True)[0]
        assert all(one in written for one in found if one.kind is not EventKind.JOURNAL_DAMAGED)
        assert same or len([one for one in found if one in written]) < 3 or found == written
        assert [one.n for one in found] == list(range(1, len(found) + 1))


def test_a_line_without_a_checksum_is_damage_even_where_its_kind_is_not_wanted(
    local_dir: RunDir,
) -> None:
    write(local_dir, [event(1), event(2)])
    path = journal_file(local_dir)
    lines = path.read_bytes().split(b"\n")
    lines[0] = lines[0][: lines[0].rindex(b',"crc"')] + b"}"
    path.write_bytes(b"\n".join(lines))
    for kinds in (None, (EventKind.FAILURE, EventKind.JOURNAL_DAMAGED)):
        found = read_journal(local_dir, 1, past_damage=True, kinds=kinds)[0]
        assert found[0].kind is EventKind.JOURNAL_DAMAGED and found[0].n == 1
        assert "no checksum" in str(found[0].data)


# ---------------------------------------------------------------- reading on


def test_without_being_asked_to_a_reader_stops_at_damage_and_names_file_and_line(
    local_dir: RunDir,
) -> None:
    four_attempts(local_dir)
    path = journal_file(local_dir)
    flip(path, 4)
    events, cursor = read_journal(local_dir, 1)
    assert [one.n for one in events] == [1, 2, 3, 4], "what comes before it is not held back"
    with pytest.raises(CorruptFile, match=f"journal line 5 of {path}.*checksum"):
        read_journal(local_dir, 1, cursor)


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_who_reads_past_damage_is_told_of_every_event_that_is_lost(
    local_dir: RunDir, limit: int
) -> None:
    four_attempts(local_dir)
    path = journal_file(local_dir)
    for line in (2, 3, 6):
        flip(path, line)
    found: list[JournalEvent] = []
    cursor: str | None = None
    while True:
        events, cursor = read_journal(local_dir, 1, cursor, limit, past_damage=True)
        found += events
        if not events:
            break
    assert [one.n for one in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    damaged = [one for one in found if one.kind is EventKind.JOURNAL_DAMAGED]
    assert [one.n for one in damaged] == [3, 4, 7]
    assert (
        damaged[0].data["file"] == str(path)
        and damaged[0].data["lines"] == [3, 4]
        and damaged[2].data["lines"] == [7]
    )


def test_a_spoilt_end_is_left_to_the_next_writer_unless_the_journal_is_over(
    local_dir: RunDir,
) -> None:
    four_attempts(local_dir)
    flip(journal_file(local_dir), 7)
    events, cursor = read_journal(local_dir, 1, past_damage=True)
    assert [one.n for one in events] == [1, 2, 3, 4, 5, 6, 7]
    assert read_journal(local_dir, 1, cursor, past_damage=True)[0] == [], (
        "it may be cut off and written anew"
    )
    [last] = read_journal(local_dir, 1, cursor, past_damage=True, is_over=True)[0]
    assert (last.kind, last.data["lines"]) == (EventKind.JOURNAL_DAMAGED, [8])
    write(local_dir, [event(99)])
    assert [one.n for one in read_journal(local_dir, 1)[0]] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_writer_cuts_off_nothing_that_is_whole(local_dir: RunDir) -> None:
    four_attempts(local_dir)
    flip(journal_file(local_dir), 2)
    write(local_dir, [event(50)])
    found = read_journal(local_dir, 1, past_damage=True)[0]
    assert [one.n for one in found] == list(range(1, 10))
    assert [one.n for one in found if one.kind is EventKind.JOURNAL_DAMAGED] == [3]


# ---------------------------------------------------------------- what is made of it


@pytest.mark.parametrize("line", range(8))
def test_a_history_with_a_spoilt_line_is_not_silently_short(local_dir: RunDir, line: int) -> None:
    """Budgets rest on it: one spoilt byte had cut it down to what came before."""
    four_attempts(local_dir)
    path = journal_file(local_dir)
    flip(path, line)
    history = read_history(local_dir)
    assert history.last_attempt == 4
    assert len(history.failures) == (3 if line % 2 else 4), "an event is lost, and no more"
    [damage] = history.damage
    assert (damage["file"], damage["lines"]) == (str(path), [line + 1])
    reported = JournalEvent(
        kind=EventKind.JOURNAL_DAMAGED,
        at=2.0,
        submission=2,
        data=damage,
        source="driver.1",
        source_n=1,
    )
    write(local_dir, [reported], submission=2)
    assert read_history(local_dir).damage == (), "one driver tells it"


def test_checkpoints_behind_a_spoilt_line_are_known(local_dir: RunDir) -> None:
    names = [f"step-{step:09d}.s001.a001" for step in (10, 20, 30)]
    write(
        local_dir,
        [
            event(n, EventKind.CHECKPOINT_COMMITTED, data={"name": name})
            for n, name in enumerate(names, 1)
        ],
    )
    flip(journal_file(local_dir), 1, at=30)
    assert {str(name) for name in reported_checkpoints(local_dir)} == {names[0], names[2]}


@pytest.mark.usefixtures("whole_ticks")
async def test_the_service_reads_on_and_says_what_is_lost(here: World, ray: FakeRay) -> None:
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, *[(EventKind.WAITING, {"message": "room"})] * 3)
    here.write(
        run.id,
        1,
        (EventKind.FINISHED, {"outcome": "succeeded", "reason": None, "step": 10}),
        first=4,
    )
    path = journal_file(RunDir(here.storage, run.id))
    flip(path, 1)
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.SUCCEEDED
    events = here.events.after(run.id, 0, 100)
    [damaged] = [one for one in events if one.kind == EventKind.JOURNAL_DAMAGED]
    assert (damaged.data["file"], damaged.data["lines"]) == (str(path), [2])
    [failure] = attempts.failures(events)
    assert (
        failure.verdict == "storage"
        and str(path) in str(failure.exception)
        and "line 2" in str(failure.exception)
    )
