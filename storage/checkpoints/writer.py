"""Write one checkpoint: first its files, hashed as they are written, then the manifest, which
commits.
"""

from __future__ import annotations

import io
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, Self

from everstep.wire import base
from storage.checkpoints.manifest import MANIFEST, FileEntry, Manifest, new_hash
from storage.claims import process_nonce
from storage.errors import (
    CheckpointExists,
    CheckpointReplaced,
    InvalidStorage,
    StorageError,
    StorageNotFound,
    StorageUnreadable,
)
from storage.files.protocol import Files, WriteStream
from storage.run_dir import CheckpointName, RunDir

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BEGUN, TRASH = ".begun-", ".trash-"
"""Name prefixes of directories that are being written, or were set aside. The checkpoint's name and
a random part follow."""


class CheckpointWriter:
    """A checkpoint being written. It does not exist before ``commit``; leaving the context without
    a commit aborts it."""

    def __init__(self, run_dir: RunDir, name: CheckpointName) -> None:
        self._run_dir = run_dir
        self._name = name
        # A private directory, which the commit renames to the checkpoint's: nobody else writes it.
        self._directory = run_dir.checkpoints_path(f"{BEGUN}{name}-{secrets.token_hex(6)}")
        self._marker = f"{self._directory}/{MANIFEST}.tmp"
        self._entries: dict[str, FileEntry | None] = {}
        self._hasher = ThreadPoolExecutor(1, "checkpoint-digest")
        self._ended = False
        self._begin()

    def _begin(self) -> None:
        self._files.make_dir(self._run_dir.checkpoints_path())
        with self._as_replaced():
            self._files.touch(self._marker)  # fences live writers; commit makes it durable

    def _may_go_on(self) -> bool:
        """Return whether no other writer has started the same checkpoint since."""
        return self._files.exists(self._marker)

    def _promote(self, manifest: str, data: bytes) -> bool:
        """Commit, unless another writer has started the same checkpoint."""
        return self._files.promote(self._marker, manifest, data)

    @property
    def name(self) -> str:
        """Return the checkpoint's directory below ``checkpoints/``."""
        return str(self._name)

    @property
    def directory(self) -> str:
        """Return where its files are until the commit, for ``write_beside``."""
        return self._directory

    def adopt(self, relpath: str, entry: FileEntry) -> None:
        """Take a file that another process has written by ``write_beside`` as part of the
        checkpoint. Raises InvalidStorage, CheckpointReplaced."""
        if relpath in self._entries:
            raise InvalidStorage(f"{relpath!r} was written twice to checkpoint {self.name}")
        if not self._may_go_on():
            raise CheckpointReplaced(self.name)
        self._entries[relpath] = entry

    def write_file(
        self, relpath: str, on_write: Callable[[], None] = lambda: None
    ) -> CheckpointFile:
        """Start a file, for use in a ``with``.

        Args:
            on_write: called whenever the storage has taken bytes of it.

        Raises InvalidStorage for an invalid path, CheckpointReplaced.
        """
        if fault := base.fault_of(relpath):
            raise InvalidStorage(
                f"{relpath!r} is not a valid path in a checkpoint's directory: it {fault}"
            )
        if relpath.startswith(MANIFEST):
            raise InvalidStorage(f"{relpath!r} is reserved for the manifest; choose another name")
        if relpath in self._entries:
            raise InvalidStorage(
                f"{relpath!r} was already written to checkpoint {self.name}; choose another name"
            )
        if not self._may_go_on():
            raise CheckpointReplaced(self.name)
        self._entries[relpath] = None

        def closed_whole(entry: FileEntry) -> None:
            self._entries[relpath] = entry

        with self._as_replaced():
            stream = self._files.create(f"{self._directory}/{relpath}")
        return CheckpointFile(stream, closed_whole, self._hasher, on_write)

    def commit(
        self,
        *,
        epoch: int,
        parent: str | None,
        world_size: int,
        sample_digest: str | None,
        metrics: Mapping[str, float],
        parameters: Literal["trainable"] | None = None,
        chain: str | None = None,
        created_at: datetime | None = None,
    ) -> Manifest:
        """Write the manifest last. From then on this is a checkpoint, even after a crash of the
        machine.

        Args:
            metrics: from the evaluation of this state; values that are not finite are left out.
            parameters: ``trainable`` if frozen parameters are left out.

        Raises:
            CheckpointReplaced: another writer started the same checkpoint; this one is not
                committed.
            StorageError: the commit failed, or its result is unknown.
        """
        entries = {relpath: entry for relpath, entry in self._entries.items() if entry is not None}
        unfinished = sorted(self._entries.keys() - entries.keys())
        if unfinished or not entries:
            raise InvalidStorage(
                f"checkpoint {self.name} cannot be committed: "
                f"{f'incomplete files {unfinished}' if unfinished else 'it has no files'}"
            )
        manifest = Manifest(
            run_id=self._run_dir.run_id,
            step=self._name.step,
            epoch=epoch,
            submission=self._name.submission,
            attempt=self._name.attempt,
            writer=process_nonce(),
            parent=parent,
            world_size=world_size,
            sample_digest=sample_digest,
            chain=chain,
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            created_at=created_at or datetime.now(UTC),
            parameters=parameters,
            files=entries,
        )
        # Closing made the files' bytes durable; now sync their names, innermost directories first.
        with self._as_replaced():
            for directory in sorted(
                {str(PurePosixPath(relpath).parent) for relpath in entries}, reverse=True
            ):
                self._files.sync_dir(
                    self._directory if directory == "." else f"{self._directory}/{directory}"
                )
        target = f"{self._run_dir.checkpoints_path(self.name)}/{MANIFEST}"
        if not self._promote(target, manifest.to_bytes()):
            raise CheckpointReplaced(self.name)
        self._ended = True
        return manifest

    def abort(self) -> None:
        """Remove what was written, unless it was committed or another writer took over."""
        if not self._ended:
            self._ended = True
            self._clear_away()

    def _clear_away(self) -> None:
        self._files.delete_dir(self._directory)

    @contextmanager
    def _as_replaced(self) -> Iterator[None]:
        """Raise CheckpointReplaced if the directory is missing: whoever starts the same checkpoint
        removes this writer's."""
        try:
            yield
        except StorageNotFound as exc:
            raise CheckpointReplaced(self.name) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._hasher.shutdown()
        if kind is None:
            self.abort()
            return
        # the current exception says more; the next writer removes what is left
        with suppress(StorageError):
            self.abort()

    @property
    def _files(self) -> Files:
        return self._run_dir.files


