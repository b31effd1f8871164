"""Checkpoints: what is committed verifies, what does not is named and passed over, what is half is nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import threading
import tracemalloc
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from blake3 import blake3

from storage.checkpoints import CheckpointStore, Rejected
from storage.errors import (
    CheckpointExists,
    CheckpointReplaced,
    CorruptCheckpoint,
    CorruptFile,
    InvalidStorage,
    StorageFull,
    StorageNotFound,
    StorageUnavailable,
)
from storage.filesystem import Storage, open_storage
from storage.local_files import LocalFiles
from storage.manifest import MANIFEST, FileEntry, Manifest, parse_manifest
from storage.run_dir import RunDir
from tests.unit.storage_places import save

pytest_plugins = ["tests.unit.storage_fixtures"]

NAMES = ("manifest.json", "model.pt", "train_state.pt")


@pytest.fixture
def run_dir(any_storage: Storage) -> RunDir:
    return any_storage.run_dir("run_a")


@pytest.fixture
def local_dir(local_storage: Storage) -> RunDir:
    return local_storage.run_dir("run_a")


def overwrite(run_dir: RunDir, name: str, relpath: str, data: bytes) -> None:
    run_dir.files.write(f"runs/run_a/checkpoints/{name}/{relpath}", data)


def original(run_dir: RunDir, name: str, relpath: str) -> bytes:
    return run_dir.files.read(f"runs/run_a/checkpoints/{name}/{relpath}")


def test_a_checkpoint_comes_back_as_it_went_in(run_dir: RunDir) -> None:
    store = run_dir.checkpoints
    assert (store.list(), store.lineage(), store.newest_valid()) == ([], [], (None, []))
    first = save(run_dir, 50)
    second = save(
        run_dir, 150, files={"model.pt": b"m" * 100_000, "deep/state.pt": b"", "x.bin": bytes(range(256))}, parent=first.name
    )
    assert store.list() == [first, second]
    assert store.newest_valid() == (second, [])
    store.verify(second.name)
    assert second.name == "step-000000150.s001"
    assert second.size_bytes == 100_256
    assert store.read_file(second.name, "x.bin") == bytes(range(256))
    assert store.read_file(second.name, "deep/state.pt") == b""
    assert store.path(second.name).endswith("runs/run_a/checkpoints/step-000000150.s001")
    with pytest.raises(StorageNotFound, match=r"has no file nothing\.pt; it has"):
        store.read_file(second.name, "nothing.pt")
    with pytest.raises(StorageNotFound, match="no committed checkpoint"):
        store.verify("step-000000200.s001")
    with pytest.raises(InvalidStorage, match="not a checkpoint's name"):
        store.verify("../../secrets")


def test_nothing_is_a_checkpoint_before_its_manifest(run_dir: RunDir) -> None:
    store = run_dir.checkpoints
    seen: list[tuple[str, int]] = []
    save(run_dir, 50, between=lambda point: seen.append((point, len(CheckpointStore(run_dir).list()))))
    assert [count for _, count in seen] == [0, 0, 0, 0, 0, 1]
    with store.begin(100, 1) as writer, writer.write_file("model.pt") as file:
        file.write(b"x")
    assert [manifest.step for manifest in store.list()] == [50]
    with pytest.raises(StorageNotFound):
        store.read_file(writer.name, "model.pt")


def test_digests_are_those_of_the_bytes(run_dir: RunDir) -> None:
    data = bytes(range(256)) * 5000
    with run_dir.checkpoints.begin(1, 1) as writer:
        with writer.write_file("a.bin") as file:
            for start in range(0, len(data), 777):
                assert file.write(memoryview(data)[start : start + 777]) == len(data[start : start + 777])
            assert file.tell() == len(data)
            file.flush()
        manifest = writer.commit(epoch=0, attempt=1, parent=None, world_size=1, sample_digest=None, metrics={})
    assert manifest.files["a.bin"].blake3 == blake3(data).hexdigest()
    assert manifest.files["a.bin"].size_bytes == len(data)


def test_torch_saves_into_it_and_loads_from_it(run_dir: RunDir) -> None:
    import torch

    with run_dir.checkpoints.begin(1, 1) as writer:
        with writer.write_file("model.pt") as file:
            torch.save({"weight": torch.arange(100_000.0)}, file)
        writer.commit(epoch=0, attempt=1, parent=None, world_size=1, sample_digest=None, metrics={})
    state = run_dir.checkpoints.load_file(writer.name, "model.pt", partial(torch.load, weights_only=True))
    assert torch.equal(state["weight"], torch.arange(100_000.0))


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("relpath", NAMES)
def test_every_byte_of_every_file_is_watched(local_dir: RunDir, relpath: str) -> None:
    """Flip each byte in turn, one of its bits at a time."""
    store = local_dir.checkpoints
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


@pytest.mark.parametrize("relpath", NAMES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied", "grown", "removed"])
def test_damage_is_named_and_restore_falls_back(run_dir: RunDir, relpath: str, damage: str) -> None:
    store = run_dir.checkpoints
    sound = save(run_dir, 50)
    name = save(run_dir, 100).name
    data = original(run_dir, name, relpath)
    if damage == "removed":
        run_dir.files.delete_file(f"runs/run_a/checkpoints/{name}/{relpath}")
    else:
        changed = {"flipped": bytes([data[0] ^ 1]) + data[1:], "truncated": data[:-1], "emptied": b"", "grown": data + b"x"}
        overwrite(run_dir, name, relpath, changed[damage])

    newest, rejected = store.newest_valid()
    assert newest == sound
    if (damage, relpath) == ("removed", MANIFEST):  # then it is no checkpoint, and nothing to report
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
        assert (caught.value.expected, caught.value.found) == (f"{len(data)} bytes", f"{found} bytes")
    assert rejected == [Rejected(name, str(caught.value))]
    assert relpath in rejected[0].problem
    if relpath != MANIFEST:
        with pytest.raises(CorruptCheckpoint):
            store.read_file(name, relpath)
        with pytest.raises(CorruptCheckpoint):
            list(store.archive(name).stream())


def test_no_checkpoint_is_left_when_all_are_damaged(run_dir: RunDir) -> None:
    names = [save(run_dir, step).name for step in (50, 100)]
    for name in names:
        overwrite(run_dir, name, "model.pt", b"bad")
    newest, rejected = run_dir.checkpoints.newest_valid()
    assert newest is None
    assert [one.name for one in rejected] == [names[1], names[0]]


def test_a_checkpoint_copied_elsewhere_is_not_one(local_dir: RunDir, local_storage: Storage) -> None:
    store = local_dir.checkpoints
    name = save(local_dir, 50).name
    shutil.copytree(store.path(name), store.path("step-000000999.s001"))
    other = local_storage.run_dir("run_b")
    shutil.copytree(store.path(name), other.checkpoints.path(name))
    assert [manifest.name for manifest in store.list()] == [name]
    assert [one.name for one in store.newest_valid()[1]] == ["step-000000999.s001"]
    assert other.checkpoints.list() == []


def test_trouble_of_the_storage_is_not_damage(local_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that is away must not send a run back; a sector that cannot be read must."""
    save(local_dir, 50)
    name = save(local_dir, 100).name
    real_open = Path.open

    def failing(number: int) -> None:
        def opened(self: Path, *args: object, **kwargs: object) -> object:
            if self.name == "model.pt" and name in str(self):
                raise OSError(number, "injected")
            return real_open(self, *args, **kwargs)  # type: ignore[call-overload]

        monkeypatch.setattr(Path, "open", opened)

    failing(110)
    with pytest.raises(StorageUnavailable):
        local_dir.checkpoints.newest_valid()
    failing(5)
    newest, rejected = local_dir.checkpoints.newest_valid()
    assert newest is not None and newest.step == 50
    assert rejected[0].name == name


