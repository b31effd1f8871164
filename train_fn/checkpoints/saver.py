"""Checkpoints: rank 0 copies the state between two steps, and a thread writes the copy while
training goes on."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from storage.checkpoints.manifest import Manifest
from storage.claims import successor
from storage.errors import CheckpointExists, CorruptCheckpoint, StorageError, StorageNotFound
from storage.process_nonce import process_nonce
from storage.run_control import Stop
from train_fn import clock as head_clock
from train_fn.checkpoints.cadence import ObservedFailures, SaveCadence, observed_failures
from train_fn.checkpoints.files import manifest_facts, write_files
from train_fn.checkpoints.save_events import SavesTold
from train_fn.checkpoints.save_failures import STALLED_S, SaveFailures
from train_fn.checkpoints.state_copy import BoundaryCopies, BoundaryCopy
from train_fn.context import WorkerContext
from train_fn.errors import CheckpointFailed, Replaced
from train_fn.state.kept_state import KeptState

FINAL_PATIENCE_S = 600.0
"""How long a run whose steps are done waits for a storage that fails."""
STOP_PATIENCE_S = 30.0
"""The same for ranks that were asked to stop, since somebody waits for them."""
MEET_S = 10.0
"""How long the other ranks wait for the last save in one collective, when a run ends."""
TELL_EVERY_S = 15.0
"""Shortest time between two reports of a checkpoint to Ray Train. A report is work for its
controller and for every rank, for a small model almost as much as the save. A run that saves more
often reports the newest checkpoint."""
CONFIRM_S = 2.0
"""Longest wait for a journal that has not answered for a while, before old checkpoints are
deleted."""
WRITER_NICENESS = 10
"""Niceness of the writing thread. On a host whose cores are all used by ranks, it runs only in the
time that they leave."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Save:
    """A checkpoint to write. It holds its copy of the state until then."""

    copy: BoundaryCopy
    is_best: bool
    best: str | None
    """Name of the best checkpoint, which retention keeps."""
    retry_until: float
    """The save of this state is retried until then. A periodic save is not retried: the next one
    has a newer state."""


