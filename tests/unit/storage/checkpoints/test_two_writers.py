"""Two writers of one checkpoint: one is held up inside every single step of what it does, while the
other runs to its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from storage.checkpoints import writer as checkpoint_writer
from storage.checkpoints.manifest import MANIFEST, Manifest
from storage.checkpoints.store import CheckpointStore
from storage.checkpoints.writer import TRASH
from storage.errors import CheckpointExists, CheckpointReplaced
from storage.filesystem import open_storage
from storage.run_dir import CheckpointName, RunDir
from tests.support.storage_places import MemoryObjects, memory_run_dir, quick_directory

NAME = CheckpointName(50, 1, 1)
OS_CALLS = (
    "open",
    "stat",
    "write",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "scandir",
)
OBJECT_CALLS = (
    "exists",
    "read",
    "list",
    "write",
    "create",
    "create_new",
    "touch",
    "delete_file",
    "delete_dir",
)

Act = Callable[[RunDir], Manifest | None]


def other_commit(run_dir: RunDir) -> Manifest | None:
    """A save by another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "process_nonce", lambda: "another process")
        return commit(run_dir)


def commit(run_dir: RunDir) -> Manifest | None:
    """A save: its manifest, or None where another writer was in the way."""
    try:
        with CheckpointStore(run_dir).begin(*_parts()) as writer:
            for relpath in ("model.pt", "train_state.pt"):
                with writer.write_file(relpath) as file:
                    file.write(os.urandom(64))
            return writer.commit(epoch=0, parent=None, world_size=1, sample_digest=None, metrics={})
    except (CheckpointExists, CheckpointReplaced):
        return None


def abort(run_dir: RunDir) -> Manifest | None:
    """A save that fails half way."""
    try:
        with (
            CheckpointStore(run_dir).begin(*_parts()) as writer,
            writer.write_file("model.pt") as file,
        ):
            file.write(b"half")
            raise InterruptedError
    except (InterruptedError, CheckpointExists, CheckpointReplaced):
        return None


def _parts() -> tuple[int, int, int]:
    return NAME.step, NAME.submission, NAME.attempt


def nothing(run_dir: RunDir) -> None:
    """The place is empty."""


def leavings(run_dir: RunDir) -> None:
    """A writer died in the middle."""
    with CheckpointStore(run_dir).begin(*_parts()).write_file("old.pt") as file:
        file.write(b"old")


def damaged(run_dir: RunDir) -> None:
    """What is committed there is corrupt."""
    manifest = commit(run_dir)
    assert manifest is not None
    run_dir.files.write(f"{run_dir.checkpoints_path(manifest.name)}/model.pt", b"bad")


class Pause:
    """Runs the other writer once, right before the ``number``-th call, as often as calls are
    counted."""

    def __init__(self, number: int, other: Callable[[], Manifest | None]) -> None:
        self.left, self.other = number, other
        self.happened = False
        self.result: Manifest | None = None

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.happened:
                self.happened = True
                self.result = self.other()
            return call(*args, **kwargs)

        return counted


@contextmanager
def local_place() -> Iterator[tuple[RunDir, Callable[[Pause, pytest.MonkeyPatch], None]]]:
    def hold_up(pause: Pause, patch: pytest.MonkeyPatch) -> None:
        for name in OS_CALLS:
            patch.setattr(os, name, pause.wrap(getattr(os, name)))

    with quick_directory() as directory:
        yield RunDir(open_storage(directory), "run_a"), hold_up


@contextmanager
def objects_place() -> Iterator[tuple[RunDir, Callable[[Pause, pytest.MonkeyPatch], None]]]:
    def hold_up(pause: Pause, patch: pytest.MonkeyPatch) -> None:
        for name in OBJECT_CALLS:
            patch.setattr(MemoryObjects, name, pause.wrap(getattr(MemoryObjects, name)))

    yield memory_run_dir()[0], hold_up


@pytest.mark.parametrize("place", [local_place, objects_place])
@pytest.mark.parametrize("before", [nothing, leavings, damaged])
@pytest.mark.parametrize("held_up", [commit, abort])
def test_whoever_is_held_up_wherever_a_committed_checkpoint_stays(
    held_up: Act, before: Callable[[RunDir], None], place: Any
) -> None:
    number, is_over = 0, False
    while not is_over:
        number += 1
        with place() as (run_dir, hold_up), pytest.MonkeyPatch.context() as patch:
            before(run_dir)
            pause = Pause(number, lambda run_dir=run_dir: other_commit(run_dir))
            hold_up(pause, patch)
            own = held_up(run_dir)
            patch.undo()
            is_over = not pause.happened
            _check(
                run_dir,
                [each for each in (own, pause.result) if each is not None],
                f"at call {number}",
            )
    assert number > 10


def _check(run_dir: RunDir, committed: list[Manifest], when: str) -> None:
    store = CheckpointStore(run_dir)
    assert len(committed) <= 1, f"{when}: both believe that they have committed"
    store.collect_orphans()
    if committed:
        store.verify(str(NAME))
        assert store.list() == committed, when
    assert not [
        entry
        for entry in run_dir.files.list(run_dir.checkpoints_path())
        if entry.name.startswith(TRASH)
    ], when


def test_a_committed_checkpoint_that_was_set_aside_by_a_process_that_died_is_put_back() -> None:
    with local_place() as (run_dir, _):
        manifest = commit(run_dir)
        assert manifest is not None
        aside = run_dir.checkpoints_path(f"{TRASH}{NAME}-0123456789ab")
        assert run_dir.files.set_aside(run_dir.checkpoints_path(str(NAME)), aside)
        run_dir.files.write(
            run_dir.checkpoints_path(f"{TRASH}{NAME}-ba9876543210/{MANIFEST}.1.tmp"), b""
        )
        store = CheckpointStore(run_dir)
        assert store.list() == []
        store.collect_orphans()
        assert store.list() == [manifest]
        assert [entry.name for entry in run_dir.files.list(run_dir.checkpoints_path())] == [
            str(NAME)
        ]
