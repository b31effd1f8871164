"""A file of a checkpoint, hashed and counted while it is written."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from storage.checkpoints.manifest import FileEntry, new_hash
from storage.errors import StorageError
from storage.files.protocol import WriteStream

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_BESIDE_BYTES = 1 << 20
"""Blocks of at least this size are hashed in parallel to their write; for smaller ones the
hand-over costs more than it saves."""


_BUFFER_BYTES = 1 << 20


class _HashedStream(io.RawIOBase):
    """Hashes and counts a file's bytes on their way to the storage. Writes after a failed one are
    dropped."""

    def __init__(self, stream: WriteStream, hasher: Executor, on_write: Callable[[], None]) -> None:
        super().__init__()
        self._stream = stream
        self._hash = new_hash()
        self._hasher = hasher
        self._on_write = on_write
        self._size_bytes = 0
        self.spoilt = False
        """Whether some written bytes did not reach the storage."""
        self.problem: StorageError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        if self.spoilt:
            return len(view)
        # Hash a large block while it is written: both release the interpreter lock. Both must be
        # done on return, since neither copies the caller's memory.
        hashed = (
            self._hasher.submit(self._hash.update, view) if len(view) >= _BESIDE_BYTES else None
        )
        try:
            self._stream.write(view)
        except BaseException as exc:
            self.spoilt = True
            self.problem = exc if isinstance(exc, StorageError) else None
            raise
        finally:
            if hashed is not None:
                hashed.result()
        if hashed is None:
            self._hash.update(view)
        self._size_bytes += len(view)
        self._on_write()
        return len(view)

    def tell(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._stream.close()
        except BaseException:
            self.spoilt = True
            raise
        finally:
            super().close()

    def entry(self) -> FileEntry:
        return FileEntry(size_bytes=self._size_bytes, blake3=self._hash.hexdigest())


class CheckpointFile(io.BufferedWriter):
    """A binary file, hashed and counted as it is written. It is complete and durable once closed
    without an exception.

    Small writes are buffered: torch writes five per tensor, and their overhead was a third of a
    small save.
    """

    def __init__(
        self,
        stream: WriteStream,
        closed_whole: Callable[[FileEntry], None],
        hasher: Executor,
        on_write: Callable[[], None],
    ) -> None:
        self._bytes = _HashedStream(stream, hasher, on_write)
        self._closed_whole = closed_whole
        super().__init__(self._bytes, _BUFFER_BYTES)

    def close(self) -> None:
        """Make the file durable. After a StorageError it is not part of the checkpoint."""
        if self.closed:
            return
        super().close()
        if not self._bytes.spoilt:
            self._closed_whole(self._bytes.entry())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        self._bytes.spoilt = True
        with suppress(StorageError):  # the current exception says more
            self.close()
        problem = self._bytes.problem
        if problem is not None and exc is not problem:
            raise problem from exc  # torch.save only reports that a write failed
