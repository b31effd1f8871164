"""The marks of nodes between the database, the file in storage, and the drivers that read it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from service.annexes.nodes.store import GONE_KEPT_S, MarksFile, NodeMarkStore
from service.db.engine import Database
from service.model.rows import NodeMarkRow
from storage.cluster import (
    NO_MARKS,
    PATH,
    MarkedNode,
    encode_marks,
    read_marks_file,
    read_node_marks,
    write_marks_file,
)
from storage.errors import CorruptFile, StorageUnavailable
from storage.files.protocol import READ_LIMIT_BYTES
from storage.filesystem import Storage
from tests.support.api_service import NOON, ManualClock
from tests.support.storage_places import MemoryObjects
from train_fn.recovery import marks as reading
from train_fn.recovery.marks import MarksReader

pytest_plugins = ["tests.support.database_fixtures", "tests.support.storage_fixtures"]


@pytest.fixture
def store(database: Database, clock: ManualClock) -> NodeMarkStore:
    return NodeMarkStore(database, clock)


MARKS = (
    MarkedNode("b", "draining", "hé", "ann", NOON, NOON + 30),
    MarkedNode("a", "cordoned", None, "everstep", NOON),
)


# ---------------------------------------------------------------- the file


def test_marks_come_back_from_the_file(any_storage: Storage) -> None:
    assert read_node_marks(any_storage) == {} and read_marks_file(any_storage) == NO_MARKS
    write_marks_file(any_storage, encode_marks(MARKS))
    assert read_node_marks(any_storage) == {mark.node_id: mark for mark in MARKS}
    write_marks_file(any_storage, encode_marks(MARKS[:1]))
    assert set(read_node_marks(any_storage)) == {"b"}
    assert encode_marks(MARKS) == encode_marks(reversed(MARKS))


def test_a_newer_service_s_fields_are_passed_over(local_storage: Storage) -> None:
    local_storage.files.write(
        PATH,
        b'{"nodes": {"a": {"state": "cordoned", "at": 1, "by": "x", "color": "red"}}, "more": 1}',
    )
    assert read_node_marks(local_storage) == {"a": MarkedNode("a", "cordoned", None, "x", 1.0)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"nodes": {"a": {}}}',
        b'{"nodes": {"a": {"state": "odd", "at": 1}}}',
    ],
)
def test_a_file_that_is_something_else_is_named(local_storage: Storage, data: bytes) -> None:
    local_storage.files.write(PATH, data)
    with pytest.raises(CorruptFile, match=r"nodes\.json"):
        read_node_marks(local_storage)


def test_the_file_is_written_when_it_differs_and_healed(
    any_storage: Storage, store: NodeMarkStore
) -> None:
    file = MarksFile(any_storage, store, lambda: None)
    assert not file.publish(), "no mark and no file are the same"
    store.mark("a", "cordoned", "ann", reason="x")
    assert file.publish() and not file.publish()
    assert read_node_marks(any_storage) == {"a": MarkedNode("a", "cordoned", "x", "ann", NOON)}
    any_storage.files.write(PATH, b"spoilt")
    assert file.publish()
    store.mark("a", "open", "ann")
    assert file.publish() and read_node_marks(any_storage) == {}


class _TwoWriters(MemoryObjects):
    """Storage in which another writer of the same file comes in between a look at the database and
    the write that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Callable[[], None] | None = None

    def write(self, relpath: str, data: bytes) -> None:
        between, self.between = self.between, None
        if between is not None:
            between()
        super().write(relpath, data)


def test_the_newer_word_stays_whichever_writer_is_last(store: NodeMarkStore) -> None:
    storage, files = Storage("s3://memory/prefix"), _TwoWriters()
    storage.__dict__["files"] = files
    slow, quick = (MarksFile(storage, store, lambda: None) for _ in range(2))
    store.mark("a", "cordoned", "ann")

    def another_request() -> None:
        store.mark("b", "cordoned", "bob")
        assert quick.publish()

    files.between = another_request
    assert slow.publish()
    assert set(read_node_marks(storage)) == {"a", "b"}


# ---------------------------------------------------------------- the database


def test_the_last_word_counts(store: NodeMarkStore, clock: ManualClock) -> None:
    store.mark("a", "draining", "ann", reason="x", deadline_s=30)
    assert store.all()["a"] == NodeMarkRow("a", "draining", "x", "ann", NOON, NOON + 30, None)
    clock.now += 5
    store.mark("a", "cordoned", "bob")
    assert store.all() == {"a": NodeMarkRow("a", "cordoned", None, "bob", NOON + 5, None, None)}


