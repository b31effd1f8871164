"""Uploaded archives: what is safe is unpacked as it was, what is hostile or useless is refused
before a byte of it is written."""

from __future__ import annotations

import gzip
import io
import random
import stat
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.code import collisions, import_roots, module_path, modules
from storage import code as code_archive
from storage.code import CodeStore, read_members, unpack
from storage.errors import CorruptFile, InvalidArchive, InvalidStorage, StorageFull, StorageNotFound
from storage.filesystem import open_storage
from tests.support.code_archives import tar_entry, tar_gz, zip_of

FILES: dict[str, str | bytes] = {
    "mine/__init__.py": "",
    "mine/task.py": "x = 1\n",
    "data/table.bin": b"\x00\xff" * 500,
}


@pytest.mark.parametrize(
    "archive",
    [tar_gz(FILES), zip_of(FILES), tar_gz({f"./{name}": data for name, data in FILES.items()})],
)
def test_both_kinds_unpack_to_what_was_packed(archive: bytes, tmp_path: Path) -> None:
    sizes = unpack(archive, tmp_path)
    found = {
        str(path.relative_to(tmp_path)): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert found == {
        name: data.encode() if isinstance(data, str) else data for name, data in FILES.items()
    }
    assert sizes == {name: len(data) for name, data in FILES.items()}


def test_the_executable_bit_is_kept_and_no_other(tmp_path: Path) -> None:
    script = tar_entry("run.sh", tarfile.REGTYPE)
    script.mode = 0o6777
    unpack(tar_gz({"a.py": ""}, script), tmp_path)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run.sh", "a.py")] == [
        0o755,
        0o644,
    ]


@pytest.mark.parametrize(
    "name",
    [
        "../a.py",
        "a/../../b.py",
        "/etc/passwd",
        "a//b.py",
        "C:/a.py",
        "a\\b.py",
        "a\nb.py",
        "..",
        "x" * 300,
        "/".join("x" * 40),
        "a/" * 200,
    ],
)
def test_paths_that_lead_elsewhere_are_refused_in_both_kinds(name: str) -> None:
    for archive in (tar_gz({name: "x"}), zip_of({name: "x"})):
        if archive[:2] == b"PK" and (name.endswith("/") or "\\" in name):
            continue  # zipfile writes another name
        with pytest.raises(InvalidArchive):
            list(read_members(archive))


@pytest.mark.parametrize(
    "entry",
    [
        tar_entry("link.py", tarfile.SYMTYPE, "/etc/passwd"),
        tar_entry("link.py", tarfile.LNKTYPE, "a.py"),
        tar_entry("null", tarfile.CHRTYPE),
        tar_entry("disk", tarfile.BLKTYPE),
        tar_entry("pipe", tarfile.FIFOTYPE),
    ],
)
def test_links_and_devices_are_refused(entry: tarfile.TarInfo) -> None:
    with pytest.raises(InvalidArchive, match="neither a file nor a directory"):
        list(read_members(tar_gz({"a.py": ""}, entry)))


def test_a_link_in_a_zip_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("link.py")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(InvalidArchive, match="neither a file nor a directory"):
        list(read_members(buffer.getvalue()))


def test_a_name_that_stands_twice_is_refused() -> None:
    for extra in (tar_entry("mine/task.py", tarfile.REGTYPE), tar_entry("mine", tarfile.REGTYPE)):
        with pytest.raises(InvalidArchive, match="twice"):
            list(read_members(tar_gz(FILES, extra)))


@pytest.mark.parametrize("pack", [tar_gz, zip_of])
def test_bombs_are_refused(pack: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "MAX_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(code_archive, "_MAX_TAR_BYTES", 2 << 20)
    bomb = pack({"a.py": "", "zeros": bytes(50 << 20)})  # type: ignore[operator]
    assert len(bomb) < 1 << 20
    with pytest.raises(InvalidArchive, match="unpacks to more"):
        list(read_members(bomb))
    many = pack({f"{n}.py": bytes(300 << 10) for n in range(4)})  # type: ignore[operator]
    with pytest.raises(InvalidArchive, match="unpacks to more"):
        list(read_members(many))


def test_a_size_that_is_declared_too_small_is_not_believed() -> None:
    archive = bytearray(zip_of({"a.py": b"x" * 1000}))
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = archive.index(signature) + offset
        archive[place : place + 4] = (10).to_bytes(4, "little")
    with pytest.raises(InvalidArchive):
        list(read_members(bytes(archive)))


def test_a_name_that_is_empty_is_refused() -> None:
    broken = bytearray(zip_of({"a": "x"}))
    place = broken.index(b"PK\x01\x02") + 28
    broken[place : place + 2] = b"\x00\x00"
    with pytest.raises(InvalidArchive):
        list(read_members(bytes(broken)))


def test_too_many_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "MAX_FILES", 10)
    for pack in (tar_gz, zip_of):
        with pytest.raises(InvalidArchive, match="more than 10 files"):
            list(read_members(pack({f"{n}.py": "" for n in range(11)})))
    monkeypatch.setattr(code_archive, "_MAX_DIRECTORY_BYTES", 100)
    with pytest.raises(InvalidArchive, match="more than 10 files"):
        list(read_members(zip_of({f"{n}.py": "" for n in range(5)})))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"\x1f\x8b",
        b"not an archive",
        gzip.compress(b"not a tar" * 200),
        tar_gz({}),
        zip_of({}),
    ],
    ids=[
        "nothing",
        "zip's beginning",
        "gzip's beginning",
        "words",
        "gzip of no tar",
        "empty tar",
        "empty zip",
    ],
)
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArchive):
        list(read_members(data))


