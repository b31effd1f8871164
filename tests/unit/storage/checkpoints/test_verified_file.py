"""Files that are verified while torch reads them: read once, whatever the order, and no damage gets
through."""

from __future__ import annotations

import io
import warnings
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from storage.checkpoints import reader
from storage.checkpoints.manifest import FileEntry, new_hash
from storage.checkpoints.reader import VerifiedFile
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint
from storage.filesystem import open_storage
from storage.run_dir import RunDir

LOAD = partial(torch.load, map_location="cpu", weights_only=True)
STATE = {
    "small": [torch.arange(float(n)) for n in range(40)],
    "large": {str(n): torch.full((5000,), float(n)) for n in range(3)},
    "words": "w" * 20_000,
    "huge": torch.arange(300_000.0),
}


def committed(directory: Path, data: bytes) -> tuple[CheckpointStore, str, Path]:
    """A checkpoint with one file; its store, name, and the file's path."""
    store = CheckpointStore(RunDir(open_storage(str(directory)), "run_v"))
    with store.begin(1, 1, 1) as writer:
        with writer.write_file("model.pt") as file:
            file.write(data)
        writer.commit(epoch=0, parent=None, world_size=1, sample_digest=None, metrics={})
    return store, writer.name, Path(store.path(writer.name)) / "model.pt"


def torch_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def opened(path: Path, data: bytes) -> VerifiedFile:
    hashed = new_hash()
    hashed.update(data)
    return VerifiedFile(
        io.FileIO(path),
        "step",
        "model.pt",
        FileEntry(size_bytes=len(data), blake3=hashed.hexdigest()),
    )


def test_torch_reads_straight_from_the_file_and_every_large_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, name, _ = committed(tmp_path, torch_bytes(STATE))
    monkeypatch.setattr(
        CheckpointStore, "read_file", lambda *_: pytest.fail("the file was read into memory first")
    )
    reads: list[int] = []
    fill = VerifiedFile._fill
    monkeypatch.setattr(
        VerifiedFile,
        "_fill",
        lambda self, view, offset: reads.append(len(view)) or fill(self, view, offset),
    )
    loaded = store.load_file(name, "model.pt", LOAD)
    assert torch.equal(loaded["huge"], STATE["huge"]) and loaded["words"] == STATE["words"]
    assert all(torch.equal(a, b) for a, b in zip(loaded["small"], STATE["small"], strict=True))
    size_bytes = store.manifest(name).size_bytes
    assert size_bytes <= sum(reads) < 1.2 * size_bytes


@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_anywhere_is_damage_and_nothing_else(bit: int, tmp_path: Path) -> None:
    """Also in what torch itself reads: the zip file's directory, the pickle, lengths and names."""
    data = torch_bytes(
        {
            "weight": torch.arange(5000.0),
            "words": "w" * 200,
            "moments": [torch.ones(3), torch.zeros(2, 2)],
        }
    )
    store, name, path = committed(tmp_path, data)
    structure = [place for place in range(len(data)) if not 2000 < place < len(data) - 3000]
    for place in [*structure[bit % 7 :: 101], 10_000]:
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        with warnings.catch_warnings(), pytest.raises(CorruptCheckpoint, match="blake3"):
            warnings.simplefilter("ignore")  # torch wonders about what it reads
            store.load_file(name, "model.pt", LOAD)
    path.write_bytes(data[:-1])
    with pytest.raises(
        CorruptCheckpoint, match=f"expected {len(data)} bytes, found {len(data) - 1} bytes"
    ):
        store.load_file(name, "model.pt", LOAD)
    path.unlink()
    with pytest.raises(CorruptCheckpoint, match="no file"):
        store.load_file(name, "model.pt", LOAD)


def test_a_reader_that_goes_back_is_given_verified_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    store, name, _ = committed(tmp_path, data)
    files: list[IO[bytes]] = []

    def backwards(file: IO[bytes]) -> bytes:
        files.append(file)
        file.seek(100_000)
        behind = file.read(len(data))
        file.seek(0)
        return file.read(100_000) + behind

    assert store.load_file(name, "model.pt", backwards) == data
    assert [type(file) for file in files] == [VerifiedFile, io.BytesIO]


def test_bytes_that_change_between_two_looks_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read ahead is compared when its turn in the digest comes, across the borders of
    blocks too."""
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 1000)
    data = bytes(range(256)) * 100
    path = tmp_path / "file"
    path.write_bytes(data)
    with opened(path, data) as file:
        file.seek(20_500)
        assert file.read(3000) == data[20_500:23_500]
    with (
        pytest.raises(CorruptCheckpoint, match="the same bytes on every read"),
        opened(path, data) as file,
    ):
        path.write_bytes(data[:23_400] + b"x" + data[23_401:])
        file.seek(20_500)
        file.read(3000)
        path.write_bytes(data)


def test_an_error_of_the_reader_s_own_is_left_alone(tmp_path: Path) -> None:
    store, name, _ = committed(tmp_path, torch_bytes(STATE))
    with pytest.raises(ZeroDivisionError):
        store.load_file(name, "model.pt", lambda file: len(file.read(1)) // 0)
