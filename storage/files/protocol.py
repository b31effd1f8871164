"""What storage asks of a filesystem: the seam between a run's layout and where its bytes lie."""

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
    """Files below a root; every path is relative to it, with ``/``. All methods raise StorageError,
    nothing else."""

    @property
    def can_append(self) -> bool:
        """Whether a file can grow after it was closed. Only local filesystems can."""

    def path(self, relpath: str) -> str:
        """The path as the filesystem itself names it."""

    def exists(self, relpath: str) -> bool:
        """Whether there is such a file. Never lists."""

    def read(self, relpath: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        """Return the whole file. Raises StorageNotFound, NotRegularFile, FileTooLarge. Never lists,
        never waits for a writer."""

    def open_read(self, relpath: str, offset: int = 0) -> ReadStream:
        """Stream a file from a byte on. Raises StorageNotFound, NotRegularFile."""

    def list(self, relpath: str) -> list[Entry]:
        """Names directly below a directory, sorted; none where there is no such directory."""

    def write(self, relpath: str, data: bytes) -> None:
        """Create or replace a small file at once: readers see the old one or the new one. Durable
        on return."""

    def create_new(self, relpath: str, data: bytes) -> bool:
        """Create a small file, unless there is one: False, and nothing has happened. Of several
        that try at once one succeeds.

        A try whose answer was lost counts as successful where the file holds just ``data``. Durable
        on return.
        """

    def create(self, relpath: str) -> WriteStream:
        """Begin a new file, which must not exist yet where the filesystem can tell."""

    def touch(self, relpath: str) -> None:
        """Make a new empty file in a directory that is made for it. Neither survives a crash of the
        machine until it is synced."""

    def make_dir(self, relpath: str) -> None:
        """Make a directory and its parents durably, where directories are a thing."""

    def sync_dir(self, relpath: str) -> None:
        """Make the names in a directory durable, where that is a thing."""

    def set_aside(self, relpath: str, aside: str) -> bool:
        """Rename a directory at once; False where nothing is there or renames are not a thing."""

    def promote(self, marker: str, relpath: str, data: bytes) -> bool:
        """Write ``data`` as ``relpath``, which must not exist, provided that ``marker`` still
        exists, which it uses up; else False.

        The directory of ``marker`` becomes that of ``relpath``, with all in it. Only where
        directories can be renamed.
        """

    def delete_file(self, relpath: str) -> None:
        """Durably; nothing happens where there is no such file."""

    def delete_dir(self, relpath: str) -> None:
        """With all in it, not durably; nothing happens where there is no such directory."""
