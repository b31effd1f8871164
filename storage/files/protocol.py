"""The interface to a filesystem, on which the layout of runs is built."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from storage.errors import FileTooLarge, LinkedFile, NotRegularFile

# ---------------------------------------------------------------- draft

# Write a file under a temporary name and then move it into place, so that nobody reads half of
# it.


@contextmanager
def draft_beside(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the name of a hidden file beside ``path``, to write and then rename or link to
    ``path``.

    The file is removed at the end in any case: a draft never outlives a failed write.
    """
    directory, name = os.path.split(path)
    draft = os.path.join(directory, f".{name}.{secrets.token_hex(6)}.tmp")
    try:
        yield draft
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)


# ---------------------------------------------------------------- regular file

# Open files that other processes write: never wait for one, follow a link, or read beyond a limit.
#
# Ranks run user code that can write to a run's directory. A FIFO in place of a journal would block
# its reader for ever, a link would redirect it, and a sparse file of some terabytes costs nothing
# to make.

READ_LIMIT_BYTES = 16 << 20
"""Maximum size of a file that is read whole, unless the reader sets another limit."""
_BLOCK_BYTES = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, without waiting. It is an ``opener`` for ``open``,
    too.

    Raises LinkedFile, NotRegularFile, OSError.
    """
    try:
        fd = os.open(
            path,
            flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC,
            0o644,
        )
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise linked(path) from exc
        if exc.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a FIFO that nobody reads
            raise NotRegularFile(
                f"{os.fspath(path)} is a FIFO, a socket or a device, not a regular file; remove it"
            ) from exc
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise NotRegularFile(f"{os.fspath(path)} is {kind}, not a regular file; remove it")


def linked(path: str | os.PathLike[str], target: str | None = None) -> LinkedFile:
    """Return the error for a link in place of a file."""
    if target is None:
        try:
            target = str(Path(path).readlink())
        except OSError:
            target = "somewhere else"
    words = (
        f"leads out of the storage, or to files of another run: it is a link to {target}; remove it"
    )
    return LinkedFile(f"{os.fspath(path)} {words}")


def read_whole(stream: _Reader, path: str, size_bytes: int, limit_bytes: int) -> bytes:
    """Return all bytes of an open file. Raises FileTooLarge if it is over the limit, before or
    during reading."""
    if size_bytes > limit_bytes:
        raise FileTooLarge(path, size_bytes, limit_bytes)
    data = stream.read(size_bytes + 1)
    if len(data) <= size_bytes:
        return data
    parts, left_bytes = [data], limit_bytes - len(data)  # it grew meanwhile
    while left_bytes >= 0 and (block := stream.read(min(_BLOCK_BYTES, left_bytes + 1))):
        parts.append(block)
        left_bytes -= len(block)
    if left_bytes < 0:
        raise FileTooLarge(path, limit_bytes - left_bytes, limit_bytes)
    return b"".join(parts)


# ---------------------------------------------------------------- protocol


@dataclass(frozen=True, order=True)
class Entry:
    """A name in a directory."""

    name: str
    is_dir: bool


class ReadStream(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class WriteStream(Protocol):
    def write(self, data: bytes | memoryview, /) -> int: ...

    def close(self) -> None:
        """Complete the file, and make it durable if the filesystem can."""


class Files(Protocol):
    """Files below a root. Paths are relative to it, with ``/``. Methods raise only StorageError."""

    @property
    def can_append(self) -> bool:
        """Return whether a closed file can grow. Only local filesystems can."""

    def path(self, relpath: str) -> str:
        """Return the path in the filesystem's own form."""

    def exists(self, relpath: str) -> bool:
        """Return whether the file exists. Never lists."""

    def read(self, relpath: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        """Return the whole file. Raises StorageNotFound, NotRegularFile, FileTooLarge. Never lists,
        never waits for a writer."""

    def open_read(self, relpath: str, offset: int = 0) -> ReadStream:
        """Open a file for reading from an offset. Raises StorageNotFound, NotRegularFile."""

    def list(self, relpath: str) -> list[Entry]:
        """Return the names in a directory, sorted; empty if it does not exist."""

    def write(self, relpath: str, data: bytes) -> None:
        """Create or replace a small file atomically: readers see the old or the new content.
        Durable on return."""

    def create_new(self, relpath: str, data: bytes) -> bool:
        """Create a small file. Return False, and do nothing, if it exists. Of several simultaneous
        calls one succeeds.

        If the response to a call was lost, it counts as successful if the file contains exactly
        ``data``. Durable on return.
        """

    def create(self, relpath: str) -> WriteStream:
        """Start a new file. It must not exist, if the filesystem can check that."""

    def touch(self, relpath: str) -> None:
        """Create an empty file in a new directory. Neither survives a crash of the machine before
        it is synced."""

    def make_dir(self, relpath: str) -> None:
        """Create a directory and its parents durably, if the filesystem has directories."""

    def sync_dir(self, relpath: str) -> None:
        """Make the names in a directory durable, if the filesystem has directories."""

    def set_aside(self, relpath: str, aside: str) -> bool:
        """Rename a directory atomically. Return False if it does not exist, or the filesystem
        cannot rename."""

    def promote(self, marker: str, relpath: str, data: bytes) -> bool:
        """Write ``data`` as ``relpath``, which must not exist, if ``marker`` still exists, and
        consume the marker; else return False.

        The directory of ``marker``, with all its content, becomes that of ``relpath``. Only where
        directories can be renamed.
        """

    def delete_file(self, relpath: str) -> None:
        """Delete a file durably if it exists."""

    def delete_dir(self, relpath: str) -> None:
        """Delete a directory with all its content if it exists. Not durable."""
