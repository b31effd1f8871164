"""Checkpoints as they arrive: complete and exact, or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep import CorruptDownload, Unavailable, UsageError
from everstep.client.download import receive_checkpoint

FILES = {
    "model.pt": b"weights" * 10_000,
    "train_state.pt": b"state",
    "empty": b"",
    "deep/er/file": b"\0" * 513,
}


def canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def manifest_of(files: dict[str, bytes], **fields: Any) -> bytes:
    """As storage writes it: canonical JSON with the digest of itself without it."""
    entries = {
        name: {"size_bytes": len(data), "blake3": blake3(data).hexdigest()}
        for name, data in files.items()
    }
    value = {"schema_version": 3, "step": 150, "files": entries, **fields}
    return canonical({**value, "digest": hashlib.sha256(canonical(value)).hexdigest()})


def digest_of(manifest: bytes) -> str:
    return str(json.loads(manifest)["digest"])


MANIFEST = manifest_of(FILES)


def tar_of(members: dict[str, bytes], *special: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in special:
            archive.addfile(info)
    return buffer.getvalue()


TAR = tar_of({"manifest.json": MANIFEST, **FILES})


def receive(
    data: bytes, target: Path, digest: str | None = digest_of(MANIFEST), chunk: int = 4096
) -> None:
    chunks = (data[start : start + chunk] for start in range(0, len(data), chunk))
    receive_checkpoint(chunks, target, digest, lambda _num_bytes: None)


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "checkpoint"


def assert_untouched(target: Path) -> None:
    """Nothing appeared, not even beside the target."""
    assert list(target.parent.iterdir() if target.parent.exists() else ()) == []


@pytest.mark.parametrize("chunk", [1, 511, 512, 1 << 20])
def test_what_arrives_is_what_was_promised(target: Path, chunk: int) -> None:
    receive(TAR, target, chunk=chunk)
    assert content(target) == {"manifest.json": MANIFEST, **FILES}
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint"]


def test_every_byte_is_told(target: Path) -> None:
    sizes: list[int] = []
    receive_checkpoint(iter([TAR[:700], TAR[700:900], TAR[900:]]), target, None, sizes.append)
    assert sizes == [700, 200, len(TAR) - 900]


def test_the_current_directory_and_an_empty_one_may_be_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    receive(TAR, tmp_path / "empty")
    assert content(tmp_path / "empty")["model.pt"] == FILES["model.pt"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "mine").write_text("kept")
    receive(TAR, Path())
    assert content(tmp_path / "here").keys() == {"mine", "manifest.json", *FILES}


def test_an_earlier_download_is_replaced_and_other_files_stay(target: Path) -> None:
    earlier = {"model.pt": b"old weights"}
    receive(tar_of({"manifest.json": manifest_of(earlier), **earlier}), target, digest=None)
    (target / "notes.txt").write_text("mine")
    receive(TAR, target)
    assert content(target) == {"manifest.json": MANIFEST, **FILES, "notes.txt": b"mine"}


def test_a_failed_download_leaves_the_earlier_one(target: Path) -> None:
    receive(TAR, target)
    before = content(target)
    with pytest.raises(CorruptDownload):
        receive(TAR[:60_000], target)
    assert content(target) == before


def test_a_file_in_the_way_is_said(target: Path) -> None:
    target.parent.mkdir()
    target.write_text("a file")
    with pytest.raises(UsageError, match="is a file"):
        receive(TAR, target)
    assert target.read_text() == "a file"


def link(name: str, kind: bytes, to: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/tmp/evil",
        "a/../../evil",
        "..",
        "deep/../../../evil",
        "a\\..\\evil",
        "./../evil",
    ],
)
def test_a_path_that_leads_out_writes_nothing(target: Path, name: str) -> None:
    files = {**FILES, name: b"evil"}
    with pytest.raises(CorruptDownload, match="leads out"):
        receive(tar_of({"manifest.json": manifest_of(files), **files}), target, digest=None)
    assert_untouched(target)
    assert not list(target.parent.parent.rglob("evil")) and not Path("/tmp/evil").exists()


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_what_is_no_regular_file_writes_nothing(target: Path, kind: bytes) -> None:
    with pytest.raises(CorruptDownload, match="not a regular file"):
        receive(tar_of({"manifest.json": MANIFEST, **FILES}, link("link", kind)), target)
    assert_untouched(target)


def changed(name: str, data: bytes | None) -> dict[str, bytes]:
    files = {**FILES, "extra": b"x"} if name == "extra" else dict(FILES)
    if data is None:
        files.pop(name)
    else:
        files[name] = data
    return {"manifest.json": MANIFEST, **files}


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (changed("model.pt", b"x" * 70_000), "model.pt has blake3"),
        (
            changed("model.pt", FILES["model.pt"][:-1]),
            "model.pt has 69999 bytes, but the manifest states 70000",
        ),
        (changed("train_state.pt", None), "train_state.pt is missing"),
        (changed("extra", b"y"), "extra, which is not in the manifest"),
        (dict(FILES), "no manifest.json"),
        ({**FILES, "manifest.json": b"{"}, "not a manifest"),
        ({**FILES, "manifest.json": b"[]"}, "not a manifest"),
        ({**FILES, "manifest.json": b'{"files": {"model.pt": 1}}'}, "not a manifest"),
        (
            {**FILES, "manifest.json": MANIFEST.replace(b'"step":150', b'"step":151')},
            "states digest",
        ),
        (
            {**FILES, "manifest.json": manifest_of(FILES, step=151)},
            "according to the service, digest",
        ),
        ({"a": b"1", "a/b": b"2"}, "damaged"),
    ],
)
def test_what_differs_is_named_and_nothing_appears(
    target: Path, members: dict[str, bytes], words: str
) -> None:
    with pytest.raises(CorruptDownload, match=words):
        receive(tar_of(members), target)
    assert_untouched(target)


def test_a_file_that_comes_twice_is_refused(target: Path) -> None:
    first = tar_of({"manifest.json": MANIFEST, "empty": b""})
    # two headers, one content, before the archive's end
    end = (len(MANIFEST) + 511) // 512 * 512 + 2 * 512
    twice = first[:end] + tar_of({"empty": b"again"})
    with pytest.raises(CorruptDownload, match="empty twice"):
        receive(twice, target)
    assert_untouched(target)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 80_000), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    """One bit anywhere: either nothing that counts changed, or the download fails."""
    damaged = bytearray(TAR)
    damaged[place % len(TAR)] ^= 1 << bit
    target = tmp_path_factory.mktemp("flip") / "out"
    try:
        receive(bytes(damaged), target)
    except CorruptDownload:
        assert not target.exists()
    else:
        assert content(target) == {"manifest.json": MANIFEST, **FILES}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, len(TAR) - 10_240))
def test_no_cut_goes_unseen(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    target = tmp_path_factory.mktemp("cut") / "out"
    data = TAR[:length]
    try:
        receive(data, target)
    except CorruptDownload:
        assert not target.exists()
    else:
        # only the padding behind the last file was cut
        assert content(target) == {"manifest.json": MANIFEST, **FILES}


def breaking(data: bytes, error: Exception) -> Iterator[bytes]:
    yield data
    raise error


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("the connection broke"),
        OSError(28, "No space left on device"),
        KeyboardInterrupt(),
    ],
)
def test_what_stops_a_download_leaves_nothing(target: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        receive_checkpoint(breaking(TAR[:30_000], error), target, None, lambda _num_bytes: None)  # type: ignore[arg-type]
    assert_untouched(target)


def test_a_directory_that_is_there_is_all_that_is_written_to(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a volume: nothing can be renamed into it, or its parent belongs to somebody
    else."""
    target.mkdir(parents=True)
    made: list[Path] = []
    make = tempfile.mkdtemp

    def note(
        suffix: str | None = None, prefix: str | None = None, dir: str | Path | None = None
    ) -> str:
        made.append(Path(str(dir)))
        return make(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", note)
    receive(TAR, target)
    assert made == [target] and content(target) == {"manifest.json": MANIFEST, **FILES}
