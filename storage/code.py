"""Archives of user code, named by their digest: read within limits, and stored.

Imports the file system only.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from everstep.code import (
    DIGEST_PATTERN,
    MAX_ARCHIVE_BYTES,
    MAX_DEPTH,
    MAX_FILES,
    MAX_PATH_BYTES,
    MAX_UNPACKED_BYTES,
    collisions,
    modules,
)
from everstep.wire import base
from storage.errors import (
    CorruptFile,
    InvalidArchive,
    InvalidStorage,
    StorageFull,
    StorageNotFound,
    StorageUnreadable,
    from_foreign,
)
from storage.filesystem import Storage

# ---------------------------------------------------------------- archive

# Read untrusted archives of user code, file by file, within limits that no header can evade.

_BLOCK_BYTES = 1 << 20
_MAX_TAR_BYTES = MAX_UNPACKED_BYTES + MAX_FILES * 2048
"""Maximum size of a tar stream within the limits: the files, plus a header and padding for each."""
_MAX_DIRECTORY_BYTES = MAX_FILES * (MAX_PATH_BYTES + 256)
"""Maximum size of a zip file's directory within the limits. zipfile reads all of it before anything
can be counted."""
_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, OSError, ValueError, LookupError, ArithmeticError, RuntimeError),
)
"""Errors that Python's readers raise for malformed bytes."""


@dataclass(frozen=True)
class Member:
    """One file of an archive. ``path`` is relative, with ``/``, and does not lead outside."""

    path: str
    data: bytes
    executable: bool


