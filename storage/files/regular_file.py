"""Open files that other processes write: never wait for one, follow a link, or read beyond a limit.

Ranks run user code that can write to a run's directory. A FIFO in place of a journal would block
its reader for ever, a link would redirect it, and a sparse file of some terabytes costs nothing to
make.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Protocol

from storage.errors import FileTooLarge, LinkedFile, NotRegularFile

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


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None
) -> int:
    """Return a descriptor of a regular file, without waiting. It is an ``opener`` for ``open``,
    too.

    Raises LinkedFile, NotRegularFile, OSError.
    """
    try:
        fd = os.open(
            path,
            flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC,
            0o644,
            dir_fd=dir_fd,
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
