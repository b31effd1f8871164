"""What storage needs of a filesystem: the interface between a run's layout and its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from storage.files.regular_file import READ_LIMIT_BYTES


@dataclass(frozen=True, order=True)
class Entry:
    """One name in a directory."""

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
        """Make the file whole, and durable where the filesystem can promise that."""


class Files(Protocol):
    """Files below a root. Every path is relative to it, with ``/``. All methods raise StorageError,
    nothing else."""

    @property
    def can_append(self) -> bool:
        """Return whether a file can grow after it was closed. Only local filesystems can."""

    def path(self, relpath: str) -> str:
        """Return the path as the filesystem itself names it."""

    def exists(self, relpath: str) -> bool:
        """Return whether there is such a file. Never lists."""

    def read(self, relpath: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        """Return the whole file. Raises StorageNotFound, NotRegularFile, FileTooLarge. Never lists,
        never waits for a writer."""

    def open_read(self, relpath: str, offset: int = 0) -> ReadStream:
        """Open a file for reading from a byte on. Raises StorageNotFound, NotRegularFile."""

    def list(self, relpath: str) -> list[Entry]:
        """Return the names directly below a directory, sorted; none where there is no such
        directory."""

    def write(self, relpath: str, data: bytes) -> None:
        """Create or replace a small file at once: readers see the old one or the new one. Durable
        on return."""

    def create_new(self, relpath: str, data: bytes) -> bool:
        """Create a small file. Return False, and do nothing, if it exists. Of several simultaneous
        calls one succeeds.

        A call whose reply was lost counts as successful if the file holds just ``data``. Durable on
        return.
        """

    def create(self, relpath: str) -> WriteStream:
        """Begin a new file, which must not exist yet where the filesystem can tell."""

    def touch(self, relpath: str) -> None:
        """Create an empty file in a new directory. Neither survives a crash of the machine until it
        is synced."""

    def make_dir(self, relpath: str) -> None:
        """Create a directory and its parents durably, where the filesystem has directories."""

    def sync_dir(self, relpath: str) -> None:
        """Make the names in a directory durable, where the filesystem has directories."""

    def set_aside(self, relpath: str, aside: str) -> bool:
        """Rename a directory at once; False where it does not exist, or the filesystem cannot
        rename."""

    def promote(self, marker: str, relpath: str, data: bytes) -> bool:
        """Write ``data`` as ``relpath``, which must not exist, if ``marker`` still exists, and use
        the marker up; else return False.

        The directory of ``marker`` becomes that of ``relpath``, with all in it. Only where
        directories can be renamed.
        """

    def delete_file(self, relpath: str) -> None:
        """Delete a file durably, if it exists."""

    def delete_dir(self, relpath: str) -> None:
        """Delete a directory with all in it, not durably, if it exists."""