def read_members(data: bytes) -> Iterator[Member]:
    """Yield every file of a zip or tar.gz, in the archive's order. Nothing is written.

    Raises InvalidArchive, at the latest at the end: for another format, a broken or too large
    archive, or entries other than files and directories with plain relative paths.
    """
    if len(data) > MAX_ARCHIVE_BYTES:
        raise InvalidArchive(
            f"the archive is larger than {MAX_ARCHIVE_BYTES >> 20} MiB; leave out data and weights"
        )
    checked = _Checked()
    try:
        if data[:2] == b"\x1f\x8b":
            yield from _tar_members(data, checked)
        elif data[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            yield from _zip_members(data, checked)
        else:
            raise InvalidArchive("the file is neither a zip nor a tar.gz archive")
    except _BROKEN as exc:
        error = from_foreign(exc, "unpack an archive in", tempfile.gettempdir())
        if isinstance(error, StorageFull | StorageUnreadable):  # not the archive's fault
            raise error from exc
        raise InvalidArchive(f"the archive is broken: {exc}") from exc
    if not checked.files:
        raise InvalidArchive("the archive contains no file")


def unpack(data: bytes, directory: Path) -> dict[str, int]:
    """Write every file below ``directory``, which must be empty. Return their sizes in bytes by
    path. Raises InvalidArchive."""
    sizes = {}
    for member in read_members(data):
        path = directory / member.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(member.data)
        path.chmod(0o755 if member.executable else 0o644)
        sizes[member.path] = len(member.data)
    return sizes


class _Checked:
    """Tracks what was read, and how much may still be."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._directories: set[str] = set()
        self._num_entries = 0
        self._bytes_left = MAX_UNPACKED_BYTES

    def path(self, name: str) -> str:
        """Return the path of a file's entry. Raises InvalidArchive."""
        self._count()
        path = _plain_path(name)
        parents = ["/".join(path.split("/")[:depth]) for depth in range(1, path.count("/") + 1)]
        if (
            path in self.files
            or path in self._directories
            or any(parent in self.files for parent in parents)
        ):
            raise InvalidArchive(f"the archive contains {path!r} twice")
        self.files.add(path)
        self._directories.update(parents)
        return path

    def directory(self, name: str) -> None:
        self._count()
        if name.strip("./"):
            _plain_path(name.rstrip("/"))

    def read(self, stream: IO[bytes], path: str, declared_bytes: int) -> bytes:
        """Return a file's bytes. Reads no more than the limits allow, whatever the header
        declares."""
        if declared_bytes > self._bytes_left:
            raise InvalidArchive(_too_large(path))
        content = stream.read(declared_bytes + 1) if declared_bytes else b""
        if len(content) != declared_bytes:
            much = "more" if len(content) > declared_bytes else "less"
            raise InvalidArchive(
                f"the archive is broken: {path!r} has {much} than the {declared_bytes} bytes that "
                "it declares"
            )
        self._bytes_left -= len(content)
        return content

    def _count(self) -> None:
        self._num_entries += 1
        if self._num_entries > MAX_FILES:
            raise InvalidArchive(
                f"the archive contains more than {MAX_FILES} files and directories; leave out data"
            )


def _plain_path(name: str) -> str:
    """Return ``name`` without leading ``./``. Raises InvalidArchive for a path that leads outside,
    or that systems interpret differently."""
    parts = [part for part in name.split("/") if part != "."]
    path = "/".join(parts)
    if base.fault_of(path) or name[1:2] == ":" or not name.isprintable():
        raise InvalidArchive(
            f"the archive contains {name[:200]!r}; use relative paths without .., backslashes or "
            "control characters"
        )
    if len(parts) > MAX_DEPTH or len(path.encode()) > MAX_PATH_BYTES:
        raise InvalidArchive(
            f"the archive contains a path that is too long or too deep: {path[:80]!r}…"
        )
    return path


def _too_large(path: str) -> str:
    return (
        f"the archive unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB (at {path!r}); leave out "
        "data and weights"
    )


def _tar_members(data: bytes, checked: _Checked) -> Iterator[Member]:
    with tempfile.TemporaryFile() as plain:
        _gunzip(data, plain)
        plain.seek(0)
        with tarfile.open(fileobj=plain, mode="r:") as tar:
            for info in tar:
                if info.isdir():
                    checked.directory(info.name)
                    continue
                if not info.isreg() or info.issparse():
                    raise InvalidArchive(
                        f"the archive contains {info.name[:200]!r}, which is neither a file nor a "
                        "directory"
                    )
                path = checked.path(info.name)
                stream = tar.extractfile(info)
                assert stream is not None
                yield Member(path, checked.read(stream, path, info.size), bool(info.mode & 0o100))


def _gunzip(data: bytes, plain: IO[bytes]) -> None:
    """Decompress into a file, so that a tar header cannot make the reader allocate more memory than
    there are bytes."""
    size_bytes = 0
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        while block := stream.read(_BLOCK_BYTES):
            size_bytes += len(block)
            if size_bytes > _MAX_TAR_BYTES:
                raise InvalidArchive(_too_large("its end"))
            plain.write(block)


def _zip_members(data: bytes, checked: _Checked) -> Iterator[Member]:
    _check_directory(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            if info.filename.startswith("__MACOSX/"):  # macOS adds metadata of each file
                continue
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                checked.directory(info.filename)
                continue
            if kind not in (0, stat.S_IFREG):
                raise InvalidArchive(
                    f"the archive contains {info.filename[:200]!r}, which is neither a file nor a "
                    "directory"
                )
            if info.flag_bits & 0x1:
                raise InvalidArchive(
                    f"{info.filename[:200]!r} is encrypted; send an archive without a password"
                )
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise InvalidArchive(
                    f"{info.filename[:200]!r} is not compressed with deflate; compress it again"
                )
            path = checked.path(info.filename)
            with archive.open(info) as stream:
                yield Member(
                    path,
                    checked.read(stream, path, info.file_size),
                    bool(info.external_attr >> 16 & 0o100),
                )


def _check_directory(data: bytes) -> None:
    """Refuse a directory over the limits, before zipfile creates an object for each entry."""
    end = data.rfind(b"PK\x05\x06")
    if end < 0 or len(data) < end + 22:
        raise InvalidArchive("the archive is broken: its directory is missing")
    if data[max(0, end - 20) : end].startswith(b"PK\x06\x07"):
        raise InvalidArchive("the archive is a zip64; pack fewer or smaller files")
    [size_bytes] = struct.unpack_from("<L", data, end + 12)
    if size_bytes > _MAX_DIRECTORY_BYTES:
        raise InvalidArchive(
            f"the archive contains more than {MAX_FILES} files and directories; leave out data"
        )


# ---------------------------------------------------------------- store

# Store uploaded code: archives named by their digest, so that each is stored once and every node
# can fetch it.


@dataclass(frozen=True)
class StoredCode:
    """Digest, size and modules of an archive."""

    digest: str
    """``sha256:`` and 64 hex digits, over the archive's bytes."""
    size_bytes: int
    modules: tuple[str, ...]
    """Dotted names that can be imported from it."""


class CodeStore:
    """Archives in ``STORAGE/code/sha256-…``. A file is written whole or not at all, and never
    changes."""

    def __init__(self, storage: Storage) -> None:
        self._files = storage.files

    def put(self, data: bytes) -> StoredCode:
        """Store an archive, unless it exists. Raises InvalidArchive if it is unsafe or has no
        module."""
        looked_at = look_at(data)
        self.keep(looked_at, data)
        return looked_at

    def keep(self, looked_at: StoredCode, data: bytes) -> None:
        """Store the bytes of an archive that ``look_at`` has checked."""
        if not self._holds(looked_at.digest):
            self._files.write(_path(looked_at.digest), data)

    def read(self, digest: str) -> bytes:
        """Return the archive's bytes, verified. Raises StorageNotFound; CorruptFile if the digest
        differs."""
        path = _path(digest)
        data = self._files.read(path, MAX_ARCHIVE_BYTES)
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if found != digest:
            raise CorruptFile(
                f"{self._files.path(path)} has the digest {found}; upload the code again to "
                "replace it"
            )
        return data

    def _holds(self, digest: str) -> bool:
        try:
            self.read(digest)
        except (StorageNotFound, CorruptFile):
            return False
        return True


def look_at(data: bytes) -> StoredCode:
    """Return digest, size and modules of an archive, without storing it. Raises InvalidArchive if
    it is unsafe or has no module."""
    paths = {member.path for member in read_members(data)}
    if problems := collisions(paths):
        raise InvalidArchive("; ".join(problems))
    names = modules(paths)
    if not any(path.endswith(".py") for path in paths):
        raise InvalidArchive(
            "the archive contains no Python module; pack the directory that contains yours"
        )
    return StoredCode(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data), names)


def _path(digest: str) -> str:
    if not re.fullmatch(DIGEST_PATTERN, digest):
        raise InvalidStorage(f"{digest!r} is not a digest of code; write sha256: and 64 hex digits")
    return f"code/{digest.replace(':', '-')}"