def test_the_service_does_not_talk_over_a_user(store: NodeMarkStore, clock: ManualClock) -> None:
    assert store.cordon_if_unchanged("a", None, "everstep", "fails")
    opened = store.mark("a", "open", "ann")
    assert not store.cordon_if_unchanged("a", None, "everstep", "fails"), "marked meanwhile"
    assert store.all()["a"].state == "open"
    clock.now += 1
    assert store.cordon_if_unchanged("a", opened.at, "everstep", "fails")
    assert store.all()["a"].state == "cordoned"


def test_marks_of_nodes_that_are_gone_for_a_day_are_forgotten(
    store: NodeMarkStore, clock: ManualClock
) -> None:
    for node_id in ("a", "b"):
        store.mark(node_id, "cordoned", "ann")
    assert store.note_living({"a"}, 3600) == ()
    clock.now += GONE_KEPT_S - 1
    assert store.note_living({"a", "b"}, 3600) == (), "it came back in time"
    clock.now += 10
    assert store.note_living({"a"}, 3600) == ()
    clock.now += GONE_KEPT_S - 1
    assert store.note_living({"a"}, 3600) == ()
    clock.now += 1
    assert store.note_living({"a"}, 3600) == ("b",)
    assert set(store.all()) == {"a"}


def test_a_pardon_is_forgotten_with_what_it_forgave(
    store: NodeMarkStore, clock: ManualClock
) -> None:
    store.mark("a", "open", "ann")
    clock.now += 3600
    store.note_living({"a"}, 3600)
    assert set(store.all()) == {"a"}
    clock.now += 1
    store.note_living({"a"}, 3600)
    assert store.all() == {}


# ---------------------------------------------------------------- the reader


class _Gate(MemoryObjects):
    """Objects that fail, or hold an answer back, as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0
        self.broken = False
        self.answers = threading.Event()
        self.answers.set()

    def read(self, relpath: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        self.num_reads += 1
        assert self.answers.wait(60)
        if self.broken:
            raise StorageUnavailable("away")
        return super().read(relpath, limit_bytes)


@pytest.fixture
def gate() -> _Gate:
    return _Gate()


@pytest.fixture
def remote(gate: _Gate) -> Storage:
    storage = Storage("s3://memory/prefix")
    storage.__dict__["files"] = gate
    return storage


def test_drivers_read_at_most_once_a_second_and_see_what_changed(
    remote: Storage, gate: _Gate, clock: ManualClock
) -> None:
    reader = MarksReader(remote, clock)
    assert reader.marks() == {}
    write_marks_file(remote, encode_marks(MARKS))
    for _ in range(5):
        assert reader.marks() == {}
    assert gate.num_reads == 1
    clock.now += reading.READ_INTERVAL_S
    assert set(reader.marks()) == {"a", "b"} and reader.marks()["b"].state == "draining"
    assert gate.num_reads == 2


def test_the_last_known_marks_stay_while_storage_fails(
    remote: Storage, gate: _Gate, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    reader = MarksReader(remote, clock)
    write_marks_file(remote, encode_marks(MARKS))
    assert set(reader.marks()) == {"a", "b"}
    gate.broken = True
    for _ in range(3):
        clock.now += reading.READ_INTERVAL_S
        assert set(reader.marks()) == {"a", "b"}
    assert [record.getMessage() for record in caplog.records if "away" in record.getMessage()] != []
    assert len(caplog.records) == 1, "said once"
    gate.broken = False
    write_marks_file(remote, b"spoilt")
    clock.now += reading.READ_INTERVAL_S
    assert set(reader.marks()) == {"a", "b"}
    write_marks_file(remote, encode_marks(()))
    clock.now += reading.READ_INTERVAL_S
    assert reader.marks() == {}


def test_a_storage_that_hangs_is_not_waited_for(
    remote: Storage, gate: _Gate, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WAIT_S", 0.05)
    reader = MarksReader(remote, clock)
    write_marks_file(remote, encode_marks(MARKS))
    reader.marks()
    gate.answers.clear()
    try:
        for _ in range(20):
            clock.now += reading.READ_INTERVAL_S
            assert set(reader.marks()) == {"a", "b"}
        assert gate.num_reads == 2, "one read at a time"
    finally:
        gate.answers.set()
