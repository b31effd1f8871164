"""Decide when to save, and write the saves in the background: rank 0 copies the state between two
steps, and a thread writes the copy while training continues."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, wait

from storage.checkpoints.manifest import Manifest
from storage.errors import StorageError
from storage.run_control import Stop
from train_fn.checkpoints.cadence import SaveCadence, SaveEvents, SaveFailures
from train_fn.checkpoints.commit import Collect, Committer
from train_fn.checkpoints.save_slot import (
    Boundary,
    BoundaryCopies,
    Save,
    SaveSlot,
    boundary_of,
    stalled_error,
)
from train_fn.context import WorkerContext
from train_fn.errors import CheckpointFailed
from train_fn.node.usage import give_way
from train_fn.state.run_state import RunState

FINAL_PATIENCE_S = 600.0
"""How long a run whose steps are done waits for a storage that fails."""
STOP_PATIENCE_S = 30.0
"""The same for ranks that were asked to stop, since somebody waits for them."""
MEET_S = 10.0
"""How long the other ranks wait for the last save in one collective, when a run ends."""
REPORT_EVERY_S = 15.0
"""Shortest time between two reports of a checkpoint to Ray Train. A report is work for its
controller and for every rank, for a small model almost as much as the save. A run that saves more
often reports the newest checkpoint."""

logger = logging.getLogger(__name__)


class Saver:
    """Save checkpoints on rank 0; on the other ranks every call returns at once. Training never
    waits for the storage, and survives its failures.

    One copy of the state is held until it is written. A save that becomes due meanwhile happens at
    the first step after that. Only a state that is the best so far cannot wait: it takes a copy of
    its own.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        state: RunState,
        copies: BoundaryCopies,
        collect: Collect | None = None,
    ) -> None:
        self._state, self._copies = state, copies
        self._active = ctx.world_rank == 0
        self._events = SaveEvents(ctx)
        self._mutex = threading.RLock()
        """Guards the slot, the cadence and the failures."""
        self._slot = SaveSlot(self._mutex, copies.release)
        self._committer = Committer(ctx, state.step, self._slot.moved, collect)
        self._failures = SaveFailures(ctx.spec.checkpoint)
        self._cadence = SaveCadence(ctx.spec.checkpoint, state.step, time.monotonic())
        self._committed: Manifest | None = None
        self._found: Boundary | None = None
        """The state that an earlier attempt had saved as a checkpoint."""
        self._error: Exception | None = None
        self._reported_at = float("-inf")
        self._has_memory = False
        """Whether a first save finds memory for its copy, which a thread takes otherwise."""
        if self._active:
            threading.Thread(target=self._run, name="checkpoint-saver", daemon=True).start()

    # -- what the step's totals carry

    def decisions(self, reported: int) -> tuple[Stop | None, int, bool]:
        """Return what rank 0 sends to all ranks with the present step; nothing on other ranks.

        That is: the stop that the spec asks for after too many failed saves, the step of a
        checkpoint to report (``newest_to_report``), and whether to save the state after this step.
        """
        if not self._active:
            return None, 0, False
        return self._failures.stop, self.newest_to_report(reported), self.is_due()

    @property
    def stop(self) -> Stop | None:
        """Return the stop that the run's spec asks for after too many failed saves."""
        return self._failures.stop

    @property
    def has_best_to_write(self) -> bool:
        """Return whether the best state so far is not in a checkpoint yet."""
        with self._mutex:
            saves = (self._slot.waiting, self._slot.current)
            return any(save is not None and save.is_best for save in saves)

    def newest_committed(self, reported: int) -> int:
        """Return the step of the newest checkpoint that this attempt committed, if it is later than
        ``reported``; else 0."""
        committed = self._committed
        return committed.step if committed is not None and committed.step > reported else 0

    def newest_to_report(self, reported: int) -> int:
        """Like ``newest_committed``, limited to once per REPORT_EVERY_S. Called by the training
        thread."""
        now = time.monotonic()
        newest = self.newest_committed(reported) if now >= self._reported_at + REPORT_EVERY_S else 0
        if newest:
            self._reported_at = now
        return newest

    def is_due(self) -> bool:
        """Return whether a checkpoint is due after the present step. Rank 0 decides; the step's
        totals send it to all ranks."""
        slot, failures = self._slot, self._failures
        is_early = self._state.step + 1 < self._cadence.earliest_step
        if not self._active or (
            is_early and slot.current is slot.waiting is None and not failures.in_a_row
        ):
            return False  # most steps go no further
        now = time.monotonic()
        with self._mutex:
            if stalled := slot.newly_stalled(now):
                failures.failed(now)
            if slot.current is not None or slot.waiting is not None or not failures.may_try(now):
                due = False
            else:
                due = failures.in_a_row > 0 or self._cadence.is_due(self._state.step + 1, now)
            facts = failures.facts() if stalled else {}
        if stalled:
            self._events.failed(stalled.copy.step, stalled_error(), facts)
        return due

    # -- the training thread, between two steps

    def save_if_due(self, *, due: bool, is_best: bool) -> None:
        """Save the present state in the background if it is due or the best so far.

        Args:
            due: what ``is_due`` returned before the step on rank 0; the same on all ranks.
        """
        if not self._active:
            return
        if due or is_best:
            self._hand_over(is_best, retry_until=float("inf") if is_best else float("-inf"))
        elif not self._has_memory:
            self._has_memory = self._copies.is_ready()

    def save_now(self, *, is_best: bool = False, patience_s: float = FINAL_PATIENCE_S) -> None:
        """Commit the present state before returning, after a save that is under way.

        Raise CheckpointFailed if the storage keeps failing, or takes no byte, for ``patience_s``.
        A storage that is only slow is waited for.
        """
        if not self._active:
            return
        deadline = time.monotonic() + patience_s
        self._slot.hurry()
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
        """Wait up to ``within_s`` for a save of ``begin_last``. Return whether it has ended."""
        return bool(wait([saving], within_s).done)

    def wait_idle(self, deadline: float) -> bool:
        """Wait until nothing is left to write. After ``deadline`` wait only while bytes move.
        Return whether all is written."""
        return self._slot.wait_idle(deadline)

    def close(self) -> None:
        """Accept no more saves. A save that is under way stays with its thread, which ends with the
        process."""
        self._slot.close()

    def _hand_over(self, is_best: bool, retry_until: float) -> None:
        """Copy the state and give the copy to the thread."""
        if not self._slot.make_room(for_best=is_best):
            return
        if self._committed is not None:  # other ranks learn of it later, or never
            self._state.parent = self._committed.name
        copy = self._copies.take()
        best = self._state.best.checkpoint if self._state.best else None
        with self._mutex:
            self._slot.put(Save(copy, is_best, best, retry_until))
            self._cadence.begun(copy.step, time.monotonic())

    def _is_committed(self) -> bool:
        if self._committed is not None and self._committed.step == self._state.step:
            return True
        return boundary_of(self._state.step, vars(self._state)) == self._found

    # -- the writing thread

    def _run(self) -> None:
        give_way()
        while (save := self._slot.next()) is not None:
            while (error := self._write(save)) is not None:
                if not isinstance(error, StorageError):
                    break
                if not self._slot.wait_to_retry(save, self._failures.retry_s):
                    break
            self._slot.done(save)

    def _write(self, save: Save) -> Exception | None:
        """Write, commit and report a checkpoint, and delete the ones that retention releases.
        Return the error if it was not committed."""
        began = time.perf_counter()
        self._slot.moved()
        try:
            self._events.catch_up()
            manifest, is_new = self._committer.commit(save)
        except Exception as exc:
            self._note_failed(save, exc)
            return exc
        with self._mutex:
            self._failures.succeeded()
            self._error = None
            self._committed = manifest or self._committed  # None: one of an earlier attempt
        if manifest is None:
            self._found = boundary_of(save.copy.step, save.copy.state)
        elif is_new:
            self._report_committed(save, manifest, time.perf_counter() - began)
            self._events.deleted(self._committer.retain(save, manifest))
        return None

    def _note_failed(self, save: Save, error: Exception) -> None:
        logger.error(
            "the checkpoint of step %d was not committed; training continues, and saves again",
            save.copy.step,
            exc_info=error,
        )
        with self._mutex:
            self._failures.failed(time.monotonic())
            self._error = error
            facts = self._failures.facts()
        self._events.failed(save.copy.step, f"{type(error).__name__}: {error}", facts)

    def _report_committed(self, save: Save, manifest: Manifest, write_s: float) -> None:
        self._events.committed(manifest, save.copy.stall_s, write_s)
        with self._mutex:
            self._cadence.committed(save.copy.stall_s + write_s)