def test_an_archive_is_not_to_blame_for_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = partial(Path("/dev/full").open, "r+b", buffering=0)
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(StorageFull, match="No space left"):
        list(read_members(tar_gz({"task.py": ""})))


@given(st.sampled_from([tar_gz(FILES), zip_of(FILES)]), st.integers(0, 2**32), st.booleans())
def test_a_damaged_archive_is_refused_or_read_but_never_more(
    archive: bytes, seed: int, cut: bool
) -> None:
    draw = random.Random(seed)
    data = bytearray(archive)
    for _ in range(draw.randint(1, 8)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    if cut:
        del data[draw.randrange(len(data)) :]
    try:
        for member in read_members(bytes(data)):
            assert ".." not in member.path.split("/") and not member.path.startswith("/")
    except InvalidArchive:
        pass


# ---------------------------------------------------------------- names


def test_what_can_be_imported_by_which_name() -> None:
    github = [
        "proj-main/setup.py",
        "proj-main/src/mine/__init__.py",
        "proj-main/src/mine/task.py",
        "proj-main/notes/1.py",
    ]
    assert import_roots(github) == ("", "proj-main/", "proj-main/src/")
    assert modules(github) == ("mine", "mine.task", "setup")
    assert module_path(github, "mine.task") == "proj-main/src/mine/task.py"
    assert module_path(github, "mine") == "proj-main/src/mine/__init__.py"
    assert module_path(github, "task") is None
    package = ["mine/__init__.py", "mine/task.py"]
    assert (import_roots(package), modules(package)) == (("",), ("mine", "mine.task"))


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("everstep/task.py", "Everstep itself"),
        ("storage.py", "Everstep itself"),
        ("src/train_fn/__init__.py", "Everstep itself"),
        ("torch/__init__.py", "every rank imports"),
        ("ray.py", "every rank imports"),
        ("random.py", "standard library"),
        ("json/__init__.py", "standard library"),
    ],
)
def test_names_that_are_not_free(path: str, owner: str) -> None:
    [problem] = collisions([path, "mine/a.py"])
    assert owner in problem and problem.startswith(path.partition("/")[0])


def test_names_that_are_free() -> None:
    assert (
        collisions(
            ["mine/torch.py", "code/train.py", "utils.py", "tests/test_a.py", "model/random.py"]
        )
        == []
    )


# ---------------------------------------------------------------- stored


def test_code_is_stored_once_and_read_back_verified(tmp_path: Path) -> None:
    store = CodeStore(open_storage(str(tmp_path)))
    archive = tar_gz(FILES)
    stored = store.put(archive)
    assert stored == store.put(archive)
    assert stored.modules == ("mine", "mine.task") and stored.size_bytes == len(archive)
    [file] = (tmp_path / "code").iterdir()
    assert file.name == stored.digest.replace(":", "-")
    assert CodeStore(open_storage(str(tmp_path))).read(stored.digest) == archive
    file.write_bytes(archive[:-1])
    with pytest.raises(CorruptFile, match="upload the code again"):
        store.read(stored.digest)
    store.put(archive)
    assert store.read(stored.digest) == archive
    with pytest.raises(StorageNotFound):
        store.read("sha256:" + "0" * 64)
    with pytest.raises(InvalidStorage):
        store.read("sha256:../../token")


def test_code_of_no_use_is_not_stored(tmp_path: Path) -> None:
    store = CodeStore(open_storage(str(tmp_path)))
    for files, words in (
        ({"notes.txt": "x"}, "no Python module"),
        ({"ray/a.py": "", "os.py": ""}, "'ray' is reserved for"),
    ):
        with pytest.raises(InvalidArchive, match=words):
            store.put(tar_gz(files))  # type: ignore[arg-type]
    assert not (tmp_path / "code").exists()
