"""Random histories of a journal: each event once and in order, none of a rank past its attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.wire.events import EventKind
from storage.errors import StorageError
from storage.filesystem import open_storage
from storage.logs import growing_log
from storage.logs.journal import JournalEvent, read_journal
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.storage_places import MemoryObjects, event, memory_run_dir, quick_directory

pytest_plugins = ["tests.support.storage_fixtures"]


RANK_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["controller", "rank-0", "rank-1"]),
        st.integers(1, 4),
        st.sampled_from(["append", "again", "reopen"]),
    ),
    max_size=40,
)


@given(history=RANK_EVENTS)
def test_no_history_lets_a_rank_tell_of_an_attempt_once_a_newer_one_began(
    history: list[tuple[str, int, str]],
) -> None:
    run_dir, _ = memory_run_dir()
    writer, newest, number = JournalWriter(run_dir, 1), 0, 0
    expected: list[tuple[str, int]] = []
    for who, attempt, how in history:
        if how == "reopen":
            writer = JournalWriter(run_dir, 1)
        number += how != "again" or number == 0
        kind = EventKind.ATTEMPT_STARTED if who == "controller" else EventKind.METRICS
        source = who if who == "controller" else f"{who}.a{attempt:03d}"
        reported = replace(
            event(number, kind, source=f"{source}.{number}", points=[]), attempt=attempt
        )
        if writer.append([reported]):
            expected.append((reported.source, attempt))
            assert who == "controller" or attempt >= newest
            newest = max(newest, attempt)
        else:
            assert reported.source in {known for known, _ in expected} or (
                who != "controller" and attempt < newest
            )
    assert [(line.source, line.attempt) for line in read_journal(run_dir, 1)[0]] == expected


# What may happen to a journal, in any order. A source sends its next few events, perhaps with some
# that it sent before.
OPERATION = st.one_of(
    st.tuples(
        st.just("append"),
        st.sampled_from(["driver", "rank-0.a001"]),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    st.tuples(st.just("crash"), st.binary(max_size=60)),
    st.tuples(st.just("fail"), st.integers(0, 400)),
    st.tuples(st.just("read"), st.integers(1, 4)),
    st.tuples(st.just("large"), st.integers(1, 3)),
)


class Trial:
    """A journal, what its sources have sent, and what one reader has read."""

    def __init__(self, run_dir: RunDir, objects: MemoryObjects | None) -> None:
        self.run_dir = run_dir
        self.objects = objects
        self.writer = JournalWriter(run_dir, 1)
        self.sent = {"driver": 0, "rank-0.a001": 0}
        self.expected: list[tuple[str, int]] = []
        self.found: list[JournalEvent] = []
        self.cursor: str | None = None

    def append(self, source: str, count: int, again: int, text: str = "") -> None:
        first = max(1, self.sent[source] + 1 - again)
        batch = [
            event(n, source=source, text=text) for n in range(first, self.sent[source] + count + 1)
        ]
        try:
            self.writer.append(batch)
        except StorageError:
            self.writer.append(batch)  # at least once, as clients do
        self.expected += [
            (source, n) for n in range(self.sent[source] + 1, self.sent[source] + count + 1)
        ]
        self.sent[source] += count

    def crash(self, torn: bytes) -> None:
        """The writer dies in the middle of a line; a new one takes over."""
        if self.objects is None:
            with Path(self.run_dir.files.path("runs/run_p/events/s001.jsonl")).open("ab") as file:
                file.write(torn.replace(b"\n", b""))
        self.writer = JournalWriter(self.run_dir, 1)

    def fail_next_append(self, after_bytes: int, patch: pytest.MonkeyPatch) -> None:
        if self.objects is not None:
            self.objects.fail_next_write = "before" if after_bytes % 2 else "after"
            return
        real_write = growing_log.write_all

        def failing(fd: int, data: bytes) -> None:
            patch.setattr(growing_log, "write_all", real_write)
            real_write(fd, data[:after_bytes])
            raise OSError(5, "I/O error")

        patch.setattr(growing_log, "write_all", failing)

    def read(self, limit: int) -> None:
        events, self.cursor = read_journal(self.run_dir, 1, self.cursor, limit)
        assert len(events) <= limit
        self.found += events

    def check(self) -> None:
        while True:
            before = len(self.found)
            self.read(3)
            if len(self.found) == before:
                break
        assert [(one.source, one.source_n) for one in self.found] == self.expected
        assert [one.n for one in self.found] == list(range(1, len(self.expected) + 1))
        assert self.writer.last_n == len(self.expected)


@pytest.mark.parametrize("where", ["local", "objects"])
@given(operations=st.lists(OPERATION, max_size=30))
@settings(max_examples=120)
def test_a_reader_sees_each_event_exactly_once_in_order(
    where: str, operations: list[tuple[Any, ...]]
) -> None:
    with quick_directory() as directory, pytest.MonkeyPatch.context() as patch:
        # A mark every few events, so that recovery meets every arrangement of them.
        patch.setattr(growing_log.AppendedLog, "mark_every_bytes", 700)
        patch.setattr(growing_log, "_BLOCK_BYTES", 64)
        run_dir, objects = (
            memory_run_dir()
            if where == "objects"
            else (RunDir(open_storage(directory), "run_p"), None)
        )
        trial = Trial(run_dir, objects)
        for operation, *arguments in operations:
            if operation == "append":
                trial.append(*arguments)
            elif operation == "large":
                trial.append("driver", arguments[0], 0, "y" * 500)
            elif operation == "crash":
                trial.crash(*arguments)
            elif operation == "fail":
                trial.fail_next_append(*arguments, patch)
            else:
                trial.read(*arguments)
        trial.check()
        trial.writer.close()
        if objects is not None:
            assert objects.num_lists == 0
