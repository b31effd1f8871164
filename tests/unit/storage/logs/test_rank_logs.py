"""Rank logs: every line once, in the order of attempts and time, also while they grow."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import CorruptFile, StorageFull
from storage.filesystem import Storage, open_storage
from storage.logs import growing_log
from storage.logs.rank_logs import LoggedLine, LogRecord, RankLogWriter, read_rank_logs
from storage.run_dir import RunDir
from tests.support.storage_places import memory_run_dir, quick_directory

pytest_plugins = ["tests.support.storage_fixtures"]


def write(
    run_dir: RunDir, submission: int, attempt: int, rank: int | None, *lines: tuple[float, str]
) -> None:
    with RankLogWriter(run_dir, submission, attempt, rank) as writer:
        writer.write([LogRecord(at=at, level="INFO", message=message) for at, message in lines])


def messages(lines: list[LoggedLine]) -> list[str]:
    return [line.message for line in lines]


def test_lines_are_merged_by_attempt_then_time(any_storage: Storage) -> None:
    run_dir = RunDir(any_storage, "run_a")
    assert read_rank_logs(run_dir) == ([], {})
    write(run_dir, 1, 1, 0, (1.0, "a1r0t1"), (3.0, "a1r0t3"))
    write(run_dir, 1, 1, 1, (2.0, "a1r1t2"), (9.0, "a1r1t9"))
    write(run_dir, 1, 2, 10, (4.0, "a2r10t4"))
    write(run_dir, 2, 3, 0, (0.5, "clock went back"))
    write(run_dir, 1, 7, None, (5.0, "driver"))
    lines, cursor = read_rank_logs(run_dir)
    assert messages(lines) == [
        "driver",
        "a1r0t1",
        "a1r1t2",
        "a1r0t3",
        "a1r1t9",
        "a2r10t4",
        "clock went back",
    ]
    assert lines[0] == LoggedLine(1, 0, None, 5.0, "INFO", "driver")
    assert lines[1] == LoggedLine(1, 1, 0, 1.0, "INFO", "a1r0t1")
    assert read_rank_logs(run_dir, cursor) == ([], cursor)
    assert messages(read_rank_logs(run_dir, rank=0)[0]) == ["a1r0t1", "a1r0t3", "clock went back"]
    assert messages(read_rank_logs(run_dir, attempt=1, rank=1)[0]) == ["a1r1t2", "a1r1t9"]
    assert messages(read_rank_logs(run_dir, attempt=2)[0]) == ["a2r10t4"]
    assert json.loads(json.dumps(cursor)) == cursor


def test_a_line_that_is_torn_waits(local_storage: Storage) -> None:
    run_dir = RunDir(local_storage, "run_a")
    write(run_dir, 1, 1, 0, (1.0, "whole"))
    path = Path(run_dir.files.path("runs/run_a/logs/s001-a001/rank-0.jsonl"))
    with path.open("ab") as file:
        file.write(b'{"at":2.0,"level":"INFO","mess')
    lines, cursor = read_rank_logs(run_dir)
    assert messages(lines) == ["whole"]
    with path.open("ab") as file:
        file.write(b'age":"finished"}\n')
    assert messages(read_rank_logs(run_dir, cursor)[0]) == ["finished"]
    with path.open("ab") as file:
        file.write(b"garbage\n")
    with pytest.raises(CorruptFile, match="line 3 of log s001-a001/rank-0"):
        read_rank_logs(run_dir)


def test_the_writer_goes_on_after_a_full_disk(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(local_storage, "run_a")
    with RankLogWriter(run_dir, 1, 1, 0) as writer:
        with monkeypatch.context() as patch:

            def full(fd: int, data: bytes) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(growing_log, "write_all", full)
            with pytest.raises(StorageFull):
                writer.write([LogRecord(1.0, "INFO", "lost?")])
        writer.write([LogRecord(1.0, "INFO", "sent again")])
    assert messages(read_rank_logs(run_dir)[0]) == ["sent again"]


WRITE = st.tuples(
    st.just("write"),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([0, 1, None])),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
READ = st.tuples(st.just("read"), st.integers(1, 5))


@pytest.mark.parametrize("where", ["local", "objects"])
@given(operations=st.lists(st.one_of(WRITE, READ), max_size=25))
@settings(max_examples=80)
def test_every_line_is_read_once_and_in_its_rank_s_order(
    where: str, operations: list[tuple[Any, ...]]
) -> None:
    with quick_directory() as directory:
        run_dir = (
            memory_run_dir()[0] if where == "objects" else RunDir(open_storage(directory), "run_p")
        )
        written: list[tuple[tuple[int, int, int | None], int]] = []
        found: list[LoggedLine] = []
        cursor: dict[str, str] | None = None
        for operation, *arguments in operations:
            if operation == "read":
                lines, cursor = read_rank_logs(run_dir, cursor, limit=arguments[0])
                assert len(lines) <= arguments[0]
                found += lines
                continue
            (submission, attempt, rank), times = arguments
            first = len(written)
            write(
                run_dir,
                submission,
                attempt,
                rank,
                *((float(at), str(first + n)) for n, at in enumerate(times)),
            )
            written += [
                ((submission, attempt if rank is not None else 0, rank), first + n)
                for n in range(len(times))
            ]
        while True:
            lines, cursor = read_rank_logs(run_dir, cursor, limit=2)
            if not lines:
                break
            found += lines

        got = [((line.submission, line.attempt, line.rank), int(line.message)) for line in found]
        assert Counter(got) == Counter(written)
        for place in {place for place, _ in written}:
            assert [number for where_, number in got if where_ == place] == [
                n for where_, n in written if where_ == place
            ]
        at_once, _ = read_rank_logs(run_dir, limit=10_000)
        assert [(line.submission, line.attempt) for line in at_once] == sorted(
            (line.submission, line.attempt) for line in at_once
        )


def test_a_line_that_is_no_utf_8_can_be_sent_on(any_storage: Storage) -> None:
    run_dir = RunDir(any_storage, "run_a")
    write(run_dir, 1, 1, 0, (1.0, "skipping \udce9.jpg"), (2.0, "é \\ud83d 😀"))
    found = messages(read_rank_logs(run_dir)[0])
    assert found == ["skipping \\udce9.jpg", "é \\ud83d 😀"] and all(
        text.encode() for text in found
    )