class ObjectCheckpointWriter(CheckpointWriter):
    """Write a checkpoint on a store that cannot rename, and where a put overwrites.

    Everything is written in its final place. The place belongs to the first process that starts
    there, as long as its marker exists.
    """

    def __init__(self, run_dir: RunDir, name: CheckpointName) -> None:
        self._owner = f"{process_nonce()} {secrets.token_hex(6)}".encode()
        super().__init__(run_dir, name)

    def _begin(self) -> None:
        self._directory = self._run_dir.checkpoints_path(self.name)
        self._marker = f"{self._directory}/{MANIFEST}.tmp"
        if self._files.create_new(self._marker, self._owner):
            return
        if read_or_empty(self._files, self._marker).partition(b" ")[0] != process_nonce().encode():
            raise CheckpointReplaced(self.name)
        # an earlier save of this process, which is void from now on
        self._files.write(self._marker, self._owner)

    def _may_go_on(self) -> bool:
        return read_or_empty(self._files, self._marker) == self._owner

    def _promote(self, manifest: str, data: bytes) -> bool:
        if not self._may_go_on() or not self._files.create_new(manifest, data):
            return False
        self._files.delete_file(self._marker)
        return True

    def clear_leavings(self, *, is_corrupt: bool) -> None:
        """Remove the files of an earlier writer."""
        if is_corrupt:
            self._files.delete_file(f"{self._directory}/{MANIFEST}")
        for entry in self._files.list(self._directory):
            if entry.is_dir:
                self._files.delete_dir(f"{self._directory}/{entry.name}")
            elif entry.name not in (MANIFEST, PurePosixPath(self._marker).name):
                self._files.delete_file(f"{self._directory}/{entry.name}")

    def _clear_away(self) -> None:
        if not self._may_go_on():
            return
        # The manifest first: it may exist if the response to its put was lost. The marker last:
        # then others may start.
        for relpath in (MANIFEST, *self._entries):
            self._files.delete_file(f"{self._directory}/{relpath}")
        self._files.delete_file(self._marker)

    def release(self) -> None:
        """Release the place without a checkpoint, and keep the files there."""
        self._ended = True
        self._files.delete_file(self._marker)


