"""The journal: each event once, in order, whatever dies; and the log below it."""

from __future__ import annotations

import io
import json
import os
import zlib
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from storage.errors import CorruptFile, InvalidStorage, LogTakenOver
from storage.files.local import LocalFiles
from storage.filesystem import Storage
from storage.logs import growing_log
from storage.logs.growing_log import SegmentedLog
from storage.logs.journal import JournalEvent, read_journal
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.storage_places import MemoryObjects, event, memory_run_dir

pytest_plugins = ["tests.support.storage_fixtures"]


def drain(
    run_dir: RunDir, cursor: str | None = None, limit: int = 1000
) -> tuple[list[JournalEvent], str]:
    found: list[JournalEvent] = []
    while True:
        events, cursor = read_journal(run_dir, 1, cursor, limit)
        assert len(events) <= limit
        if not events:
            return found, cursor
        found += events


def test_events_come_back_as_they_went_in(any_storage: Storage) -> None:
    run_dir = RunDir(any_storage, "run_a")
    assert read_journal(run_dir, 1) == ([], "0:0:0")
    sent = JournalEvent(
        kind=EventKind.RESTORED,
        at=1.25,
        submission=1,
        attempt=3,
        data={"step": 4, "text": "µ\n\r", "deep": [{"a": None}]},
        source="rank-0.a003",
        source_n=1,
    )
    with JournalWriter(run_dir, 1) as writer:
        writer.append([sent])
        writer.append([])
        events, cursor = read_journal(run_dir, 1)
        assert [(found.n, found.data, found.kind, found.attempt, found.at) for found in events] == [
            (1, sent.data, EventKind.RESTORED, 3, 1.25)
        ]
        assert read_journal(run_dir, 1, cursor) == ([], cursor)
        writer.append([event(1)])
    assert [found.n for found in read_journal(run_dir, 1, cursor)[0]] == [2]


def test_text_that_cannot_be_sent_on_comes_written_out(local_storage: Storage) -> None:
    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(1, **{"text": "a\x00\ud800", "n\udce9": [1]})])
    assert read_journal(run_dir, 1)[0][0].data == {"text": "a\\x00\\ud800", "n\\udce9": [1]}


def test_what_json_cannot_say(local_storage: Storage) -> None:
    import numpy

    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append(
            [
                event(
                    1,
                    values={"loss": float("nan"), "lr": [float("inf"), 0.5]},
                    number=numpy.float32(0.5),
                    path=Path("/x"),
                )
            ]
        )
    assert read_journal(run_dir, 1)[0][0].data == {
        "values": {"loss": None, "lr": [None, 0.5]},
        "number": 0.5,
        "path": "/x",
    }


def test_a_last_line_that_a_crash_spoilt_is_cut_off(local_storage: Storage) -> None:
    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(1)])
    path = Path(run_dir.files.path("runs/run_a/events/s001.jsonl"))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 100 + b"\n" + whole)
    events, cursor = read_journal(run_dir, 1)
    assert [found.n for found in events] == [1], "what comes before it is not held back"
    with pytest.raises(CorruptFile, match="journal line 2"):
        read_journal(run_dir, 1, cursor)
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(2)])
    assert [found.n for found in drain(run_dir)[0]] == [1, 2]


def test_a_line_that_is_written_over_while_it_is_read(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has half of a torn line when a new writer cuts it off and writes another in its
    place."""
    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(1)])
    _, cursor = read_journal(run_dir, 1)
    path = Path(run_dir.files.path("runs/run_a/events/s001.jsonl"))
    with path.open("ab") as file:
        file.write(b'{"n":2,"torn":"' + b"x" * 100)
    monkeypatch.setattr(growing_log, "_BLOCK_BYTES", 64)
    taken_over = False

    class Stream(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal taken_over
            block = super().read(size)
            if not taken_over and size == 64:
                taken_over = True
                with JournalWriter(run_dir, 1) as writer:
                    writer.append([event(2, text="y" * 200)])
            return block or b""

    def open_read(self: LocalFiles, relpath: str, offset: int = 0) -> Stream:
        stream = Stream(self.path(relpath))
        stream.seek(offset)
        return stream

    monkeypatch.setattr(LocalFiles, "open_read", open_read)
    events, _ = read_journal(run_dir, 1, cursor)
    assert taken_over
    assert [(found.n, found.data) for found in events] == [(2, {"text": "y" * 200})]


def test_a_reader_ahead_of_a_log_that_a_crash_shortened_goes_on(local_storage: Storage) -> None:
    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(n, text="long " * 50) for n in range(1, 6)])
    _, cursor = drain(run_dir)
    path = Path(run_dir.files.path("runs/run_a/events/s001.jsonl"))
    os.truncate(path, path.stat().st_size * 3 // 5 - 10)
    with JournalWriter(run_dir, 1) as writer:
        assert writer.last_n == 2
        assert read_journal(run_dir, 1, cursor) == ([], cursor)
        writer.append([event(n) for n in range(3, 8)])
    assert [found.n for found in drain(run_dir, cursor)[0]] == [6, 7]


def test_two_writers_do_not_mix(any_storage: Storage) -> None:
    run_dir = RunDir(any_storage, "run_a")
    old = JournalWriter(run_dir, 1)
    old.append([event(1)])
    new = JournalWriter(run_dir, 1)
    new.append([event(2)])
    with pytest.raises(LogTakenOver):
        old.append([event(2, source="zombie")])
    old.close()
    new.append([event(3)])
    new.close()
    assert [found.source_n for found in drain(run_dir)[0]] == [1, 2, 3]


def test_a_segment_that_is_not_as_it_was_written() -> None:
    run_dir, files = memory_run_dir()
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(1)])
        writer.append([event(2)])
    name = max(files.objects)
    files.objects[name] = files.objects[name][:-2]
    events, cursor = read_journal(run_dir, 1)
    assert [found.n for found in events] == [1]
    with pytest.raises(CorruptFile, match=r"000002\.jsonl does not end in a newline"):
        read_journal(run_dir, 1, cursor)


@pytest.mark.parametrize("cursor", ["", "x", "1:2", "1:2:3:4", "1:-2:3", "٣:0:0"])
def test_foreign_cursors_are_refused(local_storage: Storage, cursor: str) -> None:
    with pytest.raises(InvalidStorage, match="start again"):
        read_journal(RunDir(local_storage, "run_a"), 1, cursor)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9, 100])
def test_the_next_segment_is_found_without_listing(count: int) -> None:
    files = MemoryObjects({f"log/{number:06d}.jsonl": b"x\n" for number in range(1, count + 1)})
    SegmentedLog(files, "log").append([b"new"])
    assert files.objects[f"log/{count + 1:06d}.jsonl"] == b"new\n"
    assert files.num_lists == 0


def test_lines_are_one_json_object_each(local_storage: Storage) -> None:
    """Anything else that reads the run's directory can rely on the documented fields."""
    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(1, step=3)])
    line = Path(run_dir.files.path("runs/run_a/events/s001.jsonl")).read_text().splitlines()[0]
    before, _, checksum = line.partition(',"crc":')
    assert json.loads(f'{{"crc":{checksum}') == {"crc": f"{zlib.crc32(f'{before}}}'.encode()):08x}"}
    assert json.loads(f"{before}}}") == {
        "n": 1,
        "at": 1700000000.5,
        "kind": "waiting",
        "submission": 1,
        "attempt": 0,
        "source": "driver",
        "source_n": 1,
        "data": {"step": 3},
    }
