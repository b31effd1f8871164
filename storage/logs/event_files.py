"""TensorBoard's event files in a run's directory.

Their bytes depend only on the journals: a writer that takes over from a dead one writes the same
bytes to the same places.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from storage.errors import StorageNotFound, mapped
from storage.files.protocol import open_regular
from storage.run_dir import RunDir

PART_BYTES = 1 << 20
"""Size at which the next object starts; an object cannot grow and is written whole."""


class EventFile(Protocol):
    """Records of one submission, in order from the first."""

    def add(self, size_bytes: int) -> bool:
        """Reserve room for the next record. Return whether the caller must ``put`` it because it is
        not stored yet."""

    def put(self, record: bytes) -> None:
        """Add the bytes of the record that room was reserved for."""

    def flush(self) -> None:
        """Make added records visible. Raises StorageError: call it again later."""


def open_event_file(run_dir: RunDir, name: str, header: bytes) -> EventFile:
    """Open a file at its first record, whether or not it exists.

    Args:
        name: name of the file; if files cannot grow, numbers of parts follow it.
        header: first record of every file.
    """
    if run_dir.files.can_append:
        return GrowingEventFile(run_dir, name, header)
    return PartedEventFile(run_dir, name, header)


class GrowingEventFile:
    """One file that grows. Stored records are skipped, and a torn one is written again in place."""

    def __init__(self, run_dir: RunDir, name: str, header: bytes) -> None:
        self._path = run_dir.tensorboard_path(name)
        self._files = run_dir.files
        local = Path(self._files.path(self._path))
        self._there_bytes = 0
        with suppress(StorageNotFound), mapped("access", str(local)):
            self._there_bytes = local.lstat().st_size
        self._local = local
        self._end_bytes = 0
        self._waiting = bytearray()
        if self.add(len(header)):
            self.put(header)

    def add(self, size_bytes: int) -> bool:
        self._end_bytes += size_bytes
        return self._end_bytes > self._there_bytes

    def put(self, record: bytes) -> None:
        self._waiting += record

    def flush(self) -> None:
        if not self._waiting:
            return
        self._files.make_dir(str(Path(self._path).parent))
        with mapped("write", str(self._local)):
            fd = open_regular(self._local, os.O_WRONLY | os.O_CREAT)
            try:
                view, at = memoryview(self._waiting), self._end_bytes - len(self._waiting)
                while view:
                    written = os.pwrite(fd, view, at)
                    view, at = view[written:], at + written
            finally:
                os.close(fd)
        self._waiting = bytearray()


class PartedEventFile:
    """Objects NAME.000001, NAME.000002, …; the last one is written again as it grows."""

    def __init__(self, run_dir: RunDir, name: str, header: bytes) -> None:
        self._run_dir = run_dir
        self._name = name
        self._header = header
        directory = run_dir.tensorboard_path("").rstrip("/")
        there = [
            entry.name
            for entry in run_dir.files.list(directory)
            if entry.name.startswith(f"{name}.")
        ]
        self._num_sealed = max((int(each.rpartition(".")[2]) for each in there), default=1) - 1
        self._number = 1
        self._size_bytes = len(header)
        self._full: list[tuple[int, bytes]] = []
        self._part = bytearray(header)
        self._changed = True

    def add(self, size_bytes: int) -> bool:
        if self._size_bytes >= PART_BYTES:
            if self._number > self._num_sealed:
                self._full.append((self._number, bytes(self._part)))
            self._number += 1
            self._part, self._size_bytes = bytearray(self._header), len(self._header)
        self._size_bytes += size_bytes
        return self._number > self._num_sealed

    def put(self, record: bytes) -> None:
        self._part += record
        self._changed = True

    def flush(self) -> None:
        while self._full:
            self._write(*self._full[0])
            self._full.pop(0)
        if self._changed and self._number > self._num_sealed:
            self._write(self._number, bytes(self._part))
            self._changed = False

    def _write(self, number: int, data: bytes) -> None:
        self._run_dir.files.write(
            self._run_dir.tensorboard_path(f"{self._name}.{number:06d}"), data
        )
