"""What happens between two steps where an epoch ends: its samples are accounted for, the model is
evaluated, and the task's ``on_epoch_end`` runs.

The changes of that hook enter the state once an epoch, whatever breaks: the state says whether it
has still to run. If the attempt breaks in a hook that has changed the model by then, the rank
leaves no state, which would hold a part of the changes. Rank 0 published the one from before.
"""

from __future__ import annotations

import logging
import time

import torch

from everstep.wire.events import EventKind
from train_fn.checks.check import Moment
from train_fn.checks.trained import LearningRates
from train_fn.loop.evaluate import evaluate, evaluation_is_due, note_best
from train_fn.loop.replica import Replica
from train_fn.loop.sharded import rows_alone
from train_fn.samples.sampler import seed_micro_batch
from train_fn.session.session import Session
from train_fn.state.tensor_tree import tree_digest
from train_fn.step.timing import StepClock
from train_fn.tasks.protocol import where

logger = logging.getLogger(__name__)

_HOOK = -3
"""Seeds what the hook draws. Micro-batches have numbers from 0 on, and other code of a step has
others (``train_fn/loop/commit.py``)."""
TORN = "the task's on_epoch_end had changed a part of the state"
"""Why a rank leaves no state, if its attempt broke in the hook."""


class EpochEnd:
    """Close the epochs of one attempt."""

    def __init__(
        self, session: Session, replica: Replica, rates: LearningRates, clock: StepClock
    ) -> None:
        self._session, self._ctx, self._clock = session, session.ctx, clock
        self._replica, self._state, self._rates = replica, replica.state, rates
        self._task = replica.parts.task
        self._has_hook = getattr(self._task, "on_epoch_end", None) is not None
        self._before: str | None = None
        """Digest of the state before the hook, which runs; None if it does not."""

    def close(self, *, is_new: bool = True) -> bool:
        """Close the epoch and evaluate the model if the present step calls for it and the state
        does not have it yet. After a resume, this finishes what was interrupted. A collective.

        Return whether the present state was just found to be the best so far.

        Args:
            is_new: whether a step made this state. It is then published before code of the user
                runs, which may end all ranks at once. A restored state is on a node already.
        """
        state = self._state
        evaluates = evaluation_is_due(self._ctx, self._replica.parts)
        closes = state.closed_epochs < state.epoch
        if closes:
            self._close_epoch(evaluates)
        if is_new and (evaluates or state.hook_due):
            self._session.keeper.publish_now()
        is_best = evaluates and self._evaluate()
        calls = state.hook_due and self._has_hook  # a fork may have another task
        rested = state.evaluated_step == state.step or calls
        if calls:
            self._call_hook()
        if closes or calls or (evaluates and state.k == 0):
            self._replica.passes.moving.renew()
            self._renew_task_state()
        state.hook_due, self._before = False, None
        if rested:
            self._clock.restart()
        return is_best

    def is_torn(self) -> bool:
        """Return whether a hook that has not ended yet has changed the state."""
        return self._before is not None and self._before != self._digest()

    def _close_epoch(self, evaluates: bool) -> None:
        """Count the epoch's samples and report it."""
        state, reporter = self._state, self._session.reporter
        closed = state.ledger.close_epoch()
        seconds = reporter.seconds_of_epoch()
        facts = {
            "epoch": state.closed_epochs,
            **closed,
            "seconds": round(seconds, 3),
            "rests": evaluates or self._has_hook,
        }
        if state.scaler.is_enabled():
            facts["skipped_steps"] = state.skipped.total
        reporter.emit(EventKind.EPOCH_COMPLETED, facts)
        state.closed_epochs += 1
        state.hook_due = self._has_hook

    def _evaluate(self) -> bool:
        """Evaluate the present state and report its metrics. Return whether it is the best so
        far."""
        state, reporter, best_by = self._state, self._session.reporter, self._ctx.spec.best_by
        reporter.hand_over()
        metrics = evaluate(self._ctx, self._replica)
        metrics = reporter.limited(metrics, None if best_by is None else best_by[0])
        state.metrics, state.evaluated_step = metrics, state.step
        if metrics:
            facts = {
                "step": state.step,
                "epoch": (state.step - 1) // state.steps_per_epoch,
                "metrics": metrics,
                "rests": state.hook_due,
            }
            reporter.emit(EventKind.EVALUATED, facts)
        reporter.start_clock()
        return note_best(self._ctx, state, metrics)

    @torch.no_grad()
    def _call_hook(self) -> None:
        """Call the task's ``on_epoch_end(model, epoch, metrics)``; ``epoch`` counts from 0.

        A collective: no rank begins the next step before the hook has returned on all of them. So a
        rank whose hook takes long is not taken for a hung one by peers that wait for its gradients.
        """
        began, state, reporter = time.monotonic(), self._state, self._session.reporter
        epoch = state.closed_epochs - 1
        reporter.hand_over()
        self._before = self._digest() if state.piece is None else None
        source = where(self._task, "on_epoch_end")
        # What it draws is the same on all ranks, and in all attempts.
        seed_micro_batch(self._replica.parts.sampler.seed, state.step, _HOOK, self._ctx.device)
        is_watched = rows_alone(state.gathered, source, self._replica.order)
        with self._replica.checks.around(Moment.EPOCH_HOOK, source), is_watched:
            self._task.on_epoch_end(state.model, epoch, dict(state.metrics))  # type: ignore[attr-defined]
        self._rates.note_options()
        seconds = round(time.monotonic() - began, 3)
        reporter.sign(EventKind.EPOCH_HOOK_DONE, {"epoch": epoch, "seconds": seconds})
        reporter.start_clock()

    def _renew_task_state(self) -> None:
        """Save the task's state again, since the hook may have changed it, and compare it between
        ranks. A collective."""
        task_state, state = self._replica.parts.task_state, self._state
        if not task_state:
            return
        state.task = task_state.capture()
        digests = self._replica.peers.gather(tree_digest(state.task))
        if len(set(digests)) > 1:
            logger.warning(
                "state_dict() of the task differs between ranks; after a restart all ranks have "
                "that of one rank. Compute it from what is the same on all ranks"
            )

    def _digest(self) -> str:
        """Return a digest of what a hook may change: the model, its modes, the optimizer's options
        and values."""
        state = self._state
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in state.optimizer.param_groups
        ]
        modes = [module.training for module in state.model.modules()]
        values = state.optimizer.state_dict()["state"]
        return tree_digest(
            [dict(state.model.state_dict()), state.unsaved(), modes, options, values]
        )
