"""``es.protect``: a user's own loop under the machinery that keeps, elects and restores states.

The order within a step is what makes it safe. The user's backward pass sums the gradients. Before
the first optimizer steps, ``_settle`` reads what the ranks said of the step before: from here on
the state is torn. ``step`` makes it whole again. Between the two lies no collective of one
optimizer's loop, so all ranks get past it, or none.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from typing import Any

import torch

from everstep.wire.events import EventKind
from storage.run_control import Stop
from train_fn.checkpoints.fork import Origin
from train_fn.checkpoints.saver import Saver
from train_fn.checkpoints.state_copy import BoundaryCopies
from train_fn.errors import BadTask, PeersGone, StepNotWhole
from train_fn.loop.claim import claim
from train_fn.loop.departure import keep_state, not_copied
from train_fn.loop.final_checkpoint import save_last_state
from train_fn.loop.reporter import Reporter
from train_fn.loop.restore import announce, take_over
from train_fn.own_loop import Left, StopAgreed
from train_fn.protect.agreement import Agreed, Agreement, Word
from train_fn.protect.arguments import Parts, Torn
from train_fn.protect.batches import Batches, Share
from train_fn.protect.loop_state import LoopState
from train_fn.protect.metrics import Values, numbers_of, received, sent
from train_fn.protect.place import Home, OnItsOwn, find_home
from train_fn.protect.volatile import SharedBuffers
from train_fn.protect.watch import OrderWatch
from train_fn.recovery.rank_error import describe_error
from train_fn.samples.randomness import seed_micro_batch
from train_fn.snapshots.forgotten import sweep_forgotten
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.snapshots.publisher import Publisher, snapshots_of
from train_fn.snapshots.store import snapshot_store
from train_fn.state.tensor_tree import copy_to_cpu, size_bytes
from train_fn.step.nccl import fails_by_itself, group_backend
from train_fn.step.peers import Peers, end_process_group

SETTLE_S = 2.0
"""Longest wait of a rank that leaves for what its peers said of the newest step: those that live
are milliseconds away from saying it."""
EXACT = (
    "State and samples are exact: every sample of an epoch is used exactly once, whatever dies and "
    "at any world size; the ledger proves it."
)
UP_TO_LOADER = "The state is exact; which samples a step sees after a restart is up to your loader."
LOADER_RESTORED = (
    "The state is exact, and your loader goes on from its own state_dict, as one rank had it."
)
_TORN = (
    "the rank was between two states: an optimizer had stepped, and state.step() had not been "
    "called. Call it right after the optimizer's step, or pass torn='shadow'"
)

logger = logging.getLogger(__name__)


class Protected:
    """The state of a user's loop. ``with state:`` takes over the newest trustworthy one, and leaves
    one if anything breaks. ``state.step(loss=loss)`` commits a step."""

    def __init__(self, parts: Parts, torn: Torn, settings: OnItsOwn) -> None:
        self._parts, self._torn, self._settings = parts, torn, settings
        self._state = LoopState(parts)
        self._device = next(iter(self._weights()), torch.empty(0)).device
        self.left: Left | None = None
        """How an error ended the loop."""
        self.rank, self.world_size = 0, 1
        self._home: Home | None = None
        self._is_open = False
        self._agreement: Agreement | None = None
        self._saver: Saver | None = None
        self._publisher: Publisher | None = None
        self._reporter: Reporter | None = None
        self._hooks: list[Any] = []
        self._shadows: list[dict[str, Any] | None] = [None, None]
        """The state of the newest commit, and that before it, if ``torn`` is ``shadow``."""
        self._share: Share | None = None
        """What the present step trains on, from Everstep's loader."""
        self._is_settled = False
        self._stop: Stop | None = None
        """The stop that all ranks have read of."""
        self._num_updates = self._updates_committed = self._last_updates = 0
        self._usual_updates: int | None = None
        """Optimizer steps between two commits, of the first that the ranks agreed on."""
        self._is_regular = True
        self._values: Values = {}
        self._num_samples: int | None = None
        self._total_steps: int | None = None

    @property
    def step_number(self) -> int:
        """Return the steps done."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Return the epoch of the next step, as ``es.loader`` counts; else 0."""
        return self._state.epoch

    # -- the beginning

    def __enter__(self) -> Protected:
        if self._home is not None:
            raise BadTask("`with state:` was entered twice; make a new run for another training")
        self._home = find_home(self, self._settings, self._device)
        try:
            self._begin(self._home)
        except BaseException as exc:
            self._fail(exc)
            raise
        return self

    def _begin(self, home: Home) -> None:
        ctx, state = home.ctx, self._state
        self.rank, self.world_size = ctx.world_rank, ctx.world_size
        self._peers = peers = Peers(ctx.world_rank, ctx.world_size, ctx.device)
        sweep_forgotten(ctx)
        restored = take_over(ctx, peers, state, _adopted)
        announce(ctx, state, restored)
        if ctx.world_rank == 0:
            claim(ctx)
        self._agreement = Agreement(peers)
        self._buffers = SharedBuffers(self._parts.wrapped, peers)
        self._watch = OrderWatch(state, peers)
        copies = BoundaryCopies(state)
        self._reporter = reporter = Reporter(ctx, state)
        self._saver = Saver(ctx, state, copies)
        self._publisher = Publisher(ctx, state, copies)
        self._take_shadow()
        ctx.report_state_bytes(size_bytes(state.state_dict()))
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update)
            for optimizer in self._parts.optimizers.values()
        ]
        reporter.report_again()
        self._tell_beginning()
        if restored.origin is not None:
            # After its first save a fork no longer depends on the run that it comes from.
            self._saver.offer(due=True, is_best=True)
        self._is_open = True
        self.reseed()
        reporter.start_clock()

    def attach(self, data: Batches, total_steps: int | None) -> None:
        """Let the state follow this data; called by ``es.loader``."""
        self._require_open()
        is_known = self._state.data is data and self._total_steps == total_steps
        self._state.attach(data)
        self._total_steps, self._share = total_steps, None
        if not is_known:
            self._tell_beginning()

    def take(self, share: Share) -> None:
        """Begin the step that trains on this share; called by ``es.loader``."""
        self._require_open()
        if self._share is not None:
            raise BadTask(
                f"es.loader: the batch of step {self.step_number + 1} was not committed; call "
                "state.step() once for every batch. To accumulate gradients, use a larger "
                "global_batch_size and cut the batch in the loop"
            )
        self._share = share
        self.reseed()

    def reseed(self) -> None:
        """Seed Python's, numpy's and torch's generators by the number of the next step and the
        rank. Call it if a loop with a loader of its own draws between two steps."""
        seed_micro_batch(self._state.seed, self._state.step, self.rank, self._device)

    # -- a step

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Mark the state torn; called before an optimizer changes anything."""
        if self._torn == "refuse" and (len(args) > 1 or kwargs.get("closure") is not None):
            raise BadTask(
                "optimizer.step(closure) runs forward and backward inside of the step: pass "
                "torn='shadow' to es.protect"
            )
        if not self._is_settled:
            self._settle()
        self._state.complete = False
        self._num_updates += 1

    def _settle(self) -> None:
        """Read what the ranks said of the last commit, before anything of it changes. A collective:
        every rank has run its backward pass."""
        assert self._home is not None
        if self._home.ctx.is_let_go():
            raise PeersGone("this attempt was given up; another one follows")
        self._read()
        if self._torn == "refuse":
            self._buffers.share()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._peers.require_whole()
        self._watch.about_to_change()
        self._is_settled = True

    def step(self, **metrics: Any) -> None:
        """Commit a step: its state is whole, and the same on all ranks. Reports ``metrics`` of rank
        0, saves a checkpoint if one is due, and ends the loop if the run is to stop.

        Call it on every rank, once for each step, right after the optimizer and the scheduler.
        """
        self._require_open()
        values, share = numbers_of(metrics), self._share
        if self._state.data is not None and share is None:
            raise BadTask(
                "state.step() was called without a batch of es.loader; call it once for every batch"
            )
        if not self._is_settled:
            self._settle()
        if self._torn == "shadow":
            # Not before: a graph that waits for another optimizer's step may hold them.
            self._buffers.share()
        assert self._saver is not None and self._agreement is not None
        stop, due = self._stop, self._saver.is_due()
        self._state.commit(share)
        self._take_shadow()
        self._state.complete, self._is_settled = True, False
        self._share, self._values = None, values
        self._note_regular()
        self._agreement.start(self._word(share), share.whole if share else None)
        self._watch.committed()
        self._report(share)
        self._keep(due, stop)
        if stop is not None:
            self._finish(stop)
            raise StopAgreed(stop)
        self.reseed()

    def _word(self, share: Share | None, *, has_ended: bool = False) -> Word:
        assert self._home is not None
        hashed, values = sent(self._values) if self.rank == 0 else (0, ())
        return Word(
            self._state.step,
            self._num_updates,
            self._home.ctx.journal.stop_requested,
            share.own if share else Word._field_defaults["samples"],
            has_ended,
            values,
            hashed,
        )

    def _read(self) -> None:
        """Wait for what the ranks said of the newest commit. Raises StepNotWhole."""
        assert self._agreement is not None
        self._note_agreed(self._agreement.read())

    def _note_agreed(self, agreed: Agreed | None) -> None:
        if agreed is None:
            return
        self._stop = agreed.stop
        if self._usual_updates is None and self._last_updates:
            self._usual_updates = self._last_updates
        if self.rank and not agreed.num_ended:
            self._tell_step(received(self._values, agreed.names_hash, agreed.values))

    def _note_regular(self) -> None:
        """Note whether this commit is one like the others. Only such a one is left where a peer
        died before it could say that it had committed it, too."""
        self._last_updates = self._num_updates - self._updates_committed
        self._updates_committed = self._num_updates
        usual = self._last_updates if self._usual_updates is None else self._usual_updates
        allowed = {usual, 0} if self._parts.has_scaler else {usual}
        self._is_regular = self._last_updates in allowed

    def _report(self, share: Share | None) -> None:
        """Report the step. Other ranks than 0 do so once they know rank 0's numbers: a survivor
        reports again what rank 0 may not have delivered."""
        self._num_samples = share.whole.num_samples if share else None
        if self.rank == 0:
            self._tell_step(self._values)

    def _tell_step(self, values: Values) -> None:
        assert self._reporter is not None
        self._reporter.step_done(dict(values), self._num_samples)

    def _keep(self, due: bool, stop: Stop | None) -> None:
        """Save and publish what is due. Nothing of a step is kept before the ranks have agreed on
        it."""
        assert self._saver and self._publisher and self._reporter
        is_closing = self._state.is_closing
        if due or is_closing or stop is not None or self._publisher.is_due():
            self._read()
        if is_closing:
            seconds = round(self._reporter.seconds_of_epoch(), 3)
            facts = {**self._state.close_epoch(), "seconds": seconds, "rests": False}
            self._reporter.emit(EventKind.EPOCH_COMPLETED, facts)
            self._take_shadow(renews=True)
        self._saver.offer(due=due, is_best=False)
        self._publisher.offer()

    def _take_shadow(self, *, renews: bool = False) -> None:
        """Copy the whole state, if a step may be torn by a collective. The copy before stays whole
        meanwhile."""
        if self._torn != "shadow":
            return
        newest, older = self._shadows
        taken = copy_to_cpu(self._state.state_dict(), older if not renews else None)
        self._shadows = [taken, older if renews else newest]

    # -- the end

    def __exit__(self, kind: Any, exc: BaseException | None, trace: Any) -> None:
        if not self._is_open:
            return  # the ranks agreed to stop
        if exc is not None:
            fault = self._fail(exc)
            if fault is not None:
                raise fault from exc
            return
        try:
            self._end_loop()
        except BaseException as broken:
            self._fail(broken)
            raise

    def _end_loop(self) -> None:
        if not self._state.complete or self._share is not None:
            raise BadTask(
                f"the loop ended within step {self.step_number + 1}: call state.step() after the "
                "optimizer's step, before `break` or the end of `with state:`"
            )
        self._finish(None)

    def _finish(self, stop: Stop | None) -> None:
        """Commit the final checkpoint. A collective."""
        assert self._home and self._agreement
        assert self._saver and self._publisher and self._reporter
        ctx = self._home.ctx
        self._read()
        # A rank that leaves its loop before its peers must not meet them in a collective below.
        self._agreement.start(self._word(None, has_ended=True), None)
        self._read()
        self._reporter.hand_over()
        self._publisher.close()
        error, _ = save_last_state(self._peers, self._saver, stop, is_best=False, reported=0)
        self._reporter.close()
        self._saver.close()
        if error is not None:
            logger.warning(
                "stopped without a final checkpoint; the state stays on this node: %s", error
            )
            leave_snapshot(ctx, copy_to_cpu(self._state.state_dict()))
        else:
            snapshot_store(ctx).remove_all()
        self._close_hooks()
        self._agreement.close()
        self._is_open = False
        self._home.finished(stop)

    def _fail(self, cause: BaseException) -> StepNotWhole | None:
        """Let the peers go, leave the state of the last commit on this node, and return the fault
        that the ranks' last words show."""
        assert self._home is not None
        self._is_open = False
        ctx = self._home.ctx
        error = describe_error(cause, ctx.world_rank)
        self._close_hooks()
        if self._saver is not None:
            self._saver.close()
        frees_peers = fails_by_itself()
        is_known, fault = self._last_words()
        gc.collect()
        if frees_peers:
            end_process_group()
        if self._publisher is not None:
            self._publisher.close()
        is_restored = self._saver is not None
        problem: str | None = "the rank had no state yet"
        if is_restored:
            problem = keep_state(ctx, self._state, lambda: self._whole(is_known))
        if not frees_peers:
            end_process_group()
        if self._reporter is not None:
            self._reporter.close()
        if fault is not None:
            error = describe_error(fault, ctx.world_rank)
        step = self._state.step if is_restored else None
        kept = step if problem is None else None
        self.left = Left(
            dataclasses.replace(error, step=step, phase="protect", snapshot_step=kept), problem
        )
        self._home.failed(self.left)
        return fault

    def _last_words(self) -> tuple[bool, StepNotWhole | None]:
        """Return whether all ranks are known to have made the newest commit, and how they
        differ."""
        agreement = self._agreement
        if agreement is None or not agreement.is_pending:
            return agreement is not None and agreement.fault is None, None
        try:
            agreed = agreement.settle(SETTLE_S)
        except StepNotWhole as fault:
            return False, fault
        if agreed is not None:
            self._note_agreed(agreed)
        elif self.rank:
            self._tell_step(self._values)  # what rank 0 had is not known
        return agreed is not None, None

    def _whole(self, is_known: bool) -> dict[str, Any] | str:
        """Return the state of the newest commit that may be left, or why there is none."""
        assert self._agreement is not None
        if self._agreement.fault is not None:
            older = self._shadows[1]
            if older is not None:
                return older  # the ranks agreed on that one
            return f"the ranks did not make the same step: {self._agreement.fault}"
        if not is_known and not self._is_regular:
            return (
                f"step {self._state.step} made {self._last_updates} optimizer steps instead of "
                f"{self._usual_updates}, and a peer that died did not say whether it did, too"
            )
        if self._torn == "shadow":
            return self._shadows[0] or _TORN
        if not self._state.complete:
            return _TORN
        found = self._state.last_committed()
        return not_copied(found) if isinstance(found, list) else found

    def _close_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _require_open(self) -> None:
        if not self._is_open:
            raise BadTask("es.protect: use the state inside of `with state:`")

    def _weights(self) -> list[torch.Tensor]:
        return [value for model in self._parts.models.values() for value in model.parameters()]

    def _tell_beginning(self) -> None:
        """Report what is trained, and what holds for it."""
        assert self._home is not None
        ctx, data = self._home.ctx, self._state.data
        if ctx.world_rank != 0:
            return
        sampler = self._state.sampler
        guarantee = LOADER_RESTORED if self._parts.loaders else UP_TO_LOADER
        ctx.journal.emit(
            EventKind.TRAINING_STARTED,
            {
                "total_steps": self._total_steps,
                "steps_per_epoch": sampler.steps_per_epoch if sampler else None,
                "num_samples": sampler.num_samples if sampler else None,
                "num_parameters": sum(value.numel() for value in self._weights()),
                "micro_batch_size": None,
                "snapshots": snapshots_of(ctx),
                "guarantee": EXACT if data is not None else guarantee,
                "device": str(ctx.device),
                "backend": group_backend(ctx.device),
            },
        )


def _adopted(state: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Return another run's state as the initial one of this run."""
    return {**state, "best": None, "parent": origin.name, "tail": "[]"}
