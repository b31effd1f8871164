"""What a run's code may leave in the place of a file that others read: FIFOs, links, sparse files,
names that lead elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.spec import plain_text
from everstep.wire import base
from storage.checkpoints.manifest import parse_manifest
from storage.checkpoints.store import CheckpointStore
from storage.errors import (
    CorruptCheckpoint,
    CorruptFile,
    FileTooLarge,
    InvalidStorage,
    LinkedFile,
    NotRegularFile,
    StorageError,
)
from storage.filesystem import Storage
from storage.logs import growing_log, journal
from storage.logs.growing_log import MAX_LINE_BYTES
from storage.logs.journal import journal_stamp, may_be_cut, read_journal, with_checksum
from storage.logs.journal_writer import JournalWriter
from storage.logs.rank_logs import last_rank_lines, read_rank_logs
from storage.run_dir import RunDir
from tests.support.storage_places import event, save

pytest_plugins = ["tests.support.storage_fixtures"]

PATIENCE_S = 20.0


def in_time(call: Callable[[], object]) -> object:
    """Return what a call returns or raises; fail where it waits for ever, as open() does for a
    FIFO's writer."""
    found: list[object] = []

    def work() -> None:
        try:
            found.append(call())
        except Exception as exc:
            found.append(exc)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for somebody to write"
    return found[0]


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def put_directory(path: Path) -> None:
    path.mkdir()


def put_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = {"fifo": put_fifo, "socket": put_socket, "directory": put_directory, "link": put_link}


@pytest.fixture(params=ODD)
def put(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        ODD[request.param](path)

    yield replace


def local(run_dir: RunDir, relpath: str) -> Path:
    return Path(run_dir.files.path(f"runs/{run_dir.run_id}/{relpath}"))


def test_nothing_but_a_regular_file_is_read_and_nobody_waits_for_it(
    local_storage: Storage, put: Callable[[Path], None]
) -> None:
    run_dir = RunDir(local_storage, "run_a")
    put(local(run_dir, "events/s001.jsonl"))
    assert isinstance(in_time(lambda: read_journal(run_dir, 1)), NotRegularFile)
    assert in_time(lambda: journal_stamp(run_dir, 1)) is None
    assert isinstance(in_time(lambda: JournalWriter(run_dir, 1)), StorageError)
    put(local(run_dir, "spec.json"))
    assert isinstance(in_time(run_dir.read_spec), NotRegularFile)
    put(local(run_dir, "control/deadline.json"))
    assert isinstance(in_time(run_dir.deadline), NotRegularFile)
    put(local(run_dir, "control/s001.drill.json"))
    assert isinstance(in_time(lambda: run_dir.drill_ordered(1)), NotRegularFile)
    put(local(run_dir, "control/kept.json"))
    assert isinstance(in_time(run_dir.kept), NotRegularFile)
    put(local(run_dir, "logs/s001-a001/rank-0.jsonl"))
    assert isinstance(in_time(lambda: read_rank_logs(run_dir)), NotRegularFile)
    assert isinstance(in_time(lambda: last_rank_lines(run_dir, 1, 1, 0, 5)), NotRegularFile)
    put(local(run_dir, "profiles/p1.json.gz"))
    assert isinstance(
        in_time(lambda: run_dir.files.open_read(run_dir.trace_path("p1"))), NotRegularFile
    )
    assert in_time(lambda: run_dir.files.exists(run_dir.trace_path("p1"))) is False
    with pytest.raises(CorruptFile):
        local_storage.files.read("runs/run_a/spec.json")


def test_a_checkpoint_with_something_else_in_a_files_place_is_damaged_and_the_older_one_is_used(
    local_storage: Storage, put: Callable[[Path], None]
) -> None:
    run_dir = RunDir(local_storage, "run_a")
    older, newer, newest = (save(run_dir, step) for step in (1, 2, 3))
    [relpath] = list(newer.files)[:1]
    put(local(run_dir, f"checkpoints/{newer.name}/{relpath}"))
    put(local(run_dir, f"checkpoints/{newest.name}/manifest.json"))
    store = CheckpointStore(run_dir)
    found = in_time(store.newest_valid)
    assert isinstance(found, tuple), found
    assert found[0] is not None and found[0].name == older.name
    assert newer.name in {each.name for each in found[1]}
    assert isinstance(
        in_time(lambda: store.load_file(newer.name, relpath, lambda file: file.read())),
        CorruptCheckpoint,
    )


def test_no_link_leads_into_another_runs_directory(local_storage: Storage) -> None:
    mine, theirs = RunDir(local_storage, "run_a"), RunDir(local_storage, "run_b")
    save(theirs, 7)
    with JournalWriter(theirs, 1) as writer:
        writer.append([event(1)])
    for name in ("checkpoints", "events"):
        local(mine, name).parent.mkdir(parents=True, exist_ok=True)
        local(mine, name).symlink_to(local(theirs, name))
    for look in (lambda: read_journal(mine, 1), mine.submissions, CheckpointStore(mine).list):
        with pytest.raises(LinkedFile, match="run_b"):
            look()
    local(mine, "control").symlink_to(local(theirs, "."))
    with pytest.raises(LinkedFile):
        mine.request_stop(1, "cancel")
    assert not list(local(theirs, ".").glob("*stop*")), (
        "the service's own words are not written there either"
    )


@pytest.mark.parametrize(
    ("relpath", "look"),
    [
        ("spec.json", RunDir.read_spec),
        ("control/deadline.json", RunDir.deadline),
        ("control/s001.stop.json", lambda run_dir: run_dir.stop_requested(1)),
        (
            "checkpoints/step-000000001.s001.a001/manifest.json",
            lambda run_dir: CheckpointStore(run_dir).manifest("step-000000001.s001.a001"),
        ),
    ],
)
def test_a_sparse_file_is_refused_before_it_is_read(
    local_storage: Storage, relpath: str, look: Callable[[RunDir], object]
) -> None:
    run_dir = RunDir(local_storage, "run_a")
    sparse(local(run_dir, relpath), 800 << 20)
    tracemalloc.start()
    try:
        with pytest.raises((FileTooLarge, CorruptCheckpoint), match="over the limit of"):
            look(run_dir)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_grows_while_it_is_read_stays_within_its_limit(local_storage: Storage) -> None:
    files = local_storage.files
    files.write("code/a", b"x" * 100)
    assert files.read("code/a", 100) == b"x" * 100
    with pytest.raises(FileTooLarge, match="at least 100 bytes, over the limit of 99"):
        files.read("code/a", 99)


def sparse(path: Path, size_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_line_without_an_end_costs_no_more_than_the_longest_line(
    local_storage: Storage, behind: int
) -> None:
    """Copying what was read of it for every block made the work quadratic: 43 s and 446 MiB for 200
    MiB."""
    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(1 + n) for n in range(behind)])
    path = local(run_dir, "events/s001.jsonl")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (200 << 20))
    tracemalloc.start()
    try:
        events, cursor = read_journal(run_dir, 1) if behind else ([], None)
        assert len(events) == behind
        with pytest.raises(CorruptFile, match=f"line {1 + behind} of .*s001.jsonl is longer than"):
            read_journal(run_dir, 1, cursor)
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()


