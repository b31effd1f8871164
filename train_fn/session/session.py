"""The protocol of a run in its order: what every rank does from the state that it takes over to the
one that it leaves.

A step is committed by all ranks or by none, and whoever survives holds the state. Every rank holds
the whole of it, bit by bit the same between two steps. So one rank that lives is enough to go on.

- **restore**: the ranks agree on the newest trustworthy state, and all take it over.
- **begin**: the attempt's beginning is durable, and no newer attempt has the run. Until then no
  step is taken.
- **agree**: what all ranks said of a step (``train_fn/step/report.py``) is here, and says the same.
  In Everstep's loop it travels with the gradients, and comes before the step changes anything. In a
  user's loop it follows the commit, and comes before anything of the step is kept or changed.
- **commit**: from ``change`` to the end of ``commit`` the state belongs to no step, and no rank
  waits for another one. So all ranks get through, or the one that does not leaves no state.
- **keep**: the state is saved and published, if that is due.
- **leave**: after an error the rank lets its peers go, and keeps the state of the last committed
  step on its node. **finish** is the other way out: the last checkpoint.

Two loops live by it: ``train_fn/loop/attempt.py``, whose steps Everstep makes, and
``train_fn/protect/protected.py``, whose steps are a user's.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from everstep.wire.events import EventKind
from storage.claims import claim_attempt, successor
from storage.errors import StorageUnavailable
from storage.run_control import Stop
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import FINAL_PATIENCE_S, STOP_PATIENCE_S, Saver
from train_fn.context import WorkerContext
from train_fn.errors import PeersGone, Replaced, StepNotWhole
from train_fn.recovery.evidence import RankError, describe_error
from train_fn.session.report import Reporter
from train_fn.session.speed import SAMPLES_ALONE, Speed
from train_fn.snapshots.keeper import Adopt, Exchange, Remains, Restored, StateKeeper
from train_fn.snapshots.pieces import PieceKeeper
from train_fn.snapshots.restore import find_newest
from train_fn.snapshots.store import snapshot_store
from train_fn.snapshots.whole import WholeKeeper
from train_fn.state.run_state import RunState
from train_fn.step.nccl import fails_by_itself
from train_fn.step.peers import Peers, end_process_group

CLAIM_S = 30.0
"""Longest wait until the event of an attempt's beginning is durable."""

logger = logging.getLogger(__name__)


