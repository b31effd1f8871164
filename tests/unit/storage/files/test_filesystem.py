"""Opening storage by URI, and the run's directory in it."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from everstep.spec.parsing import parse_spec
from storage.checkpoints.store import CheckpointStore
from storage.errors import (
    CorruptFile,
    InvalidStorage,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageNotFound,
)
from storage.files.local import LocalFiles
from storage.filesystem import Storage, open_storage
from storage.run_dir import CheckpointName, RunDir
from tests.support.raw_specs import TASK
from tests.support.small_disk import mounted_small_disk
from tests.support.storage_places import event, save

pytest_plugins = ["tests.support.storage_fixtures"]

SPEC = {
    "name": "digits",
    "task": TASK,
}


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("/data/runs", "/data/runs"),
        ("file:///data/my%20runs/", "/data/my runs"),
        ("file://localhost/data", "/data"),
    ],
)
def test_local_uris(uri: str, root: str) -> None:
    storage = open_storage(uri)
    assert (storage.uri, storage.can_append) == (root, True)


def test_relative_and_home_paths_become_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert open_storage("runs").uri == str(tmp_path / "runs")
    assert open_storage("~/runs").uri == "/home/somebody/runs"


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("", "empty"),
        ("ftp://host/dir", "'ftp' is not supported"),
        ("file://other/dir", "not a path of this machine"),
        ("s3:///prefix", "names no bucket"),
        ("s3://key:secret@bucket/prefix", "credentials"),
        ("s3://bucket/prefix?endpont_override=x", "endpont_override"),
    ],
)
def test_uris_that_cannot_work(uri: str, words: str) -> None:
    with pytest.raises(InvalidStorage, match=words) as caught:
        open_storage(uri)
    assert "secret" not in str(caught.value)


def test_probe(any_storage: Storage) -> None:
    any_storage.probe()
    assert [entry for entry in any_storage.files.list("") if not entry.is_dir] == []


def test_probe_of_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=f"storage {tmp_path}/file/below cannot be used"):
        open_storage(str(tmp_path / "file" / "below")).probe()


def test_a_run_directory_travels_between_processes(any_storage: Storage) -> None:
    run_dir = RunDir(any_storage, "run_a")
    save(run_dir, 50)
    again: RunDir = pickle.loads(pickle.dumps(run_dir))
    assert again == run_dir
    assert [
        manifest.step for manifest in pickle.loads(pickle.dumps(CheckpointStore(again))).list()
    ] == [50]


def test_uris_of_a_run() -> None:
    local = RunDir(open_storage("/data"), "run_a")
    assert (local.uri, local.local_path, local.parent_uri) == (
        "/data/runs/run_a",
        "/data/runs/run_a",
        "/data/runs",
    )
    remote = RunDir(open_storage("s3://bucket/deep/prefix/?region=eu-west-1"), "run_a")
    assert (remote.uri, remote.local_path) == (
        "s3://bucket/deep/prefix/runs/run_a?region=eu-west-1",
        None,
    )


@pytest.mark.parametrize("run_id", ["", "..", "a/b", ".hidden", "a\n", "x" * 200])
def test_run_ids_cannot_leave_their_directory(run_id: str) -> None:
    with pytest.raises(InvalidStorage):
        RunDir(open_storage("/data"), run_id)


def test_spec(any_storage: Storage) -> None:
    run_dir = RunDir(any_storage, "run_a")
    with pytest.raises(StorageNotFound):
        run_dir.read_spec()
    spec = parse_spec(SPEC)
    run_dir.write_spec(spec)
    assert run_dir.read_spec() == spec
    run_dir.files.write("runs/run_a/spec.json", b'{"name": 1')
    with pytest.raises(CorruptFile, match=r"spec\.json is not a run's spec"):
        run_dir.read_spec()


def test_stop_requests(any_storage: Storage) -> None:
    run_dir = RunDir(any_storage, "run_a")
    assert run_dir.stop_requested(1) is None
    run_dir.request_stop(1, "pause")
    assert (run_dir.stop_requested(1), run_dir.stop_requested(2)) == ("pause", None)
    run_dir.request_stop(1, "cancel")
    run_dir.request_stop(1, "pause")
    assert run_dir.stop_requested(1) == "cancel"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"stop": "explode"}'])
def test_a_stop_request_that_is_none(local_storage: Storage, data: bytes) -> None:
    run_dir = RunDir(local_storage, "run_a")
    run_dir.files.write("runs/run_a/control/s001.stop.json", data)
    with pytest.raises(CorruptFile):
        run_dir.stop_requested(1)


def test_submissions_and_deletion(any_storage: Storage) -> None:
    from storage.logs.journal_writer import JournalWriter

    run_dir, other = RunDir(any_storage, "run_a"), RunDir(any_storage, "run_ab")
    assert run_dir.submissions() == []
    for number in (1, 2, 1000):
        with JournalWriter(run_dir, number) as writer:
            writer.append([event(1)])
    save(run_dir, 50)
    save(other, 50)
    assert run_dir.submissions() == [1, 2, 1000]
    run_dir.delete()
    run_dir.delete()
    assert (run_dir.submissions(), CheckpointStore(run_dir).list()) == ([], [])
    assert len(CheckpointStore(other).list()) == 1


def test_checkpoint_names() -> None:
    assert str(CheckpointName(150, 2, 1)) == "step-000000150.s002.a001"
    for name in (
        CheckpointName(150, 2, 1),
        CheckpointName(0, 1, 1),
        CheckpointName(10**10, 12345, 6789),
    ):
        assert CheckpointName.parse(str(name)) == name
    for text in (
        "step-150.s002.a001",
        "step-000000150.s002",
        "step-000000150.s002.a001.tmp",
        ".trash-step-000000150.s002.a001",
        "checkpoint_0",
        "step-000000150.s002.a001\n",
    ):
        assert CheckpointName.parse(text) is None


def test_a_small_file_is_replaced_at_once_and_leaves_nothing_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles(tmp_path)
    files.write("deep/file", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(StorageError, match="free some space"):
            files.write("deep/file", b"new")
    assert files.read("deep/file") == b"old"
    assert [entry.name for entry in files.list("deep")] == ["file"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_that_fails_leaves_nothing_and_can_be_tried_again(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted_small_disk(tmp_path / "disk") as disk:
        files = LocalFiles(disk)
        files.make_dir("claims")
        if not has_links:
            monkeypatch.setattr(os, "link", _refuse_links)
        with pytest.raises(StorageFull):
            files.create_new("claims/first", bytes(4 << 20))
        assert [entry.name for entry in files.list("claims")] == []
        assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > 1 << 20
        assert files.create_new("claims/first", b"mine")
        assert files.create_new("claims/first", b"mine")  # as after an answer that was lost
        assert not files.create_new("claims/first", b"another's")
        assert [entry.name for entry in files.list("claims")] == ["first"]
        assert files.read("claims/first") == b"mine"


def _refuse_links(*_: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_a_link_that_a_run_left_does_not_lead_a_reader_out_of_the_storage(tmp_path: Path) -> None:
    outside, root = tmp_path / "token", tmp_path / "storage"
    outside.write_text("everything")
    (tmp_path / "elsewhere").mkdir()
    (root / "runs" / "run_a").mkdir(parents=True)
    (root / "runs" / "run_a" / "model.pt").symlink_to(outside)
    (root / "runs" / "run_b").symlink_to(tmp_path)
    (root / "code").symlink_to(tmp_path / "elsewhere")
    files = open_storage(str(root)).files
    for relpath in ("runs/run_a/model.pt", "runs/run_b/token"):
        with pytest.raises(StorageDenied, match="leads out of the storage"):
            files.read(relpath)
        with pytest.raises(StorageDenied, match="leads out of the storage"):
            files.open_read(relpath, 3)
    files.write("code/archive", b"on another disk, by the operator's own link")
    assert files.read("code/archive").startswith(b"on another disk")


def test_a_directory_is_deleted_although_somebody_deletes_in_it_too(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls for one run, or a reader that gives back what it held."""
    files = RunDir(local_storage, "run_a").files
    for name in ("a", "b", "c"):
        files.write(f"runs/run_a/{name}", b"x")
    unlink = os.unlink
    stolen: list[str] = []

    def unlink_after_another(path: str, **where: Any) -> None:
        if not stolen:
            stolen.append(path)
            unlink(path, **where)
        unlink(path, **where)

    monkeypatch.setattr(os, "unlink", unlink_after_another)
    files.delete_dir("runs/run_a")
    assert stolen and files.list("runs") == []
    files.delete_dir("runs/run_a")
