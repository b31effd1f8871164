"""Writing one checkpoint: files first, each hashed as it is written, then the manifest, which commits them."""

from __future__ import annotations

import io
import math
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Self

from everstep import relative_names
from storage.errors import CheckpointExists, CheckpointReplaced, InvalidStorage, StorageError
from storage.files import Files, WriteStream
from storage.manifest import MANIFEST, FileEntry, Manifest, new_hash
from storage.run_dir import CheckpointName, RunDir

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BESIDE_BYTES = 1 << 20
"""Blocks from this size on are hashed beside their write; for smaller ones handing over costs more than it saves."""
_BUFFER_BYTES = 1 << 20


class _HashedStream(io.RawIOBase):
    """A file's bytes on their way to the storage: hashed and counted. What follows a failed write is dropped."""

    def __init__(self, stream: WriteStream, hasher: Executor, on_write: Callable[[], None]) -> None:
        super().__init__()
        self._stream = stream
        self._hash = new_hash()
        self._hasher = hasher
        self._on_write = on_write
        self._size_bytes = 0
        self.spoilt = False
        """Whether not all that was written got there."""
        self.problem: StorageError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        if self.spoilt:
            return len(view)
        # The digest of a large block is taken while it is written: both let go of the interpreter. Neither keeps the caller's
        # memory, so both must be done on return.
        hashed = self._hasher.submit(self._hash.update, view) if len(view) >= _BESIDE_BYTES else None
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
    """A binary file that is hashed and counted as it is written; whole and durable once closed without an exception.

    Small pieces are gathered: torch writes five for every tensor, and what each one cost on its way was a third of a small save.
    """

    def __init__(
        self, stream: WriteStream, closed_whole: Callable[[FileEntry], None], hasher: Executor, on_write: Callable[[], None]
    ) -> None:
        self._bytes = _HashedStream(stream, hasher, on_write)
        self._closed_whole = closed_whole
        super().__init__(self._bytes, _BUFFER_BYTES)

    def close(self) -> None:
        """Make the file durable. Raises StorageError, and then it is not part of the checkpoint."""
        if self.closed:
            return
        super().close()
        if not self._bytes.spoilt:
            self._closed_whole(self._bytes.entry())

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        self._bytes.spoilt = True
        with suppress(StorageError):  # the exception under way says more
            self.close()
        problem = self._bytes.problem
        if problem is not None and exc is not problem:
            raise problem from exc  # torch.save says only that a write failed