class Session:
    """One rank's part in an attempt."""

    reporter: Reporter
    saver: Saver
    restored: Restored
    """Where the attempt begins."""
    is_open = False  # whether reporter and saver are there

    def __init__(
        self, ctx: WorkerContext, state: RunState, peers: Peers | None = None, heirs: int = 1
    ) -> None:
        """``heirs``: as ``every`` of ``PieceKeeper``."""
        self.ctx, self.state = ctx, state
        self.peers = peers = peers or Peers(ctx.world_rank, ctx.world_size, ctx.device)
        self.keeper: StateKeeper = WholeKeeper(ctx, peers, state)
        if state.piece is not None:
            self.keeper = PieceKeeper(ctx, peers, state, heirs)

    # -- restore

    def restore(
        self,
        adopt_origin: Adopt,
        *,
        before_load: Callable[[Restored], None] = lambda restored: None,
    ) -> None:
        """Claim the attempt, agree on the newest trustworthy state, and load it on every rank that
        lacks it. A collective.

        Args:
            adopt_origin: turns the state of another run's checkpoint into the initial one of this
                run.
            before_load: called before anything is loaded, with where the attempt begins.
        """
        ctx, keeper, state = self.ctx, self.keeper, self.state
        if ctx.world_rank == 0:
            # Before anything is read that older attempts leave.
            claim_attempt(ctx.run_dir, (ctx.submission, ctx.attempt))
        try:
            keeper.join()
            restored, found = find_newest(ctx, self.peers, state, adopt_origin, keeper)
            self.restored = restored
            before_load(restored)
            state.load_state_dict(keeper.spread(restored, found))
            state.begun_at = state.step
            snapshot_store(ctx).remove_after(state.step)
        except BaseException:
            keeper.let_go()
            raise
        logger.info(
            "starting at step %d from %s", state.step, restored.checkpoint or restored.source
        )

    def announce(self) -> None:
        """Report where the attempt begins."""
        state, restored, journal = self.state, self.restored, self.ctx.journal
        if self.ctx.world_rank != 0:
            return
        best, origin = state.best, restored.origin
        data = {
            "step": state.step,
            "epoch": state.epoch,
            "source": restored.source,
            "checkpoint": restored.checkpoint,
            "best": best and {"metric": best.metric, "value": best.value, "step": best.step},
            "rejected": [
                {"name": each.name, "problem": each.problem} for each in restored.rejected
            ],
            **({"origin": asdict(origin)} if origin else {}),
        }
        journal.emit(EventKind.RESTORED, data)
        journal.flush(0.0)  # it travels while the loader starts

    # -- begin

    def open(
        self,
        speed: Speed = SAMPLES_ALONE,
        exchange: Exchange | None = None,
    ) -> None:
        """Build what reports, saves and publishes the steps. What may fail comes before what starts
        threads.

        Args:
            exchange: by which the ranks of a sharded model say what they hold.
        """
        copies, keeper = BoundaryCopies(self.state), self.keeper
        self.reporter = Reporter(self.ctx, self.state, speed)
        self.saver = Saver(self.ctx, self.state, copies, keeper.collect)
        self.is_open = True
        keeper.open(copies, exchange or self.peers.exchange, self.restored)
        self.reporter.report_up_to(keeper.committed)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Report again what the journal may lack, make sure that the run is this attempt's, and
        report that training begins. ``facts`` are the data of that event."""
        self.reporter.report_again()
        if self.ctx.world_rank == 0:
            claim(self.ctx)
            self.ctx.journal.emit(EventKind.TRAINING_STARTED, dict(facts))

    # -- agree

    def require_current(self) -> None:
        """Raise PeersGone if the attempt was given up. Call it once a step, before ranks meet."""
        if self.ctx.is_abandoned():
            raise PeersGone("this attempt was given up; another one follows")

    @staticmethod
    def agree(step: int, fault: str | None) -> None:
        """Go on if all ranks made the same of the step after ``step`` steps done. They decide
        alike, by the same reports. Raises StepNotWhole."""
        if fault is not None:
            raise StepNotWhole(step, fault)

    # -- commit

    def change(self) -> None:
        """Let the state belong to no step until ``commit`` has ended."""
        self.state.complete = False

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Let the block make the state that of the next step, and count that step. It has no
        collective. If it fails, the state stays that of no step."""
        self.change()
        before = self.state.step
        yield
        assert self.state.step == before + 1, f"step {before + 1} was not counted once"
        self.state.complete = True

    # -- keep

    def keep(self, *, is_due: bool, is_best: bool = False, publishes: bool | None = None) -> None:
        """Save and publish the state.

        Args:
            is_due: a checkpoint is due. All ranks say the same.
            publishes: a snapshot is due; None to let the keeper decide.
        """
        self.save(is_due=is_due, is_best=is_best)
        self.keeper.after_step(publishes)

    def save(self, *, is_due: bool, is_best: bool) -> None:
        """Save the state if that is due, or it is the best so far. All ranks say the same."""
        self.saver.save_if_due(due=is_due, is_best=is_best)
        if is_due or is_best:
            self.keeper.save()

    def report_safe_steps(self, said: int = 0) -> list[int]:
        """Let steps be reported that no single death takes any more. Return what each rank said. A
        collective if the keeper has a gate. Raises PeersGone."""
        of_ranks = self.keeper.gate(said) if self.keeper.has_gate else [said]
        self.reporter.report_up_to(self.keeper.committed)
        return of_ranks

    # -- finish

    def finish(
        self,
        stop: Stop | None,
        *,
        is_best: bool = False,
        reported: int = 0,
        on_saved: Callable[[int], None] = lambda step: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Commit the final checkpoint, then remove the run's snapshots from this node. A
        collective.

        A run that pauses because its storage fails leaves its state on the node instead. Raises
        CheckpointFailed on every rank if the final checkpoint cannot be committed.

        Args:
            stop: why the ranks agreed to stop; None if all steps are done.
            is_best: whether the present state is the best so far.
            reported: step of the newest checkpoint that was reported; 0 for none.
            on_saved: called with the step of a newer one.
            close: ends what the loop's steps use.
        """
        self.reporter.hand_over()
        error, committed = self._save_last(stop, is_best=is_best, reported=reported)
        if committed > reported:
            on_saved(committed)
        self.reporter.close()
        self.saver.close()
        close()
        self.keeper.close()
        if error is not None:
            logger.warning(
                "stopped without a final checkpoint; the state stays on this node: %s", error
            )
            self.keeper.leave_unsaved()
        else:
            snapshot_store(self.ctx).remove_all()

    def _save_last(
        self, stop: Stop | None, *, is_best: bool, reported: int
    ) -> tuple[Exception | None, int]:
        """Commit the present state as the final checkpoint. Return why it was not committed, which
        only a run may go on with that pauses because its saves fail. Return with it the step of the
        newest committed checkpoint, if it is newer than step ``reported``, else 0."""
        peers, saver, keeper = self.peers, self.saver, self.keeper
        # Before the ranks meet below: the first rank that leaves removes the node's snapshots.
        keeper.begin_last_save()
        saving = saver.begin_last(
            is_best=is_best, patience_s=FINAL_PATIENCE_S if stop is None else STOP_PATIENCE_S
        )
        # The ranks meet again and again: a save may take longer than a collective may.
        while not peers.share(saver.has_ended(saving, keeper.meets_every_s), 0):
            keeper.meet()
        error = saving.exception()
        is_unsaved = error is not None and stop is not None and saver.stop is not None
        outcome = error, is_unsaved, saver.newest_committed(reported)
        error, is_unsaved, committed = peers.share(outcome, 0)
        if error is not None and not is_unsaved:
            raise error
        return error, committed


def claim(ctx: WorkerContext) -> None:
    """Make sure that this attempt's beginning is durable, and then that no newer submission or
    attempt has begun. Called by rank 0 before the first step; without it no rank can take one.

    A submission writes its journal, and an attempt its claim, before it reads anything of older
    ones. So one of two things happens. The newer one sees where this attempt began, and thus which
    states are void. Or this attempt sees the newer one's journal or claim, and leaves no state.

    Raises:
        StorageUnavailable: the beginning did not become durable.
        Replaced: a newer submission, or attempt, has begun.
    """
    if not ctx.journal.flush(CLAIM_S):
        raise StorageUnavailable(
            f"the journal did not take the attempt's beginning within {CLAIM_S:g} s; is the "
            "storage writable?"
        )
    newest = max(ctx.run_dir.submissions(), default=0)
    if newest > ctx.submission:
        raise Replaced(
            f"submission {newest} of run {ctx.run_dir.run_id} has taken over from submission "
            f"{ctx.submission}"
        )
    why = successor(ctx.run_dir, (ctx.submission, ctx.attempt))
    if why is not None:
        raise Replaced(why)


# ---------------------------------------------------------------- leave


class Leaver(Protocol):
    """What a loop does when its attempt broke, in this order."""

    def let_go(self, cause: BaseException, error: RankError) -> None:
        """Begin nothing any more, and drop what holds on to the peers."""

    def close(self) -> None:
        """End what the steps use beside the peers."""
        return None

    def keep(self) -> Remains:
        """Leave the state of the last committed step, by the session's keeper."""


def leave(
    ctx: WorkerContext, session: Session | None, cause: BaseException, loop: Leaver
) -> tuple[RankError, str | None]:
    """Let the peers go, and leave the state of the last committed step. Return what happened, and
    why no state is kept, if none is.

    Peers first: only the neighbours of a dead rank notice its death by themselves, and each rank
    frees the next one by leaving. Nobody should wait until others have written their state. Where
    leaving frees nobody, the state comes first: an abort may take long.

    Args:
        session: None if the error came before there was one.
    """
    frees_peers = fails_by_itself()
    error = describe_error(cause, ctx.world_rank)
    if session is not None:
        session.keeper.let_go()
    loop.let_go(cause, error)
    is_open = session is not None and session.is_open
    if session is not None and is_open:
        session.saver.close()
    gc.collect()
    if frees_peers:
        end_process_group()
    loop.close()
    kept = loop.keep()
    if not frees_peers:
        end_process_group()
    if session is not None and is_open:
        session.reporter.close()
    error = dataclasses.replace(error, step=kept.step, snapshot_step=kept.snapshot_step)
    return error, kept.problem


def not_copied(torn: list[str]) -> str:
    """Return why a state is torn in which the failed step changed these tensors."""
    return (
        f"the failed step changed {', '.join(torn)}, and no copy was kept of what was there before"
    )
