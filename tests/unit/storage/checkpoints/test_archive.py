"""What a checkpoint's manifest says, and its archive: the same bytes whole and in parts, and
nothing that is damaged."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep.cli.history import _joined
from storage.checkpoints.manifest import MANIFEST, parse_manifest
from storage.checkpoints.store import CheckpointStore
from storage.claims import process_nonce
from storage.errors import CorruptCheckpoint, CorruptFile, StorageNotFound
from storage.run_dir import RunDir
from tests.support.storage_places import original, overwrite, save

pytest_plugins = ["tests.support.storage_fixtures"]


def test_the_manifest_says_what_the_contract_says(local_dir: RunDir) -> None:
    created_at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    manifest = save(
        local_dir, 50, created_at=created_at, epoch=2, attempt=3, parent="step-000000010.s001.a001"
    )
    raw = json.loads(original(local_dir, manifest.name, MANIFEST))
    assert raw.pop("files").keys() == {"model.pt", "train_state.pt"}
    assert raw == {
        "schema_version": 3,
        "run_id": "run_a",
        "step": 50,
        "epoch": 2,
        "submission": 1,
        "attempt": 3,
        "writer": process_nonce(),
        "parent": "step-000000010.s001.a001",
        "world_size": 2,
        "sample_digest": "chain",
        "metrics": {"accuracy": 0.5},
        "created_at": "2026-01-02T03:04:05.678901Z",
        "digest": manifest.digest,
    }


def test_a_manifest_of_a_newer_version_is_said_to_be_one(local_dir: RunDir) -> None:
    raw = json.loads(save(local_dir, 50).to_bytes())
    with pytest.raises(CorruptFile, match="newer Everstep"):
        parse_manifest(json.dumps({**raw, "schema_version": 4, "surprise": 1}).encode())


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b'{"digest": 1}'])
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        parse_manifest(data)


def test_the_archive_unpacks_to_what_was_saved(run_dir: RunDir, tmp_path: Path) -> None:
    store = CheckpointStore(run_dir)
    files = {
        "model.pt": b"m" * 1_500_000,
        "deep/er/state.pt": b"s" * 513,
        "empty": b"",
        "block": b"b" * 512,
    }
    manifest = save(run_dir, 50, files=files)
    archive = tmp_path / "checkpoint.tar"
    archive.write_bytes(b"".join(store.archive(manifest.name).stream()))
    with tarfile.open(archive, "r:") as tar:
        assert tar.getnames()[0] == MANIFEST
        for name, data in {**files, MANIFEST: manifest.to_bytes()}.items():
            member = tar.extractfile(name)
            assert member is not None and member.read() == data
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path / "out"], check=True)
    assert {
        str(path.relative_to(tmp_path / "out"))
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    } == {
        *files,
        MANIFEST,
    }
    with pytest.raises(StorageNotFound):
        store.archive("step-000000051.s001.a001")


def test_large_files_stream_in_constant_memory(local_dir: RunDir) -> None:
    store = CheckpointStore(local_dir)
    chunk = bytes(1 << 20)
    with store.begin(50, 1, 1) as writer:
        with writer.write_file("model.pt") as file:
            for _ in range(64):
                file.write(chunk)
        writer.commit(epoch=0, parent=None, world_size=1, sample_digest=None, metrics={})
    tracemalloc.start()
    store.verify(writer.name)
    total = sum(len(block) for block in store.archive(writer.name).stream())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 64 << 20
    assert peak_bytes < 8 << 20


def test_a_deleted_checkpoint_is_missing_not_corrupt(local_dir: RunDir) -> None:
    store = CheckpointStore(local_dir)
    manifest = save(local_dir, 50)
    archive = store.archive(manifest.name).stream()
    next(archive)
    local_dir.files.delete_dir(store.directory(manifest.name))
    with pytest.raises(StorageNotFound):
        list(archive)


def test_any_part_of_an_archive_is_what_the_whole_holds_there(local_dir: RunDir) -> None:
    manifest = save(
        local_dir, 50, files={"model.pt": bytes(range(256)) * 9000, "empty": b"", "x": b"x" * 513}
    )
    archive = CheckpointStore(local_dir).archive(manifest.name)
    whole = b"".join(archive.stream())
    assert len(whole) == archive.size_bytes
    places = sorted({0, 1, 511, 512, 1500, 1 << 20, len(whole) - 1025, len(whole) - 1, len(whole)})
    for start in places:
        assert b"".join(archive.stream(start)) == whole[start:]
        for stop in places:
            assert b"".join(archive.stream(start, stop)) == whole[start:stop]


def test_a_part_that_holds_a_damaged_file_whole_breaks_off_and_a_short_file_always(
    local_dir: RunDir,
) -> None:
    manifest = save(local_dir, 50, files={"model.pt": b"m" * 5000, "z.pt": b"z" * 3000})
    archive = CheckpointStore(local_dir).archive(manifest.name)
    overwrite(local_dir, manifest.name, "z.pt", b"z" * 2999 + b"!")
    with pytest.raises(CorruptCheckpoint, match="blake3"):
        list(archive.stream(6000))
    overwrite(local_dir, manifest.name, "z.pt", b"z" * 2000)
    with pytest.raises(CorruptCheckpoint, match="found fewer"):
        list(archive.stream(archive.size_bytes - 2000))


def test_pieces_that_cannot_be_joined_stay_and_the_download_says_why(
    local_dir: RunDir, tmp_path: Path
) -> None:
    data = save(local_dir, 50).to_bytes()
    (tmp_path / MANIFEST).write_bytes(data)
    said = _joined(tmp_path)
    assert "its pieces were left as they are" in said and said.endswith("load its model.pt")
    assert [each.read_bytes() for each in tmp_path.iterdir() if each.is_file()] == [data]