def read_or_empty(files: Files, relpath: str) -> bytes:
    """Return a file's bytes; b"" if it does not exist or the medium cannot read it."""
    try:
        return files.read(relpath)
    except (StorageNotFound, StorageUnreadable):
        return b""


# ---------------------------------------------------------------- hashed file

# A file of a checkpoint, hashed and counted while it is written.

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
        self, kind: type[BaseException] | None, exc: BaseException | None, _trace: object
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


def write_beside(
    run_dir: RunDir, directory: str, relpath: str, write: Callable[[CheckpointFile], None]
) -> FileEntry:
    """Write a file of a checkpoint that another process has begun, and return its entry for
    ``CheckpointWriter.adopt``. Without that it is part of no checkpoint.

    Args:
        directory: the other writer's ``directory``.
    """
    found: list[FileEntry] = []
    stream = run_dir.files.create(f"{directory}/{relpath}")
    with (
        ThreadPoolExecutor(1, "checkpoint-digest") as hasher,
        CheckpointFile(stream, found.append, hasher, lambda: None) as file,
    ):
        write(file)
    return found[0]


# ---------------------------------------------------------------- replacement

# Start a checkpoint in place of what an earlier writer left under its name.


def begin_checkpoint(
    run_dir: RunDir, name: CheckpointName, is_sound: Callable[[], bool]
) -> CheckpointWriter:
    """Remove what an earlier writer left under this name, and start to write.

    Args:
        is_sound: returns whether the checkpoint of this name is committed and verifies; only called
            if there is a manifest.

    Raises:
        CheckpointExists: it does.
        CheckpointReplaced: on an object store, another process has started it.
    """
    files, directory = run_dir.files, run_dir.checkpoints_path(str(name))
    manifest = f"{directory}/{MANIFEST}"
    if not files.can_append:
        writer = ObjectCheckpointWriter(run_dir, name)
        is_there = files.exists(manifest)
        if is_there and is_sound():
            writer.release()
            raise CheckpointExists(str(name))
        writer.clear_leavings(is_corrupt=is_there)
        return writer
    # after this a slow writer cannot commit
    for entry in files.list(run_dir.checkpoints_path()):
        if entry.name.startswith(f"{BEGUN}{name}-"):
            _clear(run_dir, name, run_dir.checkpoints_path(entry.name))
    judged = read_or_empty(files, manifest)
    if judged and is_sound():
        raise CheckpointExists(str(name))
    # Rename before deleting, and check what was renamed: another writer may have committed since.
    aside = _aside(run_dir, name)
    if files.set_aside(directory, aside):
        if read_or_empty(files, f"{aside}/{MANIFEST}") != judged:
            put_back(run_dir, aside, str(name))
            raise CheckpointExists(str(name))
        files.delete_file(f"{aside}/{MANIFEST}")
        files.delete_dir(aside)
    return CheckpointWriter(run_dir, name)


def put_back(run_dir: RunDir, aside: str, name: str) -> bool:
    """Move a committed checkpoint that was set aside back to its place, if that is free.

    Return whether it is a committed checkpoint. If so, do not delete it, even if its place was
    taken meanwhile.
    """
    files = run_dir.files
    if CheckpointName.parse(name) is None or not files.exists(f"{aside}/{MANIFEST}"):
        return False
    directory = run_dir.checkpoints_path(name)
    if files.exists(f"{directory}/{MANIFEST}"):
        return False
    with suppress(StorageError):
        files.set_aside(aside, directory)
    return True


def _clear(run_dir: RunDir, name: CheckpointName, begun: str) -> None:
    """Fence off another writer, and remove what it wrote."""
    aside = _aside(run_dir, name)
    if run_dir.files.set_aside(begun, aside):
        run_dir.files.delete_file(f"{aside}/{MANIFEST}")  # it was about to commit
        run_dir.files.delete_dir(aside)


def _aside(run_dir: RunDir, name: CheckpointName) -> str:
    return run_dir.checkpoints_path(f"{TRASH}{name}-{secrets.token_hex(6)}")
