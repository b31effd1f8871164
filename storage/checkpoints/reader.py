"""Read the checkpoints of a run: every file is verified as it is read."""

from __future__ import annotations

import builtins
import heapq
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast

from everstep.wire.events import BEGINNINGS, lookup
from storage.checkpoints.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    new_hash,
    parse_manifest,
)
from storage.checkpoints.tar_stream import Archive, file_blocks
from storage.errors import (
    CorruptCheckpoint,
    CorruptFile,
    InvalidStorage,
    StorageError,
    StorageNotFound,
    StorageUnreadable,
    mapped,
)
from storage.files.protocol import Files
from storage.run_dir import CheckpointName, Origin, RunDir

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")


class CheckpointReader:
    """Reads the checkpoints of one run by name."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest. Raises StorageNotFound if there is no such checkpoint,
        CorruptCheckpoint if its manifest is invalid."""
        path = f"{self.directory(name)}/{MANIFEST}"
        try:
            manifest = parse_manifest(self._files.read(path, MAX_MANIFEST_BYTES))
        except StorageNotFound as exc:
            raise StorageNotFound(
                f"run {self._run_dir.run_id} has no committed checkpoint {name}"
            ) from exc
        except (CorruptFile, StorageUnreadable) as exc:
            raise CorruptCheckpoint(name, MANIFEST, "a valid manifest", str(exc)) from exc
        if (manifest.name, manifest.run_id) != (name, self._run_dir.run_id):
            raise CorruptCheckpoint(
                name,
                MANIFEST,
                f"{name} of run {self._run_dir.run_id}",
                f"{manifest.name} of run {manifest.run_id}",
            )
        return manifest

    def verify(self, name: str, on_block: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Read back every file. Raises CorruptCheckpoint for the first that differs,
        StorageNotFound.

        Args:
            on_block: called with the size of every block read. It may block, to limit the rate, or
                raise, to stop.
        """
        manifest = self.manifest(name)
        for relpath in sorted(manifest.files):
            self._verify_file(manifest, relpath, on_block)

    def verify_file(self, name: str, relpath: str) -> None:
        """Read back one file of a checkpoint. Raises as ``verify``."""
        self._verify_file(self.manifest(name), relpath, lambda num_bytes: None)

    def read_file(self, name: str, relpath: str) -> bytes:
        """Return a file's bytes, verified. Raises CorruptCheckpoint, StorageNotFound."""
        manifest = self.manifest(name)
        if relpath not in manifest.files:
            raise StorageNotFound(
                f"checkpoint {name} has no file {relpath}; it has {sorted(manifest.files)}"
            )
        return b"".join(self._blocks(manifest, relpath))

    def load_file(self, name: str, relpath: str, load: Callable[[IO[bytes]], T]) -> T:
        """Return the result of ``load`` (such as torch.load) for a file, verified. Damage raises
        CorruptCheckpoint, even if it made ``load`` fail first.

        On a local filesystem ``load`` reads straight from the file. If it does not read front to
        back, it is called again with a verified copy, as on an object store.

        Raises CorruptCheckpoint, StorageNotFound, StorageError.
        """
        manifest = self.manifest(name)
        if self._run_dir.storage.is_local and relpath in manifest.files:
            with self._as_damage(manifest, relpath):
                stream = cast(io.FileIO, self._files.open_read(f"{self.directory(name)}/{relpath}"))
                with VerifiedFile(stream, name, relpath, manifest.files[relpath]) as file:
                    found = load(cast(IO[bytes], file))
            if not file.came_back:
                return found
        return load(io.BytesIO(self.read_file(name, relpath)))

    def archive(self, name: str) -> Archive:
        """Return the checkpoint as a tar file, to be streamed in blocks that are verified as they
        pass.

        Raises StorageNotFound or CorruptCheckpoint at once for the manifest; CorruptCheckpoint in
        the stream for a file.
        """
        manifest = self.manifest(name)
        return Archive(manifest, partial(self._blocks, manifest))

    def path(self, name: str) -> str:
        """Return the checkpoint's directory in the filesystem's own form."""
        return self._files.path(self.directory(name))

    def entries(self) -> set[str]:
        """Return the names in the directory of checkpoints."""
        return {entry.name for entry in self._files.list(self._run_dir.checkpoints_path())}

    def committed(self, entries: Iterable[str]) -> builtins.list[CheckpointName]:
        """Return the names of directories that have a manifest, valid or not, oldest first."""
        return [name for name in named(entries) if self._files.exists(self.manifest_path(name))]

    def _verify_file(
        self, manifest: Manifest, relpath: str, on_block: Callable[[int], None]
    ) -> None:
        for block in self._blocks(manifest, relpath):
            on_block(len(block))

    def _blocks(self, manifest: Manifest, relpath: str, offset: int = 0) -> Iterator[bytes]:
        """Yield blocks as ``file_blocks``; a missing or unreadable file raises
        CorruptCheckpoint."""
        with self._as_damage(manifest, relpath):
            yield from file_blocks(
                self._files, self.directory(manifest.name), manifest, relpath, offset
            )

    @contextmanager
    def _as_damage(self, manifest: Manifest, relpath: str) -> Iterator[None]:
        """Raise CorruptCheckpoint for a file that is missing or unreadable; StorageNotFound if the
        whole checkpoint was deleted."""
        entry = manifest.files[relpath]
        try:
            yield
        except StorageNotFound as exc:
            self.manifest(manifest.name)  # raises StorageNotFound if deleted while it was read
            raise CorruptCheckpoint(
                manifest.name, relpath, f"{entry.size_bytes} bytes", "no file"
            ) from exc
        except (CorruptFile, StorageUnreadable) as exc:
            raise CorruptCheckpoint(
                manifest.name, relpath, f"{entry.size_bytes} bytes", str(exc)
            ) from exc

    def manifest_path(self, name: CheckpointName) -> str:
        """Return the path of a checkpoint's manifest below the storage."""
        return f"{self._run_dir.checkpoints_path(str(name))}/{MANIFEST}"

    def directory(self, name: str) -> str:
        """Return a checkpoint's directory below the storage. Raises InvalidStorage."""
        if CheckpointName.parse(name) is None:
            raise InvalidStorage(
                f"{name!r} is not a checkpoint name; use a name such as {CheckpointName(150, 2, 3)}"
            )
        return self._run_dir.checkpoints_path(name)

    @property
    def _files(self) -> Files:
        return self._run_dir.files


def named(entries: Iterable[str]) -> list[CheckpointName]:
    """Return those of these directories that have a checkpoint's name, oldest first."""
    return sorted(filter(None, map(CheckpointName.parse, entries)))


# ---------------------------------------------------------------- verified file

# A checkpoint's file that is verified while a reader loads it into memory.

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
        self._hash = new_hash()
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
        self, kind: type[BaseException] | None, exc: BaseException | None, _trace: object
    ) -> None:
        """Compare the digest. Raises StorageError; CorruptCheckpoint, also in place of a reader's
        error that damaged bytes caused."""
        try:
            if kind is not None and not issubclass(kind, Exception):
                return
            if self._problem is not None:
                raise self._problem from exc  # readers in C++ only report that a read failed
            self._hash_up_to(self._entry.size_bytes)
            if (found := self._hash.hexdigest()) != self._entry.blake3:
                raise self._corrupt(f"blake3 {self._entry.blake3}", f"blake3 {found}") from exc
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


