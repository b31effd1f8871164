"""The interface to a filesystem, on which the layout of runs is built."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from storage.files.regular_file import READ_LIMIT_BYTES


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