# ---------------------------------------------------------------- writing


def test_a_committed_checkpoint_is_never_overwritten(run_dir: RunDir) -> None:
    manifest = save(run_dir, 50)
    with pytest.raises(CheckpointExists) as caught:
        run_dir.checkpoints.begin(50, 1)
    assert caught.value.name == manifest.name
    assert run_dir.checkpoints.newest_valid() == (manifest, [])
    save(run_dir, 50, submission=2)
    assert [found.submission for found in run_dir.checkpoints.list()] == [1, 2]


def test_a_corrupt_checkpoint_is_replaced(run_dir: RunDir) -> None:
    name = save(run_dir, 50).name
    for relpath in NAMES:
        overwrite(run_dir, name, relpath, b"bad")
        manifest = save(run_dir, 50)
        assert run_dir.checkpoints.newest_valid() == (manifest, [])


def test_leavings_are_replaced(run_dir: RunDir) -> None:
    dead = run_dir.checkpoints.begin(50, 1)
    with dead.write_file("old.pt") as file:
        file.write(b"old")
    manifest = save(run_dir, 50)
    assert set(manifest.files) == {"model.pt", "train_state.pt"}
    entries = run_dir.files.list(f"runs/run_a/checkpoints/{manifest.name}")
    assert [entry.name for entry in entries if not entry.is_dir] == sorted(NAMES)


