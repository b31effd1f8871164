"""A new local file that is durable once it is closed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from storage.errors import mapped

_WRITE_BACK_BYTES = 8 << 20


def sync_path(path: str | Path) -> None:
    """fsync a file or a directory by path."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes; os.write may write fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class SyncedFile:
    """A new file. ``close`` makes its bytes durable; the caller syncs the directory entry.

    Writing dirty pages back starts with each write. Otherwise a whole checkpoint would wait in
    memory for the final fsync while the medium is idle.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset_bytes = 0
        with mapped("create", path):
            self._fd: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
            )

    def write(self, data: bytes | memoryview, /) -> int:
        assert self._fd is not None
        view = memoryview(data).cast("B")
        written = 0
        with mapped("write", self._path):
            while written < len(view):
                count = os.write(self._fd, view[written : written + _WRITE_BACK_BYTES])
                # starts the write-back of these dirty pages; drops only clean ones
                if sys.platform == "linux":
                    os.posix_fadvise(self._fd, self._offset_bytes, count, os.POSIX_FADV_DONTNEED)
                self._offset_bytes += count
                written += count
        return written

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with mapped("write", self._path):
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
