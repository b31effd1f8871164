"""A checkpoint's file that is verified while a reader loads it into memory."""

from __future__ import annotations

import heapq
import io
from types import TracebackType
from typing import TYPE_CHECKING, Self

from storage.checkpoints.manifest import FileEntry
from storage.errors import CorruptCheckpoint, StorageError, mapped

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_SMALL_BYTES = 16 << 10
"""Shorter reads are copied and compared later, because readers seek for them: a zip file's
directory is at its end."""
_BLOCK_BYTES = 512 << 10
"""Hashed in blocks that are still in the processor's cache."""


class VerifiedFile(io.RawIOBase):
    """A file for use in a ``with``. Trust what was read only after the block ended without an
    exception.

    Every byte is read once and hashed in the reader's buffer. This requires large reads at
    increasing offsets, as torch.load does. ``came_back`` is True if a reader seeked back and got
    bytes that were not verified.
    """

    def __init__(self, stream: io.FileIO, checkpoint: str, relpath: str, entry: FileEntry) -> None:
        super().__init__()
        self._stream, self._checkpoint, self._relpath, self._entry = (
            stream,
            checkpoint,
            relpath,
            entry,
        )
        self._hash = entry.new_hash()
        self._at = 0
        """Offset of the reader."""
        self._hashed_bytes = 0
        """Everything before this offset is hashed."""
        self._ahead: list[tuple[int, bytes]] = []
        """Data read beyond that offset: a heap of (offset, bytes)."""
        self._scratch = bytearray(_BLOCK_BYTES)
        self._problem: StorageError | None = None
        self.came_back = False
        size_bytes = stream.seek(0, io.SEEK_END)
        if size_bytes != entry.size_bytes:
            stream.close()
            raise CorruptCheckpoint(
                checkpoint, relpath, f"{entry.size_bytes} bytes", f"{size_bytes} bytes"
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = (
            offset
            + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size_bytes}[whence]
        )
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._entry.size_bytes - self._at)]
        try:
            if self._at < self._hashed_bytes:
                self.came_back = True
                self._fill(view, self._at)
            elif len(view) < _SMALL_BYTES:
                self._fill(view, self._at)
                heapq.heappush(self._ahead, (self._at, bytes(view)))
            else:
                self._hash_up_to(self._at)
                for start in range(0, len(view), _BLOCK_BYTES):
                    block = view[start : start + _BLOCK_BYTES]
                    self._fill(block, self._hashed_bytes)
                    self._take(block)
        except StorageError as exc:
            self._problem = exc
            raise
        self._at += len(view)
        return len(view)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Compare the digest. Raises StorageError; CorruptCheckpoint, also in place of a reader's
        error that damaged bytes caused."""
        try:
            if kind is not None and not issubclass(kind, Exception):
                return
            if self._problem is not None:
                raise self._problem from exc  # readers in C++ only report that a read failed
            self._hash_up_to(self._entry.size_bytes)
            if (found := self._entry.digest_of(self._hash)) != self._entry.digest:
                raise self._corrupt(self._entry.digest, found) from exc
        finally:
            self.close()

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _hash_up_to(self, offset: int) -> None:
        while (missing := offset - self._hashed_bytes) > 0:
            block = memoryview(self._scratch)[:missing]
            self._fill(block, self._hashed_bytes)
            self._take(block)

    def _fill(self, view: memoryview, offset: int) -> None:
        with mapped("read", str(self._stream.name)):
            self._stream.seek(offset)
            while view:
                count = self._stream.readinto(view)
                if not count:
                    raise self._corrupt(f"{self._entry.size_bytes} bytes", "fewer")
                view = view[count:]

    def _take(self, block: memoryview) -> None:
        """Hash the next bytes of the file, and compare them with parts that were read before."""
        self._hash.update(block)
        begin, end = self._hashed_bytes, self._hashed_bytes + len(block)
        while self._ahead and self._ahead[0][0] < end:
            offset, data = heapq.heappop(self._ahead)
            if data[: end - offset] != block[offset - begin : offset - begin + len(data)]:
                raise self._corrupt("the same bytes on every read", "different ones")
            if offset + len(data) > end:
                heapq.heappush(self._ahead, (end, data[end - offset :]))
        self._hashed_bytes = end

    def _corrupt(self, expected: str, found: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(self._checkpoint, self._relpath, expected, found)
