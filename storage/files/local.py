"""A directory of a mounted filesystem. POSIX renames and fsync make writes atomic and durable."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import stat
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from storage.errors import CorruptFile, StorageError, StorageNotFound, mapped
from storage.files.protocol import (
    READ_LIMIT_BYTES,
    Entry,
    ReadStream,
    draft_beside,
    linked,
    open_regular,
    read_whole,
)

_MAX_ENTRIES = 100_000
"""Maximum number of names in a directory of a run."""
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


def _is_dir(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


class LocalFiles:
    """Files below a local directory, which is created on the first write.

    Paths are plain text: a save uses forty of them, and making a ``Path`` of each costs as much as
    the call itself.
    """

    can_append = True

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._prefix = os.path.join(self._root, "")
        self._places: dict[str, str] = {}
        """Real paths of the directories below the root: an operator may have replaced one by a
        link."""

    def path(self, relpath: str) -> str:
        return self._prefix + relpath if relpath not in ("", ".") else self._root

    def exists(self, relpath: str) -> bool:
        path = self.path(relpath)
        try:
            with mapped("access", path):
                # os.path hides EACCES and EIO
                return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
        except StorageNotFound:
            return False

    def read(self, relpath: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        path = self.path(relpath)
        with mapped("read", path), open(path, "rb", buffering=0, opener=open_regular) as file:
            self._refuse_outside(file.fileno(), relpath)
            return read_whole(file, path, os.fstat(file.fileno()).st_size, limit_bytes)

    def open_read(self, relpath: str, offset: int = 0) -> ReadStream:
        path = self.path(relpath)
        with mapped("read", path):
            file: BinaryIO = open(path, "rb", buffering=0, opener=open_regular)  # noqa: SIM115 - the caller closes it
            try:
                self._refuse_outside(file.fileno(), relpath)
            except StorageError:
                file.close()
                raise
            file.seek(offset)
            return cast(ReadStream, file)

    def _refuse_outside(self, fd: int, relpath: str) -> None:
        """Refuse a file or directory reached through a link that leads out of the storage, or into
        another run's directory.

        User code can write to the storage, and readers such as the service have more permissions.
        The check uses the open descriptor, which nobody can replace. Raises LinkedFile.
        """
        if sys.platform != "linux":
            return
        top, _, rest = relpath.partition("/")
        if not rest:
            return  # the root and its entries belong to the operator
        place = self._places.get(top)
        if place is None:
            place = self._places[top] = os.path.realpath(self.path(top))
        own, _, deeper = rest.partition("/")
        if deeper:
            place = f"{place}/{own}"
        found = os.readlink(f"/proc/self/fd/{fd}")
        if found != place and not found.startswith(f"{place}/"):
            raise linked(self.path(relpath), found)

    def list(self, relpath: str) -> list[Entry]:
        path = self.path(relpath)
        try:
            with mapped("list", path):
                return self._entries(path, relpath)
        except StorageNotFound:
            return []

    def _entries(self, path: str, relpath: str) -> builtins.list[Entry]:
        """Return the sorted entries of a directory. Raises LinkedFile, OSError; CorruptFile for
        more names than any run needs."""
        in_run = "/" in relpath
        if in_run and os.path.islink(path):
            raise linked(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._refuse_outside(fd, relpath)
            with os.scandir(fd) as entries:
                found = [
                    Entry(entry.name, entry.is_dir())
                    for entry in islice(entries, _MAX_ENTRIES + 1 if in_run else None)
                ]
        finally:
            os.close(fd)
        if in_run and len(found) > _MAX_ENTRIES:
            raise CorruptFile(
                f"{path} has more than {_MAX_ENTRIES} entries, the limit; remove the surplus files"
            )
        return sorted(found)

    def write(self, relpath: str, data: bytes) -> None:
        path = self.path(relpath)
        self.make_dir(os.path.dirname(relpath))
        with mapped("write", path), draft_beside(path) as draft:
            self._write_synced(draft, data, os.O_CREAT | os.O_EXCL, relpath)
            os.replace(draft, path)
            sync_path(os.path.dirname(path))

    def create_new(self, relpath: str, data: bytes) -> bool:
        path = self.path(relpath)
        self.make_dir(os.path.dirname(relpath))
        with mapped("create", path), draft_beside(path) as draft:
            self._write_synced(draft, data, os.O_CREAT | os.O_EXCL, relpath)
            try:
                # a link fails if the file exists, unlike a rename; readers never see half of a file
                os.link(draft, path)
            except FileExistsError:
                return self.read(relpath) == data
            except OSError as exc:
                if exc.errno not in _NO_LINKS:
                    raise
                return self._create_in_place(relpath, data)
            sync_path(os.path.dirname(path))
        return True

    def _create_in_place(self, relpath: str, data: bytes) -> bool:
        """Create the file as ``create_new`` on a filesystem without hard links. A reader may
        briefly see half of it."""
        path = self.path(relpath)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            return self.read(relpath) == data
        try:
            self._write_synced(path, data, 0, relpath)
        except BaseException:
            os.unlink(path)  # half of a file would count as somebody's claim
            raise
        sync_path(os.path.dirname(path))
        return True

    def create(self, relpath: str) -> SyncedFile:
        self.make_dir(os.path.dirname(relpath))
        return SyncedFile(self.path(relpath))

    def touch(self, relpath: str) -> None:
        path = self.path(relpath)
        with mapped("create", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def make_dir(self, relpath: str) -> None:
        path = self.path(relpath)
        with mapped("make the directory", path):
            if _is_dir(path):
                return
            missing = [path]
            while not os.path.exists(parent := os.path.dirname(missing[-1])):
                missing.append(parent)
            for directory in reversed(missing):
                try:
                    os.mkdir(directory)
                except FileExistsError:
                    if not _is_dir(directory):  # else somebody made it meanwhile
                        raise
                sync_path(os.path.dirname(directory))

    def sync_dir(self, relpath: str) -> None:
        path = self.path(relpath)
        with mapped("sync", path):
            sync_path(path)

    def set_aside(self, relpath: str, aside: str) -> bool:
        path = self.path(relpath)
        try:
            with mapped("rename", path):
                os.rename(path, self.path(aside))
                sync_path(os.path.dirname(path))
        except StorageNotFound:
            return False
        return True

    def promote(self, marker: str, relpath: str, data: bytes) -> bool:
        # The marker is the temporary file itself, opened without O_CREAT and then renamed. If it
        # was removed meanwhile, one of the two fails: a replaced writer cannot commit. Renaming a
        # directory over a non-empty one fails: of several writers one commits.
        (begun, _), (directory, name) = (
            os.path.split(self.path(marker)),
            os.path.split(self.path(relpath)),
        )
        try:
            with mapped("commit", f"{directory}/{name}"):
                self._write_synced(self.path(marker), data, os.O_TRUNC, marker)
                os.replace(self.path(marker), f"{begun}/{name}")
                sync_path(begun)
                try:
                    os.rename(begun, directory)
                except OSError as exc:
                    if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        return False
                    raise
                sync_path(os.path.dirname(directory))
        except StorageNotFound:
            return False
        return True

    def delete_file(self, relpath: str) -> None:
        path = self.path(relpath)
        try:
            with mapped("delete", path):
                os.unlink(path)
                sync_path(os.path.dirname(path))
        except StorageNotFound:
            return

    def delete_dir(self, relpath: str) -> None:
        path = self.path(relpath)
        with mapped("delete", path):
            while _is_dir(path):
                # another process may delete files in it at the same time
                with suppress(FileNotFoundError):
                    shutil.rmtree(path)

    def _write_synced(self, path: str, data: bytes, flags: int, relpath: str) -> None:
        fd = open_regular(path, os.O_WRONLY | flags)
        try:
            self._refuse_outside(fd, relpath)
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)


# ---------------------------------------------------------------- synced file

# A new local file that is durable once it is closed.

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
