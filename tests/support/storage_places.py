"""What storage tests write: events, checkpoints, and an object store in memory for the property
tests."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from everstep.wire.events import EventKind
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageNotFound, StorageUnavailable
from storage.files.protocol import READ_LIMIT_BYTES, Entry, read_whole
from storage.filesystem import Storage
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir

BUCKET = "everstep-test"
CHECKPOINT_FILES = ("manifest.json", "model.pt", "train_state.pt")
"""Of a checkpoint as ``save`` makes it."""


@dataclass
class MemoryObjects:
    """An object store in memory, which can be told to fail: a fake behind the seam ``Files``, for
    property tests."""

    objects: dict[str, bytes] = field(default_factory=dict)
    num_lists: int = 0
    fail_next_write: str | None = None
    """"before": nothing lands; "after": it lands, and the answer is lost."""

    can_append = False

    def path(self, relpath: str) -> str:
        return f"memory/{relpath}"

    def exists(self, relpath: str) -> bool:
        return relpath in self.objects

    def read(self, relpath: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        if relpath not in self.objects:
            raise StorageNotFound(relpath)
        data = self.objects[relpath]
        return read_whole(io.BytesIO(data), relpath, len(data), limit_bytes)

    def open_read(self, relpath: str, offset: int = 0) -> io.BytesIO:
        return io.BytesIO(self.read(relpath)[offset:])

    def list(self, relpath: str) -> list[Entry]:
        self.num_lists += 1
        below = [
            name.removeprefix(f"{relpath}/").split("/")
            for name in self.objects
            if name.startswith(f"{relpath}/")
        ]
        return sorted({Entry(parts[0], len(parts) > 1) for parts in below})

    def write(self, relpath: str, data: bytes) -> None:
        self._put(relpath, data)

    def _put(self, relpath: str, data: bytes) -> None:
        failure, self.fail_next_write = self.fail_next_write, None
        if failure != "before":
            self.objects[relpath] = data
        if failure:
            raise StorageUnavailable(f"write of {relpath} failed")

    def create_new(self, relpath: str, data: bytes) -> bool:
        if relpath in self.objects:
            return self.objects[relpath] == data
        self._put(relpath, data)
        return True

    def create(self, relpath: str) -> Any:
        files = self

        class Upload(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    files.write(relpath, self.getvalue())
                super().close()

        return Upload()

    def touch(self, relpath: str) -> None:
        self.write(relpath, b"")

    def make_dir(self, relpath: str) -> None: ...

    def sync_dir(self, relpath: str) -> None: ...

    def set_aside(self, relpath: str, aside: str) -> bool:
        return False

    def promote(self, marker: str, relpath: str, data: bytes) -> bool:
        raise NotImplementedError

    def delete_file(self, relpath: str) -> None:
        self.objects.pop(relpath, None)

    def delete_dir(self, relpath: str) -> None:
        self.objects = {
            name: data for name, data in self.objects.items() if not name.startswith(f"{relpath}/")
        }


def quick_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory whose fsync costs nothing, for tests that write thousands of files: in memory,
    where there is such a place."""
    return tempfile.TemporaryDirectory(
        prefix="storage-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )


def memory_run_dir() -> tuple[RunDir, MemoryObjects]:
    """A run's directory on objects in memory."""
    storage, files = Storage("s3://memory/prefix"), MemoryObjects()
    storage.__dict__["files"] = files
    return RunDir(storage, "run_memory"), files


def event(
    source_n: int,
    kind: EventKind = EventKind.WAITING,
    *,
    source: str = "driver",
    data: dict[str, Any] | None = None,
    **more: Any,
) -> JournalEvent:
    return JournalEvent(
        kind=kind,
        at=1700000000.5,
        submission=1,
        data={**(data or {}), **more},
        source=source,
        source_n=source_n,
    )


def record_restored(
    run_dir: RunDir, submission: int, step: int, source: str = "checkpoint", attempt: int = 0
) -> None:
    """Begin a submission's journal as a driver does, or an attempt's part of it as its rank 0
    does."""
    data = {"step": step, "epoch": 0, "source": source, "checkpoint": None, "rejected": []}
    with JournalWriter(run_dir, submission) as journal:
        if attempt:
            event_row = event(1, EventKind.RESTORED, source=f"rank-0.a{attempt:03d}", data=data)
            journal.append([replace(event_row, attempt=attempt)])
        else:
            journal.append(
                [event(1, EventKind.SUBMISSION_STARTED), event(2, EventKind.RESTORED, data=data)]
            )


def save(
    run_dir: RunDir,
    step: int,
    submission: int = 1,
    attempt: int = 1,
    *,
    files: dict[str, bytes] | None = None,
    created_at: datetime | None = None,
    between: Callable[[str], object] = lambda point: None,
    **fields: Any,
) -> Manifest:
    """Commit a checkpoint; ``between`` is called at every point of the protocol with its name."""
    with CheckpointStore(run_dir).begin(step, submission, attempt) as writer:
        between("begun")
        for relpath, data in (
            files or {"model.pt": b"weights %d" % step, "train_state.pt": b"state %d" % step}
        ).items():
            with writer.write_file(relpath) as file:
                file.write(data[: len(data) // 2])
                between(f"inside {relpath}")
                file.write(data[len(data) // 2 :])
            between(f"after {relpath}")
        manifest = writer.commit(
            **{
                "epoch": 0,
                "parent": None,
                "world_size": 2,
                "sample_digest": "chain",
                "metrics": {"accuracy": 0.5},
                "created_at": created_at or datetime.now(UTC),
                **fields,
            }
        )
        between("committed")
        return manifest


def overwrite(run_dir: RunDir, name: str, relpath: str, data: bytes) -> None:
    """Put other bytes in the place of a checkpoint's file."""
    run_dir.files.write(f"{run_dir.checkpoints_path(name)}/{relpath}", data)


def original(run_dir: RunDir, name: str, relpath: str) -> bytes:
    """A checkpoint's file as it lies there."""
    return run_dir.files.read(f"{run_dir.checkpoints_path(name)}/{relpath}")