def test_a_journal_of_long_events_comes_in_pieces(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_BATCH_BYTES", 5_000)
    monkeypatch.setattr(growing_log, "BATCH_BYTES", 2_000)
    monkeypatch.setattr(growing_log, "_BLOCK_BYTES", 1_000)
    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(n, text="y" * 1_000) for n in range(1, 21)])
    first, cursor = read_journal(run_dir, 1)
    assert 0 < len(first) < 20
    assert may_be_cut(None, cursor)
    found = list(first)
    while events := read_journal(run_dir, 1, cursor):
        batch, cursor = events
        if not batch:
            break
        found += batch
    assert not may_be_cut(cursor, cursor)
    assert [each.n for each in found] == list(range(1, 21))


def test_an_event_that_no_reader_would_take_is_cut_as_it_is_written(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_LINE_BYTES", 50_000)
    run_dir = RunDir(local_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        writer.append(
            [event(1, text="z" * 100_000, step=5), event(2, many=list(range(100_000))), event(3)]
        )
    first, second, third = read_journal(run_dir, 1)[0]
    assert first.data["step"] == 5 and first.data["text"].endswith("(100000 characters)")
    assert second.data["left_out_bytes"] > 50_000 and third.n == 3


def test_what_is_nested_too_deeply_is_damage(local_storage: Storage) -> None:
    """Python's parser raises RecursionError, which no reader expects; and what it takes, an
    answer's encoder may not."""
    run_dir = RunDir(local_storage, "run_a")
    for depth in (100, 200_000):
        deep = b"[" * depth + b"]" * depth
        path = local(run_dir, "control/deadline.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'{"at":' + deep + b"}")
        with pytest.raises(CorruptFile, match="nested more than 64 levels"):
            run_dir.deadline()
        journal_path = local(run_dir, "events/s001.jsonl")
        journal_path.parent.mkdir(exist_ok=True)
        line = (
            b'{"n":1,"at":1,"kind":"log","submission":1,"attempt":0,"source":"d","source_n":1,"data":{"x":'
            + deep
            + b"}}"
        )
        journal_path.write_bytes(with_checksum(line) + b"\n")
        with pytest.raises(CorruptFile, match="nested more than 64 levels"):
            read_journal(run_dir, 1)
        with pytest.raises(CorruptFile):
            parse_manifest(deep)
    assert plain_text.parse_json(b"[" * 64 + b"]" * 64)


LEADING_OUT = (
    "../../../run_other/spec.json",
    "/etc/passwd",
    "a/../../b",
    "..",
    "a//b",
    "./a",
    "a/",
    "",
    "a\\b",
    "a\0b",
    "\ud800",
)


@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_manifest_that_names_other_files_is_no_manifest(
    local_storage: Storage, name: str
) -> None:
    """Its digest is right: whoever writes the file writes that, too."""
    run_dir = RunDir(local_storage, "run_a")
    RunDir(local_storage, "run_other").files.write("runs/run_other/spec.json", b"{}")
    manifest = save(run_dir, 1)
    path = local(run_dir, f"checkpoints/{manifest.name}/manifest.json")
    raw = json.loads(path.read_bytes())
    del raw["digest"]
    raw["files"] = {name: {"size_bytes": 2, "blake3": "0" * 64}}
    canonical = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    raw["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_bytes(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())
    store = CheckpointStore(run_dir)
    for read in (
        store.archive,
        store.manifest,
        store.verify,
        lambda each: store.read_file(each, name),
    ):
        with pytest.raises(CorruptCheckpoint, match=r"file name|hex escape"):
            read(manifest.name)
    assert base.fault_of(name)
    with store.begin(2, 1, 1) as writer, pytest.raises(InvalidStorage):
        writer.write_file(name)


def test_plain_names_are_taken() -> None:
    for name in (
        "model.pt",
        "ranks/0/optimizer-1.pt",
        ".metadata",
        "a b",
        "größe",
        "a..b",
        "x" * 255,
    ):
        assert base.fault_of(name) is None