class Saver:
    """Saves on rank 0; on the other ranks every call returns at once. Training never waits for the
    storage, and survives its failures.

    One copy of the state is held until it is written. A save that becomes due meanwhile happens at
    the first step after that. Only a state that is the best so far cannot wait: it takes a copy of
    its own.
    """

    def __init__(self, ctx: WorkerContext, state: KeptState, copies: BoundaryCopies) -> None:
        self._ctx, self._state, self._copies = ctx, state, copies
        self._active = ctx.world_rank == 0
        self._store = ctx.checkpoints
        self._told = SavesTold(ctx)
        self._mutex = threading.RLock()
        self._lock = threading.Condition(self._mutex)
        self._waiting: Save | None = None
        self._current: Save | None = None
        # when the storage last took bytes of the current save; None between two attempts
        self._moved_at: float | None = None
        self._closed = self._hurry = False
        self._committed: Manifest | None = None
        self._begun_at = state.step
        self._found: tuple[int, int, int] | None = None
        """The state that an earlier attempt had saved as a checkpoint."""
        self._told_at = float("-inf")
        self._error: Exception | None = None
        self._failures = SaveFailures(ctx.spec.checkpoint)
        self._tried: str | None = None
        """Name of the checkpoint that the last try was to commit. If it is found committed although
        the try failed, it is ours."""
        self._past: tuple[float, ObservedFailures] | None = None
        self._cadence = SaveCadence(ctx.spec.checkpoint, state.step, time.monotonic())
        if self._active:
            threading.Thread(target=self._run, name="checkpoint-saver", daemon=True).start()

    def words(self, already_told: int) -> tuple[Stop | None, int, bool]:
        """Return what rank 0 sends to all ranks with the present step; from the others, nothing.

        That is: the stop that the spec asks for after too many failed saves, the step of a
        checkpoint to report (``newest_to_tell``), and whether to save the state after this step.
        """
        if not self._active:
            return None, 0, False
        return self._failures.stop, self.newest_to_tell(already_told), self.is_due()

    def is_due(self) -> bool:
        """Whether a checkpoint is due after the present step. Rank 0 decides; the step's totals
        send it to all ranks."""
        is_early = self._state.step + 1 < self._cadence.earliest_step
        if not self._active or (
            is_early and self._current is self._waiting is None and not self._failures.in_a_row
        ):
            return False  # most steps go no further
        now = time.monotonic()
        with self._mutex:  # the mutex of self._lock: Condition is Python code, and slower
            stalled = self._stalled(now)
            if (
                self._current is not None
                or self._waiting is not None
                or not self._failures.may_try(now)
            ):
                due = False
            else:
                due = self._failures.in_a_row > 0 or self._cadence.is_due(self._state.step + 1, now)
        if stalled is not None:
            self._told.failed(*stalled)
        return due

    def offer(self, *, due: bool, is_best: bool) -> None:
        """Save the present state in the background if it is due or the best so far.

        Args:
            due: what ``is_due`` returned before the step on rank 0; the same on all ranks.
        """
        if not self._active:
            return
        if self._cadence.auto:
            with self._lock:
                self._cadence.step_ended(time.monotonic(), busy=self._current is not None)
        if due or is_best:
            self._hand_over(is_best, retry_until=float("inf") if is_best else float("-inf"))
            with self._lock:
                self._cadence.boundary_left(time.monotonic())

    def save_now(self, *, is_best: bool = False, patience_s: float = FINAL_PATIENCE_S) -> None:
        """Commit the present state before returning, after a save that is under way.

        Raises CheckpointFailed if the storage keeps failing, or takes no byte, for ``patience_s``.
        A storage that is only slow is waited for.
        """
        if not self._active:
            return
        deadline = time.monotonic() + patience_s
        with self._lock:
            self._hurry = True
            self._lock.notify_all()
        if self.wait_idle(deadline) and not self._is_committed():
            self._hand_over(is_best, retry_until=deadline)
            self.wait_idle(deadline)
        if self._is_committed():
            return
        raise CheckpointFailed(
            f"the checkpoint of step {self._state.step} could not be committed, with "
            f"{patience_s:g} s of patience: "
            f"{self._error or 'the storage does not answer'}"
        ) from self._error

    def begin_last(self, *, is_best: bool, patience_s: float) -> Future[None]:
        """Start ``save_now`` on its own thread. No one waits for it if the ranks fail meanwhile."""
        saving: Future[None] = Future()

        def save() -> None:
            try:
                self.save_now(is_best=is_best, patience_s=patience_s)
            except Exception as exc:
                saving.set_exception(exc)
            else:
                saving.set_result(None)

        threading.Thread(target=save, name="last-save", daemon=True).start()
        return saving

    @staticmethod
    def has_ended(saving: Future[None], within_s: float) -> bool:
        return bool(wait([saving], within_s).done)

    @property
    def stop(self) -> Stop | None:
        """The stop that the run's spec asks for after too many failed saves."""
        return self._failures.stop

    def newest_committed(self, already_reported: int) -> int:
        """Return the step of the newest checkpoint that this attempt committed, if it is later than
        ``already_reported``; else 0."""
        committed = self._committed
        return committed.step if committed is not None and committed.step > already_reported else 0

    def newest_to_tell(self, already_told: int) -> int:
        """Like ``newest_committed``, limited to once per TELL_EVERY_S. Called by the training
        thread."""
        now = time.monotonic()
        newest = self.newest_committed(already_told) if now >= self._told_at + TELL_EVERY_S else 0
        if newest:
            self._told_at = now
        return newest

    def close(self) -> None:
        """Accept no more saves. A save that is under way stays with its thread, which ends with the
        process."""
        with self._lock:
            self._closed = True
            self._drop_waiting()
            self._lock.notify_all()

    # -- the training thread

    def _hand_over(self, is_best: bool, retry_until: float) -> None:
        """Copy the state and give the copy to the thread."""
        with self._lock:
            if self._closed or (
                self._waiting is not None and self._waiting.is_best and not is_best
            ):
                return
            self._drop_waiting()
            if self._committed is not None:  # other ranks learn of it later, or never
                self._state.parent = self._committed.name
        copy = self._copies.take()
        best = self._state.best
        with self._lock:
            self._waiting = Save(copy, is_best, best.checkpoint if best else None, retry_until)
            self._cadence.begun(copy.step, time.monotonic())
            self._lock.notify_all()

    def _drop_waiting(self) -> None:
        """Called with the lock held."""
        if self._waiting is not None:
            self._copies.release(self._waiting.copy)
            self._waiting = None

    def wait_idle(self, deadline: float) -> bool:
        """Wait until nothing is left to write. After ``deadline`` wait only while bytes move.
        Return whether all is written."""
        with self._lock:
            while self._waiting is not None or self._current is not None:
                last = (
                    deadline
                    if self._moved_at is None
                    else max(deadline, self._moved_at + STALLED_S)
                )
                left_s = last - time.monotonic()
                if left_s <= 0:
                    return False
                self._lock.wait(min(left_s, 1.0))
            return True

    def _is_committed(self) -> bool:
        if self._committed is not None and self._committed.step == self._state.step:
            return True
        return _place(self._state.step, vars(self._state)) == self._found

    def _stalled(self, now: float) -> tuple[int, str, dict[str, Any]] | None:
        """Count a save that no longer moves as failed, and return what to report of it; None if
        there is none. Called with the lock held."""
        if self._current is None or self._moved_at is None or now - self._moved_at < STALLED_S:
            return None
        self._moved_at = now
        self._failures.failed(now)
        return (
            self._current.copy.step,
            f"StorageUnavailable: the storage took no byte for {STALLED_S:g} s",
            self._standing(),
        )

    # -- the saver's thread

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere it would be the whole process
            os.nice(WRITER_NICENESS)
        while (save := self._next()) is not None:
            while (error := self._write(save)) is not None and self._try_again(save, error):
                pass
            self._copies.release(save.copy)
            with self._lock:
                self._current = self._moved_at = None
                self._lock.notify_all()

    def _next(self) -> Save | None:
        with self._lock:
            self._lock.wait_for(lambda: self._waiting is not None or self._closed)
            self._current, self._waiting = self._waiting, None
            return self._current

    def _try_again(self, save: Save, error: Exception) -> bool:
        """Wait after a failure. Return whether to try the same copy again."""
        with self._lock:
            self._moved_at = None
            left_s = save.retry_until - time.monotonic()
            if not isinstance(error, StorageError) or left_s <= 0 or self._in_the_way(save):
                return False
            self._lock.wait_for(
                lambda: self._closed or self._in_the_way(save), min(self._failures.retry_s, left_s)
            )
            return not self._closed and self._waiting is None

    def _in_the_way(self, save: Save) -> bool:
        """Whether a newer save waits for this one, or will once it is gone. Called with the lock
        held."""
        return self._waiting is not None or (self._hurry and save.retry_until == float("inf"))

    def _write(self, save: Save) -> Exception | None:
        """Write, commit and report a checkpoint, and delete the ones that retention releases.
        Return the error if it was not committed."""
        began = time.perf_counter()
        self._moved()
        try:
            try:
                self._told.catch_up()
                if self._is_there(save):
                    self._note_committed(None)
                    self._found = _place(save.copy.step, save.copy.state)
                    return None
                manifest, is_new = self._commit(save), True
            except CheckpointExists as exc:
                # An earlier try committed it but lost the answer. It was just read back complete.
                manifest, is_new = self._own(exc), exc.name == self._tried
        except Exception as exc:
            self._note_failed(save, exc)
            return exc
        self._note_committed(manifest)
        if is_new:
            self._tell_committed(save, manifest, time.perf_counter() - began)
            self._retain(save, manifest)
        return None

    def _commit(self, save: Save) -> Manifest:
        ctx, state = self._ctx, save.copy.state
        safetensors = ctx.spec.checkpoint.safetensors
        with self._store.begin(save.copy.step, ctx.submission, ctx.attempt) as writer:
            write_files(writer, state, safetensors=safetensors, on_write=self._moved)
            self._tried = writer.name
            if not ctx.hears_journal(0.0):
                self._require_newest()
            return writer.commit(world_size=ctx.world_size, **manifest_facts(state))

    def _require_newest(self) -> None:
        """Read from the storage whether this attempt is the newest, while the journal does not
        answer. Raises Replaced."""
        ctx = self._ctx
        why = successor(ctx.run_dir, (ctx.submission, ctx.attempt))
        if why is not None:
            ctx.on_replaced(why)
            raise Replaced(why)

    def _is_there(self, save: Save) -> bool:
        """Whether the state that this attempt began with is a checkpoint of the lineage already: an
        earlier attempt committed it, and may have died before it reported that. The best state is
        saved all the same, under the name that the state has for it."""
        state = save.copy.state
        if save.is_best or save.copy.step != self._begun_at:
            return False
        facts = manifest_facts(state)
        wanted = save.copy.step, facts["sample_digest"], facts["metrics"]
        for manifest in self._store.lineage():
            is_earlier = (manifest.submission, manifest.attempt) != (
                self._ctx.submission,
                self._ctx.attempt,
            )
            if is_earlier and (manifest.step, manifest.sample_digest, manifest.metrics) == wanted:
                with suppress(CorruptCheckpoint, StorageNotFound):
                    self._store.verify(manifest.name)
                    return True
        return False

    def _own(self, exists: CheckpointExists) -> Manifest:
        """Return the existing checkpoint if this process wrote it. Raises CheckpointExists if
        another process did: its weights may differ."""
        manifest = self._store.manifest(exists.name)
        if manifest.writer != process_nonce():
            raise exists
        return manifest

    def _moved(self) -> None:
        self._moved_at = time.monotonic()

    def _retain(self, save: Save, written: Manifest) -> None:
        spec = self._ctx.spec.checkpoint
        best_by = (spec.best_metric, spec.best_mode) if spec.best_metric is not None else None
        origin = (self._ctx.submission, self._ctx.attempt)
        if not self._ctx.hears_journal(CONFIRM_S):
            logger.warning("the journal does not answer; old checkpoints are deleted once it does")
            return
        try:
            deleted = self._store.retain(spec.keep_latest, save.best, origin, written, best_by)
        except StorageError:
            logger.exception("old checkpoints could not be deleted; the next save tries again")
            return
        self._told.deleted(deleted)

    # -- what is told

    def _standing(self) -> dict[str, Any]:
        """Return the count of failures for an event. Called with the lock held."""
        limit = self._ctx.spec.checkpoint.max_failed_saves
        return {
            "failed_in_a_row": self._failures.in_a_row,
            "max_failed_saves": limit,
            "retry_s": self._failures.retry_s,
        }

    def _note_failed(self, save: Save, error: Exception) -> None:
        logger.error(
            "the checkpoint of step %d was not committed; training goes on",
            save.copy.step,
            exc_info=error,
        )
        with self._lock:
            self._failures.failed(time.monotonic())
            self._error = error
            standing = self._standing()
        self._told.failed(save.copy.step, f"{type(error).__name__}: {error}", standing)

    def _note_committed(self, manifest: Manifest | None) -> None:
        """Note a committed checkpoint; ``None`` for one of an earlier attempt."""
        with self._lock:
            self._failures.succeeded()
            self._error = None
            self._committed = manifest or self._committed

    def _tell_committed(self, save: Save, manifest: Manifest, write_s: float) -> None:
        self._told.committed(manifest, save.copy.stall_s, write_s)
        if self._cadence.auto:
            observed = self._observed()
            with self._lock:
                chosen = self._cadence.committed(save.copy.stall_s, write_s, observed)
            if chosen is not None:
                self._told.cadence(manifest.step, chosen)

    def _observed(self) -> ObservedFailures:
        """Return the failures so far. The journals are read once: this attempt had none yet."""
        now = head_clock.now()
        if self._past is None:
            try:
                self._past = (now, observed_failures(self._ctx.run_dir, now))
            except StorageError as exc:
                logger.warning(
                    "the run's journals could not be read for its failures, trying again: %s", exc
                )
                return ObservedFailures()
        at, past = self._past
        return replace(past, trained_s=past.trained_s + now - at)


def _place(step: int, state: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return what identifies a state within an attempt. After an evaluation it is another state,
    which must be saved too."""
    return step, state["evaluated_step"], state["closed_epochs"]
