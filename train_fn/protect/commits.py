"""The commits of one rank: sent to the other ranks, compared with theirs, and reported."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from storage.run_control import Stop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, StepNotWhole
from train_fn.loop.report import Reporter
from train_fn.protect.agreement import Agreed, Agreement, Word
from train_fn.protect.arguments import LoopParts
from train_fn.protect.batches import EqualBatches, Share
from train_fn.protect.loop_state import LoopState, Values, received, sent
from train_fn.samples.ledger import Count

SETTLE_S = 2.0
"""Longest wait of a rank that leaves for what its peers said of the newest step: those that live
are milliseconds away from saying it."""
_NO_SAMPLES = Count()


class Commits:
    """Say what this rank commits, and read what all ranks said of it."""

    def __init__(
        self,
        ctx: WorkerContext,
        state: LoopState,
        agreement: Agreement,
        updates: Updates,
        reporter: Reporter,
    ) -> None:
        self._journal, self._is_first = ctx.journal, ctx.world_rank == 0
        self._state, self._agreement, self._reporter = state, agreement, reporter
        self.updates = updates
        self.stop: Stop | None = None
        """The stop that all ranks have read of."""
        self._equal = EqualBatches()
        self._values: Values = {}
        self._num_samples: int | None = None

    @property
    def fault(self) -> str | None:
        """Return how the ranks differ in the newest commit; None while that is not known."""
        return self._agreement.fault

    def start(self, share: Share | None, values: Values) -> None:
        """Send the newest commit to the other ranks.

        Args:
            share: what the step trained on, from Everstep's loader.
            values: the step's metrics.
        """
        self._values = values
        self._num_samples = share.whole.num_samples if share else None
        self.updates.commit()
        self._agreement.start(
            self._word(share.own if share else _NO_SAMPLES), share.whole if share else None
        )

    def end(self) -> None:
        """Tell the other ranks that this one has left its loop."""
        self._agreement.start(self._word(_NO_SAMPLES, has_ended=True), None)

    def _word(self, samples: Count, *, has_ended: bool = False) -> Word:
        hashed, values = sent(self._values) if self._is_first else (0, ())
        return Word(
            self._state.step,
            self.updates.num,
            self._journal.stop_requested,
            samples,
            has_ended,
            values,
            hashed,
            0 if has_ended else self._state.batch_mark,
        )

    def read(self) -> None:
        """Wait for what the ranks said of the newest commit. Raises StepNotWhole, and BadTask if
        ranks train on the same batches."""
        agreed = self._agreement.read()
        self._note(agreed)
        if agreed is not None and not agreed.num_ended:
            self._equal.note(agreed.batches)

    def settle(self) -> tuple[bool, StepNotWhole | None]:
        """Return whether all ranks are known to have made the newest commit, and how they differ.
        Call it once, after an error."""
        if not self._agreement.is_pending:
            return self.fault is None, None
        try:
            agreed = self._agreement.settle(SETTLE_S)
        except StepNotWhole as fault:
            return False, fault
        if agreed is not None:
            self._note(agreed)
        elif not self._is_first:
            self._report(self._values)  # what rank 0 had is not known
        return agreed is not None, None

    def _note(self, agreed: Agreed | None) -> None:
        if agreed is None:
            return
        self.stop = agreed.stop
        self.updates.agree()
        if not self._is_first and not agreed.num_ended:
            self._report(received(self._values, agreed.names_hash, agreed.values))

    def report(self) -> None:
        """Report the step. Other ranks than 0 do so once they know rank 0's numbers: a survivor
        reports again what rank 0 may not have delivered."""
        if self._is_first:
            self._report(self._values)

    def _report(self, values: Values) -> None:
        self._reporter.step_done(dict(values), self._num_samples)

    def close(self) -> None:
        """End the exchange on a rank whose peers live."""
        self._agreement.close()


# ---------------------------------------------------------------- updates

# How many optimizer steps a loop makes, and whether a commit made as many as the others.


class Updates:
    """Count the optimizer steps of this attempt, and those of each commit.

    A commit is regular if it made as many as the first one that the ranks agreed on. If a peer dies
    before it can say that it made the same step, a rank keeps the state of a regular commit only.
    """

    def __init__(self, *, may_skip: bool) -> None:
        """``may_skip``: a commit without an optimizer step is regular, too. A gradient scaler makes
        such ones."""
        self._may_skip = may_skip
        self._num_committed = 0
        self.num = 0
        """Optimizer steps since the attempt began."""
        self.of_commit = 0
        """Those of the newest commit."""
        self.usual: int | None = None
        """Those of the first commit that the ranks agreed on; None before."""
        self.is_regular = True
        """Whether the newest commit is one like the others."""

    def count(self) -> None:
        """Count an optimizer step."""
        self.num += 1

    @property
    def since_commit(self) -> int:
        """Return the steps since the newest commit."""
        return self.num - self._num_committed

    def commit(self) -> None:
        """Take the steps since the commit before as those of the newest one."""
        self.of_commit = self.num - self._num_committed
        self._num_committed = self.num
        usual = self.of_commit if self.usual is None else self.usual
        self.is_regular = self.of_commit == usual or (self._may_skip and not self.of_commit)

    def agree(self) -> None:
        """Note that the ranks agreed on the newest commit."""
        if self.usual is None and self.of_commit:
            self.usual = self.of_commit


# ---------------------------------------------------------------- gradients

# What a commit without an optimizer step means: a step that was left out is fine, gradients that
# are still being added up are not, as no state holds them.

_LOOKED_AT = 8


class Gradients:
    """Look at a loop's gradients and optimizers when it commits."""

    def __init__(self, state: LoopState) -> None:
        parts = state.parts
        self._state, self._parts = state, parts
        self._scalers = [
            name for name, each in parts.others.items() if isinstance(each, torch.amp.GradScaler)
        ]
        self._num_weights = _num_weights(parts)
        self._used: list[tuple[int, int]] = []
        """Marks of the gradients that an earlier commit has used."""

    def require_used(self, num_updates: int) -> None:
        """Raise BadTask if a commit leaves gradients or weights behind.

        Args:
            num_updates: optimizer steps since the commit before.
        """
        if (now := _num_weights(self._parts)) != self._num_weights:
            raise BadTask(refused_groups(self._num_weights, now))
        marks = [
            (id(weight.grad), weight.grad._version)
            for weight in self._parts.optimized()
            if weight.grad is not None
        ][:_LOOKED_AT]
        used, self._used = self._used, marks
        if num_updates:
            return
        if self._state.weights_have_changed():
            raise BadTask(
                f"step {self._state.step + 1} changed the trained weights, but no optimizer that "
                f"es.protect was given has stepped. {self._who_steps()}"
            )
        if marks in ([], used) or self._state.changed_parts(self._scalers):
            return
        if any(
            bool(weight.grad.any()) for weight in self._parts.optimized() if weight.grad is not None
        ):
            raise BadTask(
                f"state.step() was called for step {self._state.step + 1} while gradients are "
                "being added up: no state holds them, so a restart would lose them. Call it only "
                "after optimizer.step(): with es.loader(DataLoader), once for several batches; "
                "with es.loader(dataset), raise global_batch_size and cut the batch in the loop. "
                "If the step was left out on purpose, call optimizer.zero_grad() before"
            )

    def _who_steps(self) -> str:
        """Return which optimizer to pass: often one that the given one holds, as SAM's base."""
        inner = [
            f"{prefix}{name}"
            for prefix, optimizer in self._parts.optimizers.items()
            for name, value in vars(optimizer).items()
            if isinstance(value, torch.optim.Optimizer)
        ]
        if inner:
            return f"It holds another one: pass that, optimizer.{inner[0]}, with torn='shadow'"
        return (
            "Pass the optimizer whose step() the loop calls, and do not put another one in its "
            "place"
        )


def _num_weights(parts: LoopParts) -> dict[str, int]:
    return {
        name: sum(len(group["params"]) for group in optimizer.param_groups)
        for name, optimizer in parts.optimizers.items()
    }


def refused_groups(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Return the error for an optimizer that got other weights."""
    name = next(name for name in before if before[name] != now[name])
    return (
        f"the optimizer{name and f' {name!r}'} holds {now[name]} weights instead of "
        f"{before[name]} when the loop began, so no restart could load its state. Build it with "
        "all weights that are ever trained, and let requires_grad_() say which are at present"
    )
