"""Checkpoints: what is committed verifies, what does not is named and passed over, what is half is
nothing."""

from __future__ import annotations

import builtins
import shutil
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from storage.checkpoints.manifest import MANIFEST
from storage.checkpoints.store import CheckpointStore, Rejected
from storage.errors import CorruptCheckpoint, InvalidStorage, StorageNotFound, StorageUnavailable
from storage.filesystem import Storage
from storage.run_dir import RunDir
from tests.support.storage_places import CHECKPOINT_FILES, original, overwrite, save

pytest_plugins = ["tests.support.storage_fixtures"]


def test_a_checkpoint_comes_back_as_it_went_in(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    assert (store.list(), store.lineage(), store.newest_valid()) == ([], [], (None, []))
    first = save(run_dir, 50)
    second = save(
        run_dir,
        150,
        files={"model.pt": b"m" * 100_000, "deep/state.pt": b"", "x.bin": bytes(range(256))},
        parent=first.name,
    )
    assert store.list() == [first, second]
    assert store.newest_valid() == (second, [])
    store.verify(second.name)
    assert second.name == "step-000000150.s001.a001"
    assert second.size_bytes == 100_256
    assert store.read_file(second.name, "x.bin") == bytes(range(256))
    assert store.read_file(second.name, "deep/state.pt") == b""
    assert store.path(second.name).endswith("runs/run_a/checkpoints/step-000000150.s001.a001")
    with pytest.raises(StorageNotFound, match=r"has no file nothing\.pt; it has"):
        store.read_file(second.name, "nothing.pt")
    with pytest.raises(StorageNotFound, match="no committed checkpoint"):
        store.verify("step-000000200.s001.a001")
    with pytest.raises(InvalidStorage, match="not a checkpoint name"):
        store.verify("../../secrets")


def test_digests_are_those_of_the_bytes(run_dir: RunDir) -> None:
    data = bytes(range(256)) * 5000
    with CheckpointStore(run_dir).begin(1, 1, 1) as writer:
        with writer.write_file("a.bin") as file:
            for start in range(0, len(data), 777):
                assert file.write(memoryview(data)[start : start + 777]) == len(
                    data[start : start + 777]
                )
            assert file.tell() == len(data)
            file.flush()
        manifest = writer.commit(epoch=0, parent=None, world_size=1, sample_digest=None, metrics={})
    assert manifest.files["a.bin"].blake3 == blake3(data).hexdigest()
    assert manifest.files["a.bin"].size_bytes == len(data)


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("relpath", CHECKPOINT_FILES)
def test_every_byte_of_every_file_is_watched(local_dir: RunDir, relpath: str) -> None:
    """Flip each byte in turn, one of its bits at a time."""
    store = CheckpointStore(local_dir)
    save(local_dir, 50)
    name = save(local_dir, 100).name
    path = Path(store.path(name)) / relpath
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint) as caught:
            store.verify(name)
        assert (caught.value.name, caught.value.path) == (name, relpath), position
    path.write_bytes(whole)
    store.verify(name)


@pytest.mark.parametrize("relpath", CHECKPOINT_FILES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied", "grown", "removed"])
def test_damage_is_named_and_restore_falls_back(run_dir: RunDir, relpath: str, damage: str) -> None:
    store = CheckpointStore(run_dir)
    sound = save(run_dir, 50)
    name = save(run_dir, 100).name
    data = original(run_dir, name, relpath)
    if damage == "removed":
        run_dir.files.delete_file(f"runs/run_a/checkpoints/{name}/{relpath}")
    else:
        changed = {
            "flipped": bytes([data[0] ^ 1]) + data[1:],
            "truncated": data[:-1],
            "emptied": b"",
            "grown": data + b"x",
        }
        overwrite(run_dir, name, relpath, changed[damage])

    newest, rejected = store.newest_valid()
    assert newest == sound
    # then it is no checkpoint, and nothing to report
    if (damage, relpath) == ("removed", MANIFEST):
        assert rejected == []
        with pytest.raises(StorageNotFound):
            store.verify(name)
        return
    with pytest.raises(CorruptCheckpoint) as caught:
        store.verify(name)
    assert (caught.value.name, caught.value.path) == (name, relpath)
    assert caught.value.expected != caught.value.found
    if relpath != MANIFEST and damage in ("truncated", "emptied"):
        found = len(data) - 1 if damage == "truncated" else 0
        assert (caught.value.expected, caught.value.found) == (
            f"{len(data)} bytes",
            f"{found} bytes",
        )
    assert rejected == [Rejected(name, str(caught.value))]
    assert relpath in rejected[0].problem
    if relpath != MANIFEST:
        with pytest.raises(CorruptCheckpoint):
            store.read_file(name, relpath)
        with pytest.raises(CorruptCheckpoint):
            list(store.archive(name).stream())


def test_a_checkpoint_copied_elsewhere_is_not_one(
    local_dir: RunDir, local_storage: Storage
) -> None:
    store = CheckpointStore(local_dir)
    name = save(local_dir, 50).name
    shutil.copytree(store.path(name), store.path("step-000000999.s001.a001"))
    other = RunDir(local_storage, "run_b")
    checkpoints = CheckpointStore(other)
    shutil.copytree(store.path(name), checkpoints.path(name))
    assert [manifest.name for manifest in store.list()] == [name]
    assert [one.name for one in store.newest_valid()[1]] == ["step-000000999.s001.a001"]
    assert checkpoints.list() == []


def test_trouble_of_the_storage_is_not_damage(
    local_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that is away must not send a run back; a sector that cannot be read must."""
    store = CheckpointStore(local_dir)
    save(local_dir, 50)
    name = save(local_dir, 100).name
    real_open = builtins.open

    def failing(number: int) -> None:
        def opened(path: Any, *args: Any, **kwargs: Any) -> object:
            if str(path).endswith(f"{name}/model.pt"):
                raise OSError(number, "injected")
            return real_open(path, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", opened)

    failing(110)
    with pytest.raises(StorageUnavailable):
        store.newest_valid()
    failing(5)
    newest, rejected = store.newest_valid()
    assert newest is not None and newest.step == 50
    assert rejected[0].name == name


def test_verifying_tells_every_block_and_can_be_broken_off(local_dir: RunDir) -> None:
    store = CheckpointStore(local_dir)
    manifest = save(local_dir, 50, files={"model.pt": b"m" * 2_500_000, "state": b"s" * 100})
    sizes: list[int] = []
    store.verify(manifest.name, sizes.append)
    assert sum(sizes) == manifest.size_bytes and max(sizes) <= 1 << 20

    def stop(num_bytes: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        store.verify(manifest.name, stop)
