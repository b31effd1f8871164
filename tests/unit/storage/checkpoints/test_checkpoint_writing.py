"""Writing a checkpoint: whole or not at all, whoever else writes, lists or fails meanwhile."""

from __future__ import annotations

import pytest

from storage.checkpoints.store import CheckpointStore
from storage.errors import (
    CheckpointExists,
    CheckpointReplaced,
    InvalidStorage,
    StorageFull,
)
from storage.run_dir import RunDir
from tests.support.storage_places import CHECKPOINT_FILES, overwrite, save

pytest_plugins = ["tests.support.storage_fixtures"]


def test_a_committed_checkpoint_is_never_overwritten(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    manifest = save(run_dir, 50)
    with pytest.raises(CheckpointExists) as caught:
        store.begin(50, 1, 1)
    assert caught.value.name == manifest.name
    assert store.newest_valid() == (manifest, [])
    save(run_dir, 50, submission=2)
    assert [found.submission for found in store.list()] == [1, 2]


def test_a_corrupt_checkpoint_is_replaced(run_dir: RunDir) -> None:
    name = save(run_dir, 50).name
    for relpath in CHECKPOINT_FILES:
        overwrite(run_dir, name, relpath, b"bad")
        manifest = save(run_dir, 50)
        assert CheckpointStore(run_dir).newest_valid() == (manifest, [])


def test_an_exception_while_writing_leaves_nothing(run_dir: RunDir) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        CheckpointStore(run_dir).begin(50, 1, 1) as writer,
        writer.write_file("model.pt") as file,
    ):
        file.write(b"half")
        _ = 1 / 0
    files = [
        entry
        for entry in run_dir.files.list("runs/run_a/checkpoints/step-000000050.s001.a001")
        if not entry.is_dir
    ]
    assert files == []
    assert [
        entry
        for entry in run_dir.files.list("runs/run_a/checkpoints")
        if entry.name.startswith(".")
    ] == []


def test_a_writer_that_was_replaced_cannot_commit(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    slow = store.begin(50, 1, 1)
    with slow.write_file("model.pt") as file:
        file.write(b"slow")
    new = store.begin(50, 1, 1)
    with new.write_file("model.pt") as file:
        file.write(b"new")
    facts = {"epoch": 0, "parent": None, "world_size": 1, "sample_digest": None, "metrics": {}}
    with pytest.raises(CheckpointReplaced):
        slow.write_file("more.pt")
    with pytest.raises(CheckpointReplaced):
        slow.commit(**facts)  # type: ignore[arg-type]
    slow.abort()
    new.commit(**facts)  # type: ignore[arg-type]
    assert store.read_file(new.name, "model.pt") == b"new"
    slow.abort()
    new.abort()
    store.verify(new.name)


def test_a_file_that_was_not_written_whole_is_not_committed(
    local_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(local_dir)
    facts = {"epoch": 0, "parent": None, "world_size": 1, "sample_digest": None, "metrics": {}}
    with store.begin(50, 1, 1) as writer:
        with pytest.raises(InvalidStorage, match="no file"):
            writer.commit(**facts)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError), writer.write_file("a.pt") as file:
            _ = 1 / 0
        with pytest.raises(InvalidStorage, match=r"a\.pt"):
            writer.commit(**facts)  # type: ignore[arg-type]
    with store.begin(50, 1, 1) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(
                "os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            )
            with pytest.raises(StorageFull), writer.write_file("a.pt") as file:
                file.write(b"x")
        with pytest.raises(InvalidStorage, match=r"a\.pt"):
            writer.commit(**facts)  # type: ignore[arg-type]
    with store.begin(50, 1, 1) as writer:
        file = writer.write_file("still_open.pt")
        with pytest.raises(InvalidStorage, match="still_open"):
            writer.commit(**facts)  # type: ignore[arg-type]
        file.close()


def test_after_a_failed_write_the_storage_is_left_alone(
    local_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does, which ends its file all the same: what comes then could only follow a gap."""
    tried: list[int] = []

    def full(fd: int, data: memoryview) -> int:
        tried.append(len(data))
        raise OSError(28, "No space left on device")

    block = bytes(2 << 20)
    with CheckpointStore(local_dir).begin(50, 1, 1) as writer:
        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            with writer.write_file("a.pt") as file:
                with pytest.raises(StorageFull):
                    file.write(block)
                file.write(block)
        assert len(tried) == 1
        with pytest.raises(InvalidStorage, match=r"a\.pt"):
            writer.commit(epoch=0, parent=None, world_size=1, sample_digest=None, metrics={})


@pytest.mark.parametrize("relpath", [".", "manifest.json", "manifest.json.1.tmp"])
def test_paths_that_a_checkpoint_may_not_hold(local_dir: RunDir, relpath: str) -> None:
    with CheckpointStore(local_dir).begin(50, 1, 1) as writer, pytest.raises(InvalidStorage):
        writer.write_file(relpath)


def test_metrics_that_are_not_finite_do_not_stop_a_commit(run_dir: RunDir) -> None:
    manifest = save(run_dir, 50, metrics={"loss": float("nan"), "accuracy": 1, "top": float("inf")})
    assert manifest.metrics == {"accuracy": 1.0}
    assert CheckpointStore(run_dir).list() == [manifest]
