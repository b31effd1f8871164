"""What only an object store shows: requests that are made, uploads that are given up, servers that
are not there."""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from storage.checkpoints.store import CheckpointStore
from storage.claims import claim_submission
from storage.errors import InvalidStorage, StorageError, StorageNotFound
from storage.files.object_store import S3ConditionalPuts
from storage.filesystem import Storage, open_storage
from storage.logs.journal import read_journal
from storage.logs.journal_writer import JournalWriter
from storage.make_bucket import main as make_bucket
from storage.run_dir import RunDir
from tests.support.storage_places import BUCKET, event, save

pytest_plugins = ["tests.support.storage_fixtures"]


class Requests:
    """The requests that the server answered since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.INFO, "werkzeug")

    def take(self) -> list[str]:
        """``METHOD /path`` of each, oldest first."""
        lines = [
            record.getMessage() for record in self._caplog.records if record.name == "werkzeug"
        ]
        self._caplog.clear()
        plain = (line.replace("\x1b[35m\x1b[1m", "").replace("\x1b[33m", "") for line in lines)
        return [line.split('"')[1].rsplit(" ", 1)[0] for line in plain]


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Requests:
    return Requests(caplog)


def test_reading_a_journal_asks_for_the_next_name_and_never_lists(
    s3_storage: Storage, requests: Requests
) -> None:
    run_dir = RunDir(s3_storage, "run_a")
    with JournalWriter(run_dir, 1) as writer:
        for n in range(1, 4):
            writer.append([event(n)])
        written = requests.take()
        assert not any("list-type" in request for request in written)
        assert sum(request.startswith("PUT") for request in written) == 3, (
            "each batch is one object, uploaded in one request"
        )
        events, cursor = read_journal(run_dir, 1, limit=2)
        more, cursor = read_journal(run_dir, 1, cursor)
        assert [found.n for found in events + more] == [1, 2, 3]
        requests.take()
        assert read_journal(run_dir, 1, cursor) == ([], cursor)
    idle = requests.take()
    assert len(idle) <= 2
    assert {request.split("?")[0].rsplit("/", 1)[1] for request in idle} == {"000004.jsonl"}


def test_an_upload_that_is_given_up_is_no_checkpoint(s3_storage: Storage) -> None:
    run_dir = RunDir(s3_storage, "run_a")
    store = CheckpointStore(run_dir)
    save(run_dir, 50)
    with (
        pytest.raises(ZeroDivisionError),
        store.begin(100, 1, 1) as writer,
        writer.write_file("model.pt") as file,
    ):
        file.write(bytes(12 << 20))
        _ = 1 / 0
    assert [manifest.step for manifest in store.list()] == [50]
    newest, rejected = store.newest_valid()
    assert newest is not None and newest.step == 50
    assert rejected == []


def test_many_that_create_one_object_at_the_same_time_make_it_once(s3_storage: Storage) -> None:
    files = s3_storage.files
    for number in range(5):
        with ThreadPoolExecutor(8) as pool:
            made = list(
                pool.map(
                    lambda who, number=number: files.create_new(f"one/{number}", b"%d" % who),
                    range(8),
                )
            )  # type: ignore[misc]
        assert made.count(True) == 1
        assert files.read(f"one/{number}") == b"%d" % made.index(True)


def test_a_put_whose_answer_was_lost_is_taken_for_done(s3_storage: Storage) -> None:
    assert s3_storage.files.create_new("one", b"same")
    assert s3_storage.files.create_new("one", b"same"), (
        "as a client sends it again that has heard nothing"
    )
    assert not s3_storage.files.create_new("one", b"other")


def test_a_store_that_ignores_the_condition_is_refused(
    s3_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older object stores do, which do not know the header."""
    call = S3ConditionalPuts._call

    def without_the_header(
        self: S3ConditionalPuts, operation: str, bucket: str, key: str, **arguments: Any
    ) -> None:
        arguments.pop("IfNoneMatch", None)
        call(self, operation, bucket, key, **arguments)

    monkeypatch.setattr(S3ConditionalPuts, "_call", without_the_header)
    with pytest.raises(
        InvalidStorage, match=r"cannot be used: .*ignores If-None-Match: \* on a put"
    ):
        s3_storage.probe()
    with pytest.raises(InvalidStorage, match="use a store that supports it, or a filesystem"):
        claim_submission(RunDir(s3_storage, "run_a"), 1)
    monkeypatch.undo()
    s3_storage.probe()
    claim_submission(RunDir(s3_storage, "run_a"), 1)


def test_a_large_file_goes_up_in_parts(s3_storage: Storage) -> None:
    run_dir = RunDir(s3_storage, "run_a")
    store = CheckpointStore(run_dir)
    data = bytes(range(256)) * (100 << 10)
    manifest = save(run_dir, 50, files={"model.pt": data})
    store.verify(manifest.name)
    assert store.read_file(manifest.name, "model.pt") == data


def test_a_bucket_that_is_not_there(s3_endpoint: str) -> None:
    storage = open_storage(
        f"s3://no-such-bucket/x?endpoint_override={s3_endpoint}&scheme=http&region=us-east-1"
    )
    with pytest.raises(StorageNotFound, match="create the bucket"):
        storage.probe()


def test_an_endpoint_with_its_scheme(s3_endpoint: str) -> None:
    storage = open_storage(
        f"s3://{BUCKET}/scheme?endpoint_override=http://{s3_endpoint}&region=us-east-1"
    )
    storage.probe()


def test_a_server_that_is_not_there(s3_endpoint: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    storage = open_storage(
        f"s3://{BUCKET}/x?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    )
    started = time.monotonic()
    with pytest.raises(StorageError, match="check that the storage is mounted and reachable"):
        storage.probe()
    assert time.monotonic() - started < 60


def test_a_bucket_is_made_once(s3_endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"s3://made-for-a-test/v1?endpoint_override={s3_endpoint}&scheme=http&region=us-east-1"
    with pytest.raises(StorageError):
        open_storage(uri).probe()
    assert (make_bucket([uri]), make_bucket([uri])) == (0, 0)
    open_storage(uri).probe()
    assert (make_bucket(["/a/directory"]), make_bucket([])) == (1, 2)
    assert "s3://" in capsys.readouterr().err