# ---------------------------------------------------------------- lineage

# Rules for which checkpoints are in the committed lineage, and which of them is the best.
#
# Pure: storage, ranks and the service share these rules.
#
# States from which a newer attempt did not continue are void (invariant I1). An attempt's restore
# point is its ``restored`` event, which is durable before the attempt takes a step. An older
# attempt that was slow rather than dead may commit checkpoints after that; they are beyond the
# restore point and are ignored.


@dataclass(frozen=True)
class RestorePoint:
    """Where an attempt started."""

    step: int
    """Steps done; older states beyond it do not count."""
    fresh: bool
    """It started from scratch, or from another run's checkpoint: no older state counts."""


class Scored(Protocol):
    """A checkpoint with the metrics of its evaluation: a manifest, or a record of the service."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def submission(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


S = TypeVar("S", bound=Scored)


def restore_point(data: Mapping[str, Any]) -> RestorePoint:
    """Return the restore point in the data of a ``restored`` event."""
    return RestorePoint(int(data["step"]), data.get("source") in BEGINNINGS)


def in_lineage(
    names: Iterable[CheckpointName], restore_points: Mapping[Origin, RestorePoint]
) -> list[CheckpointName]:
    """Return the names in the committed lineage, oldest first.

    Args:
        restore_points: by (submission, attempt). Attempts without one have not restored yet and
            void nothing.
    """
    return sorted(name for name in names if voided_by(name, restore_points) is None)


def voided_by(
    name: CheckpointName, restore_points: Mapping[Origin, RestorePoint]
) -> RestorePoint | None:
    """Return the restore point that voids a state: a fresh one if there is any, else the lowest;
    None if the state counts.

    A state counts if every newer attempt started at its step or beyond, and none started from
    scratch.
    """
    voiding = [
        point
        for origin, point in restore_points.items()
        if is_newer(origin, name) and (point.fresh or name.step > point.step)
    ]
    return min(voiding, key=lambda point: (not point.fresh, point.step), default=None)


def is_newer(origin: Origin, name: CheckpointName) -> bool:
    """Return whether an attempt comes after the one that wrote a state."""
    return origin > name.origin


def is_better(value: float, best: float | None, mode: Literal["min", "max"]) -> bool:
    """Return whether a metric's value is better than the best so far (None: there is none). Equal
    values and NaN are not."""
    if value != value:
        return False
    return best is None or (value > best if mode == "max" else value < best)


def best_of(found: Iterable[S], metric: str, mode: Literal["min", "max"]) -> S | None:
    """Return the checkpoint with the best value of a validation metric; None if none has it.

    Of equal values the lowest step wins, as during training; of one step the newest attempt.
    """
    best: tuple[float, S] | None = None
    for each in sorted(found, key=_earliest_step_newest_attempt):
        value = lookup(each.metrics, metric)
        if value is not None and is_better(value, best[0] if best else None, mode):
            best = value, each
    return best[1] if best else None


def origin_of(checkpoint: Scored) -> Origin:
    """Return the submission and attempt that wrote a checkpoint. The attempt is 0 if a user's
    function named it."""
    parsed = CheckpointName.parse(checkpoint.name)
    return parsed.origin if parsed else (checkpoint.submission, 0)


def _earliest_step_newest_attempt(checkpoint: Scored) -> tuple[int, int, int]:
    submission, attempt = origin_of(checkpoint)
    return checkpoint.step, -submission, -attempt