def test_a_writer_that_was_replaced_cannot_commit(run_dir: RunDir) -> None:
    slow = run_dir.checkpoints.begin(50, 1)
    with slow.write_file("model.pt") as file:
        file.write(b"slow")
    new = run_dir.checkpoints.begin(50, 1)
    with new.write_file("model.pt") as file:
        file.write(b"new")
    facts = {"epoch": 0, "attempt": 1, "parent": None, "world_size": 1, "sample_digest": None, "metrics": {}}
    with pytest.raises(CheckpointReplaced):
        slow.write_file("more.pt")
    with pytest.raises(CheckpointReplaced):
        slow.commit(**facts)  # type: ignore[arg-type]
    slow.abort()
    new.commit(**facts)  # type: ignore[arg-type]
    assert run_dir.checkpoints.read_file(new.name, "model.pt") == b"new"
    slow.abort()
    new.abort()
    run_dir.checkpoints.verify(new.name)


def test_a_slow_writer_that_commits_at_the_last_moment_is_kept(local_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking for a manifest and clearing the directory, the older writer commits."""
    slow = local_dir.checkpoints.begin(50, 1)
    with slow.write_file("model.pt") as file:
        file.write(b"slow")
    set_aside = LocalFiles.set_aside

    def commit_first(self: LocalFiles, relpath: str, aside: str) -> bool:
        monkeypatch.undo()
        slow.commit(epoch=0, attempt=1, parent=None, world_size=1, sample_digest=None, metrics={})
        return set_aside(self, relpath, aside)

    monkeypatch.setattr(LocalFiles, "set_aside", commit_first)
    with pytest.raises(CheckpointExists):
        local_dir.checkpoints.begin(50, 1)
    newest, rejected = local_dir.checkpoints.newest_valid()
    assert newest is not None and newest.name == slow.name
    assert rejected == []


def test_an_exception_while_writing_leaves_nothing(run_dir: RunDir) -> None:
    with pytest.raises(ZeroDivisionError), run_dir.checkpoints.begin(50, 1) as writer, writer.write_file("model.pt") as file:
        file.write(b"half")
        _ = 1 / 0
    files = [entry for entry in run_dir.files.list("runs/run_a/checkpoints/step-000000050.s001") if not entry.is_dir]
    assert files == []


def test_a_file_that_was_not_written_whole_is_not_committed(local_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"epoch": 0, "attempt": 1, "parent": None, "world_size": 1, "sample_digest": None, "metrics": {}}
    with local_dir.checkpoints.begin(50, 1) as writer:
        with pytest.raises(InvalidStorage, match="no file"):
            writer.commit(**facts)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError), writer.write_file("a.pt") as file:
            _ = 1 / 0
        with pytest.raises(InvalidStorage, match=r"a\.pt"):
            writer.commit(**facts)  # type: ignore[arg-type]
    with local_dir.checkpoints.begin(50, 1) as writer:
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(StorageFull), writer.write_file("a.pt") as file:
                file.write(b"x")
        with pytest.raises(InvalidStorage, match=r"a\.pt"):
            writer.commit(**facts)  # type: ignore[arg-type]
    with local_dir.checkpoints.begin(50, 1) as writer:
        file = writer.write_file("still_open.pt")
        with pytest.raises(InvalidStorage, match="still_open"):
            writer.commit(**facts)  # type: ignore[arg-type]
        file.close()


@pytest.mark.parametrize(
    "relpath", ["", ".", "..", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a\\b", "manifest.json", "manifest.json.1.tmp"]
)
def test_paths_that_a_checkpoint_may_not_hold(local_dir: RunDir, relpath: str) -> None:
    with local_dir.checkpoints.begin(50, 1) as writer, pytest.raises(InvalidStorage):
        writer.write_file(relpath)


def test_metrics_that_are_not_finite_do_not_stop_a_commit(run_dir: RunDir) -> None:
    manifest = save(run_dir, 50, metrics={"loss": float("nan"), "accuracy": 1, "top": float("inf")})
    assert manifest.metrics == {"accuracy": 1.0}
    assert run_dir.checkpoints.list() == [manifest]


def test_deleting_takes_the_manifest_first(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(run_dir, 50).name
    with monkeypatch.context() as patch:
        patch.setattr(type(run_dir.files), "delete_dir", lambda self, relpath: (_ for _ in ()).throw(StorageUnavailable("gone")))
        with pytest.raises(StorageUnavailable):
            run_dir.checkpoints.delete(name)
    assert run_dir.checkpoints.list() == []
    run_dir.checkpoints.delete(name)
    run_dir.checkpoints.delete(name)
    assert [entry for entry in run_dir.files.list(f"runs/run_a/checkpoints/{name}") if not entry.is_dir] == []


def test_saving_while_another_thread_lists(local_dir: RunDir) -> None:
    """list() may meet any state between two calls of the OS, and always answers with whole checkpoints."""
    stopping = threading.Event()
    problems: list[BaseException] = []

    def watch() -> None:
        store = CheckpointStore(local_dir)
        try:
            while not stopping.is_set():
                for manifest in store.list():
                    try:
                        store.verify(manifest.name)
                    except StorageNotFound:
                        continue
        except BaseException as exc:
            problems.append(exc)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for step in range(1, 40):
            save(local_dir, step)
            local_dir.checkpoints.retain(2, None)
    finally:
        stopping.set()
        thread.join()
    assert problems == []


# ---------------------------------------------------------------- manifest and archive


def test_the_manifest_says_what_the_contract_says(local_dir: RunDir) -> None:
    created_at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    manifest = save(local_dir, 50, created_at=created_at, epoch=2, attempt=3, parent="step-000000010.s001")
    raw = json.loads(original(local_dir, manifest.name, MANIFEST))
    assert raw.pop("files").keys() == {"model.pt", "train_state.pt"}
    assert raw == {
        "schema_version": 2,
        "run_id": "run_a",
        "step": 50,
        "epoch": 2,
        "submission": 1,
        "attempt": 3,
        "parent": "step-000000010.s001",
        "world_size": 2,
        "sample_digest": "chain",
        "metrics": {"accuracy": 0.5},
        "created_at": "2026-01-02T03:04:05.678901Z",
        "digest": manifest.digest,
    }


def test_a_manifest_of_a_newer_version_is_said_to_be_one(local_dir: RunDir) -> None:
    raw = json.loads(save(local_dir, 50).to_bytes())
    with pytest.raises(CorruptFile, match="newer Everstep"):
        parse_manifest(json.dumps({**raw, "schema_version": 3, "surprise": 1}).encode())


def test_a_checkpoint_of_schema_version_1_is_read(local_dir: RunDir) -> None:
    """Its manifest has SHA-256 of files."""
    manifest = save(local_dir, 50)
    raw = json.loads(manifest.to_bytes())
    del raw["digest"]
    raw["schema_version"] = 1
    for relpath, entry in raw["files"].items():
        del entry["blake3"]
        entry["sha256"] = hashlib.sha256(original(local_dir, manifest.name, relpath)).hexdigest()
    raw["digest"] = hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    data = json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    assert parse_manifest(data).to_bytes() == data
    overwrite(local_dir, manifest.name, MANIFEST, data)
    local_dir.checkpoints.verify(manifest.name)
    overwrite(local_dir, manifest.name, "model.pt", b"weightz 50")
    with pytest.raises(CorruptCheckpoint, match="sha256"):
        local_dir.checkpoints.verify(manifest.name)


def test_a_file_has_one_digest() -> None:
    for digests in ({}, {"blake3": "0" * 64, "sha256": "0" * 64}):
        with pytest.raises(ValueError, match="one digest"):
            FileEntry(size_bytes=1, **digests)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b'{"digest": 1}'])
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        parse_manifest(data)


def test_a_manifest_s_digest_covers_every_field(local_dir: RunDir) -> None:
    manifest = save(local_dir, 50)
    changes = {"epoch": 1, "attempt": 9, "parent": "x", "world_size": 3, "sample_digest": None, "metrics": {}, "files": {}}
    digests = {Manifest(**{**dict(manifest), name: value}).digest for name, value in changes.items()}
    assert len(digests | {manifest.digest}) == len(changes) + 1


def test_the_archive_unpacks_to_what_was_saved(run_dir: RunDir, tmp_path: Path) -> None:
    files = {"model.pt": b"m" * 1_500_000, "deep/er/state.pt": b"s" * 513, "empty": b"", "block": b"b" * 512}
    manifest = save(run_dir, 50, files=files)
    archive = tmp_path / "checkpoint.tar"
    archive.write_bytes(b"".join(run_dir.checkpoints.archive(manifest.name).stream()))
    with tarfile.open(archive, "r:") as tar:
        assert tar.getnames()[0] == MANIFEST
        for name, data in {**files, MANIFEST: manifest.to_bytes()}.items():
            member = tar.extractfile(name)
            assert member is not None and member.read() == data
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path / "out"], check=True)
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()} == {
        *files,
        MANIFEST,
    }
    with pytest.raises(StorageNotFound):
        run_dir.checkpoints.archive("step-000000051.s001")


def test_large_files_stream_in_constant_memory(local_dir: RunDir) -> None:
    chunk = bytes(1 << 20)
    with local_dir.checkpoints.begin(50, 1) as writer:
        with writer.write_file("model.pt") as file:
            for _ in range(64):
                file.write(chunk)
        writer.commit(epoch=0, attempt=1, parent=None, world_size=1, sample_digest=None, metrics={})
    tracemalloc.start()
    local_dir.checkpoints.verify(writer.name)
    total = sum(len(block) for block in local_dir.checkpoints.archive(writer.name).stream())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 64 << 20
    assert peak_bytes < 8 << 20


def test_a_deleted_checkpoint_is_missing_not_corrupt(local_dir: RunDir) -> None:
    manifest = save(local_dir, 50)
    archive = local_dir.checkpoints.archive(manifest.name).stream()
    next(archive)
    local_dir.checkpoints.delete(manifest.name)
    with pytest.raises(StorageNotFound):
        list(archive)


def test_any_part_of_an_archive_is_what_the_whole_holds_there(local_dir: RunDir) -> None:
    manifest = save(local_dir, 50, files={"model.pt": bytes(range(256)) * 9000, "empty": b"", "x": b"x" * 513})
    archive = local_dir.checkpoints.archive(manifest.name)
    whole = b"".join(archive.stream())
    assert len(whole) == archive.size_bytes
    places = sorted({0, 1, 511, 512, 1500, 1 << 20, len(whole) - 1025, len(whole) - 1, len(whole)})
    for start in places:
        assert b"".join(archive.stream(start)) == whole[start:]
        for stop in places:
            assert b"".join(archive.stream(start, stop)) == whole[start:stop]


def test_a_part_that_holds_a_damaged_file_whole_breaks_off_and_a_short_file_always(local_dir: RunDir) -> None:
    manifest = save(local_dir, 50, files={"model.pt": b"m" * 5000, "z.pt": b"z" * 3000})
    archive = local_dir.checkpoints.archive(manifest.name)
    overwrite(local_dir, manifest.name, "z.pt", b"z" * 2999 + b"!")
    with pytest.raises(CorruptCheckpoint, match="blake3"):
        list(archive.stream(6000))
    overwrite(local_dir, manifest.name, "z.pt", b"z" * 2000)
    with pytest.raises(CorruptCheckpoint, match="found fewer"):
        list(archive.stream(archive.size_bytes - 2000))


def test_verifying_tells_every_block_and_can_be_broken_off(local_dir: RunDir) -> None:
    manifest = save(local_dir, 50, files={"model.pt": b"m" * 2_500_000, "state": b"s" * 100})
    told: list[int] = []
    local_dir.checkpoints.verify(manifest.name, told.append)
    assert sum(told) == manifest.size_bytes and max(told) <= 1 << 20

    def stop(num_bytes: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        local_dir.checkpoints.verify(manifest.name, stop)


def test_a_restore_reads_a_checkpoint_once(local_dir: RunDir) -> None:
    save(local_dir, 50)
    bad = save(local_dir, 100).name
    overwrite(local_dir, bad, "model.pt", b"weights 1000")
    store = local_dir.checkpoints
    manifest, data, rejected = store.read_newest(lambda manifest: store.read_file(manifest.name, "model.pt"))
    assert manifest is not None and (manifest.step, data) == (50, b"weights 50")
    assert [one.name for one in rejected] == [bad]


def test_opening_a_store_touches_nothing(tmp_path: Path) -> None:
    run_dir = open_storage(str(tmp_path / "nothing")).run_dir("run_a")
    run_dir.checkpoints.list()
    run_dir.checkpoints.retain(1, None)
    run_dir.submissions()
    assert not (tmp_path / "nothing").exists()