class CheckpointWriter:
    """One checkpoint in the making. Nothing of it is a checkpoint before ``commit``; leaving the context without aborts it."""

    def __init__(self, run_dir: RunDir, name: CheckpointName) -> None:
        self._run_dir = run_dir
        self._name = name
        self._directory = run_dir.checkpoints_path(str(name))
        # The marker says whose directory this is. Who begins the same checkpoint again removes it with the directory.
        self._marker = f"{self._directory}/{MANIFEST}.{secrets.token_hex(6)}.tmp"
        self._entries: dict[str, FileEntry | None] = {}
        self._hasher = ThreadPoolExecutor(1, "checkpoint-digest")
        self._ended = False
        self._files.make_dir(run_dir.checkpoints_path())
        self._files.touch(self._marker)  # fences the living; commit makes the directory durable

    @property
    def name(self) -> str:
        """The checkpoint's directory below ``checkpoints/``."""
        return str(self._name)

    def write_file(self, relpath: str, on_write: Callable[[], None] = lambda: None) -> CheckpointFile:
        """Begin a file, for use in a ``with``.

        Args:
            on_write: called whenever the storage took bytes of it.

        Raises InvalidStorage for a path that may not be, CheckpointReplaced.
        """
        if fault := relative_names.fault_of(relpath):
            raise InvalidStorage(f"{relpath!r} is not a plain path below a checkpoint's directory: it {fault}")
        if relpath.startswith(MANIFEST):
            raise InvalidStorage(f"{relpath!r} is the manifest's own name; choose another")
        if relpath in self._entries:
            raise InvalidStorage(f"{relpath!r} was written to checkpoint {self.name} already")
        if not self._files.exists(self._marker):
            raise CheckpointReplaced(self.name)
        self._entries[relpath] = None

        def closed_whole(entry: FileEntry) -> None:
            self._entries[relpath] = entry

        return CheckpointFile(self._files.create(f"{self._directory}/{relpath}"), closed_whole, self._hasher, on_write)

    def commit(
        self,
        *,
        epoch: int,
        attempt: int,
        parent: str | None,
        world_size: int,
        sample_digest: str | None,
        metrics: Mapping[str, float],
        created_at: datetime | None = None,
    ) -> Manifest:
        """Write the manifest last; from then on, also after a crash of the machine, this is a checkpoint.

        Args:
            metrics: of this state's own evaluation; those that are not finite are left out.

        Raises:
            CheckpointReplaced: another writer began the same checkpoint; this one is not committed.
            StorageError: not committed as far as can be told.
        """
        entries = {relpath: entry for relpath, entry in self._entries.items() if entry is not None}
        unfinished = sorted(self._entries.keys() - entries.keys())
        if unfinished or not entries:
            raise InvalidStorage(f"checkpoint {self.name} cannot be committed: {unfinished or 'no file'} was written whole")
        manifest = Manifest(
            run_id=self._run_dir.run_id,
            step=self._name.step,
            epoch=epoch,
            submission=self._name.submission,
            attempt=attempt,
            parent=parent,
            world_size=world_size,
            sample_digest=sample_digest,
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            created_at=created_at or datetime.now(UTC),
            files=entries,
        )
        # The files' bytes are durable since they were closed; now their names, innermost directories first.
        for directory in sorted({str(PurePosixPath(relpath).parent) for relpath in entries}, reverse=True):
            self._files.sync_dir(self._directory if directory == "." else f"{self._directory}/{directory}")
        self._files.sync_dir(self._run_dir.checkpoints_path())
        if not self._files.promote(self._marker, f"{self._directory}/{MANIFEST}", manifest.to_bytes()):
            raise CheckpointReplaced(self.name)
        self._ended = True
        return manifest

    def abort(self) -> None:
        """Remove what was written, unless it was committed or another writer took over."""
        if self._ended:
            return
        self._ended = True
        if self._files.exists(self._marker):
            # The manifest first: where the answer to its write was lost, it may be there.
            self._files.delete_file(f"{self._directory}/{MANIFEST}")
            self._files.delete_dir(self._directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._hasher.shutdown()
        if kind is None:
            self.abort()
            return
        with suppress(StorageError):  # the exception under way says more; who begins next clears away what is left
            self.abort()

    @property
    def _files(self) -> Files:
        return self._run_dir.files


def begin_checkpoint(run_dir: RunDir, name: CheckpointName, is_sound: Callable[[], bool]) -> CheckpointWriter:
    """Clear away what an earlier writer left under this name, and begin.

    Args:
        is_sound: whether a checkpoint of this name is committed and verifies; asked only where there is a manifest.

    Raises:
        CheckpointExists: it is.
    """
    files, directory = run_dir.files, run_dir.checkpoints_path(str(name))
    if files.exists(f"{directory}/{MANIFEST}"):
        if is_sound():
            raise CheckpointExists(str(name))
        files.delete_file(f"{directory}/{MANIFEST}")
    # Renamed before it is deleted: a writer that was slow, not dead, may have committed since we looked.
    aside = run_dir.checkpoints_path(f".trash-{name}-{secrets.token_hex(6)}")
    if files.set_aside(directory, aside):
        if files.exists(f"{aside}/{MANIFEST}"):
            files.set_aside(aside, directory)
            raise CheckpointExists(str(name))
        files.delete_dir(aside)
    else:
        files.delete_dir(directory)
    return CheckpointWriter(run_dir, name)
