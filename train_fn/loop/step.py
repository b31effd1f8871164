"""How the ranks exchange what they have made of a step: the gradients, and the reports.

There is one loop over micro-batches (``run_passes`` of ``attempt.py``) and four ways to exchange:
by DDP (``StepExchange``), by FSDP2 (``ShardedStep``), by sums whose bits are the same at every
world size (``TreeStep``), and by the optimizers' own steps (``OwnStep``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.spec.sections import ScheduleSpec
from train_fn.checks.order import CallOrder, require_same_order
from train_fn.checks.trained import LearningRates
from train_fn.elastic.exchange import Exchange
from train_fn.errors import BadTask
from train_fn.loop.build import Parts
from train_fn.loop.own_step import OwnUpdates
from train_fn.loop.passes import Passes
from train_fn.samples.ledger import Count
from train_fn.samples.sampler import MicroBatch
from train_fn.session.session import Session
from train_fn.state.optim import lr_factor
from train_fn.step.fingerprints import Fingerprints, local
from train_fn.step.report import StepTotals, Votes
from train_fn.step.report_sums import StepPlan
from train_fn.tasks.protocol import LOSS, MOST_VALUES, Sum, where


def set_rates(rates: LearningRates, schedule: ScheduleSpec, parts: Parts) -> float | None:
    """Set the learning rates of the present step, unless the task's scheduler has. Return that of
    the first group; None if its optimizer computes its own."""
    state = parts.state
    if state.scheduler is not None:
        return rates.present()
    return rates.set(lr_factor(schedule, state.step, parts.total_steps, state.steps_per_epoch))


class StepExchange:
    """Exchange a step by DDP: the reports travel with the gradients.

    A step calls ``begin``; for each of its ``passes``, inside ``around``, ``forward``, ``add``, and
    ``pass_back``, or in the last one ``last_pass``; and ``take``.
    """

    def __init__(self, passes: Passes, fingerprints: Fingerprints) -> None:
        self._passes, self._peers, self._state = passes, passes.peers, passes.parts.state
        self._fingerprints, self._scale = fingerprints, 1.0
        self.digests_ahead = passes.used is None and not passes.peers.on_cpu
        """Whether the sums are on their way once the last pass has returned."""

    def begin(self, plan: StepPlan) -> None:
        """Begin the present step of the state."""
        self._scale = self._passes.loss_scale(plan.num_samples)
        self._passes.sums.begin(self._state.step, plan.expected, self._fingerprints.header)

    def passes(self, share: Sequence[MicroBatch]) -> Sequence[MicroBatch | None]:
        """Return the forward passes of a rank with this share; None stands for an empty batch. At
        least one, since every rank takes part in the backward pass."""
        least = len(self._share_of_first()) if self._passes.exchanges_in_forward else 1
        return [*share, *[None] * (max(1, least) - len(share))]

    def _share_of_first(self) -> Sequence[MicroBatch]:
        """Return the present share of rank 0, which has the largest one."""
        sampler, state = self._passes.parts.sampler, self._state
        return sampler.share(state.epoch, state.k, 0, self._peers.world_size)

    def around(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a pass: only the last one of a share sums gradients over ranks."""
        wrapped = self._passes.wrapped
        if is_last or not isinstance(wrapped, DistributedDataParallel):
            return nullcontext()
        return wrapped.no_sync()

    def forward(self, batch: Any | None, own_samples: int) -> tuple[torch.Tensor, Sum]:
        """Return (loss sum, weight) of a batch, of which ``own_samples`` count."""
        return self._passes.forward(batch)

    def add(self, loss_sum: torch.Tensor, weight: Sum, difference: Count | None) -> None:
        """Add a pass to what this rank reports. ``difference`` is the correction from expected to
        loaded samples; None if they are equal."""
        self._passes.sums.add(loss_sum, weight, difference)

    def pass_back(self, loss_sum: torch.Tensor, number: int) -> None:
        """Run the backward pass of micro-batch ``number``, which is not the last one."""
        self._scaled(loss_sum).backward()  # type: ignore[no-untyped-call]

    def last_pass(self, loss_sum: torch.Tensor | None, number: int | None, votes: Votes) -> None:
        """Run the last backward pass, and start to exchange. None stands for a rank without
        passes."""
        assert loss_sum is not None
        self._passes.sums.backward(self._scaled(loss_sum), votes)
        self._passes.finish()

    def take(self) -> StepTotals:
        """Return the totals over all ranks, once the gradients are summed. Raise the collective's
        error if a peer is gone."""
        return self._passes.sums.take()

    def clip(self, max_norm: float, factor: float) -> float:
        """Clip the gradients and return their norm before that. No collective.

        Args:
            factor: by which they were multiplied since ``take``.
        """
        parameters = self._passes.parts.trained.parameters
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def _scaled(self, loss_sum: torch.Tensor) -> torch.Tensor:
        return self._state.scaler.scale(loss_sum * self._scale)


class TreeStep(StepExchange):
    """Exchange a step with ``train.exactness: elastic``. The gradients of each micro-batch are
    computed alone, and added in an order that no rank decides."""

    def __init__(self, passes: Passes, fingerprints: Fingerprints, tree: Exchange) -> None:
        super().__init__(passes, fingerprints)
        self._tree, self.add = tree, tree.add  # type: ignore[method-assign]
        self.digests_ahead = False

    def begin(self, plan: StepPlan) -> None:
        self._scale = self._passes.loss_scale(plan.num_samples)
        state, fingerprint = self._state, self._fingerprints.header
        self._tree.begin(state.step, state.k, plan.expected.samples, fingerprint)

    def passes(self, share: Sequence[MicroBatch]) -> Sequence[MicroBatch | None]:
        return share

    def around(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def pass_back(self, loss_sum: torch.Tensor, number: int) -> None:
        super().pass_back(loss_sum, number)
        self._tree.fold(number)

    def last_pass(self, loss_sum: torch.Tensor | None, number: int | None, votes: Votes) -> None:
        self._tree.send(number, votes)
        if loss_sum is not None and number is not None:
            self.pass_back(loss_sum, number)
        self._passes.parts.trained.check_flags()

    def take(self) -> StepTotals:
        return self._tree.take()


# ---------------------------------------------------------------- sharded

# FSDP2 sums gradients over ranks after the backward pass, so that each rank gets its own rows. What
# the ranks say of a step follows in one exchange of rows, with each rank's part of the gradients'
# norm. It is the gate: no collective lies between it and the end of the optimizer step.

_ROW = struct.Struct("<dQQQ")
"""Norm of this rank's rows of the gradients, order of calls, digests of gradients and weights."""


class ShardedStep(StepExchange):
    """Exchange a step of a sharded model: FSDP2 sums the gradients in each backward pass, and the
    reports follow as rows, which every rank adds up in the order of ranks."""

    def __init__(
        self, passes: Passes, fingerprints: Fingerprints, order: CallOrder, max_norm: float | None
    ) -> None:
        super().__init__(passes, fingerprints)
        assert self._state.gathered is not None
        self._shards = self._state.gathered
        self.digests_ahead = True
        self._order, self._max_norm = order, max_norm
        self._source = where(passes.parts.task, "loss")
        self._numbers = torch.empty(0)
        self._norm = 0.0
        """Of the gradients of all ranks."""

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        self._order.take()
        self._order.source = self._source if self._state.is_at_first else None

    def around(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def pass_back(self, loss_sum: torch.Tensor, number: int | None) -> None:
        self._scaled(loss_sum).backward()  # type: ignore[no-untyped-call]
        self._shards.finish_backward()

    def last_pass(self, loss_sum: torch.Tensor | None, number: int | None, votes: Votes) -> None:
        assert loss_sum is not None
        self.pass_back(loss_sum, number)
        self._passes.finish()
        self._numbers = self._passes.sums.gradient(votes)

    def take(self) -> StepTotals:
        """Return the totals over all ranks. Raise BadTask if they called other modules."""
        own, peers = self._fingerprints, self._peers
        self._order.arrive()
        self._order.source = None
        own.finish()
        digests = own.gradient or 0, own.weights or 0
        norm = 0.0 if self._max_norm is None else norm_of(self._gradients())
        numbers = peers.result(self._numbers).numpy().tobytes()
        row = numbers + _ROW.pack(norm, self._order.take(), *digests)
        rows = peers.exchange(row)
        sums = np.zeros(len(numbers) // 4, np.float32)
        for each in rows:
            # Encoded for DDP, which divides by the world size.
            sums += np.frombuffer(each, np.float32, len(sums)) / np.float32(peers.world_size)
        norms, orders, *found = zip(
            *(_ROW.unpack_from(each, len(numbers)) for each in rows), strict=True
        )
        of = self._shards.piece.of  # the other ranks are replicas, which gates compare
        require_same_order(orders, self._source, f"in step {self._state.step + 1}")
        own.combine(list(zip(*found, strict=True))[:of])
        self._norm = math.sqrt(math.fsum(each * each for each in norms[:of]))
        return self._passes.sums.totals_of(sums.tobytes())

    def clip(self, max_norm: float, factor: float) -> float:
        norm = self._norm * factor
        # As torch's clip_grad_norm_, which would meet the other ranks here.
        torch._foreach_mul_(self._gradients(), min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's rows of all gradients."""
        parameters = self._passes.parts.trained.parameters
        return [local(each.grad) for each in parameters if each.grad is not None]


@torch.no_grad()
def norm_of(gradients: Sequence[torch.Tensor]) -> float:
    """Return the norm of some tensors taken together."""
    some = [each for each in gradients if each.numel()]
    return float(torch.stack(torch._foreach_norm(some)).double().norm()) if some else 0.0


# ---------------------------------------------------------------- own steps


class OwnStep(StepExchange):
    """Let the task make its step, whose optimizers average gradients; the reports are summed
    afterwards, with the task's metrics."""

    def __init__(
        self,
        passes: Passes,
        fingerprints: Fingerprints,
        own: OwnUpdates,
        session: Session,
        rates: LearningRates,
    ) -> None:
        super().__init__(passes, fingerprints)
        self._own, self._session, self._rates = own, session, rates
        self.digests_ahead = False
        self._num_samples = 1
        self._weight = 0.0
        """This rank's part of the global batch."""
        self._values: dict[str, torch.Tensor] = {}
        self._sent = torch.empty(0)
        self._work: dist.Work | None = None

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        self._num_samples = plan.num_samples

    def passes(self, share: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the one pass. A rank without a share, in a short batch, trains on that of rank 0,
        which then does not count: it must take part in every collective."""
        return share or self._share_of_first()

    def around(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, batch: Any | None, own_samples: int) -> tuple[torch.Tensor, Sum]:
        """Let the task make its step on the batch."""
        state, own = self._state, self._own
        if batch is None:
            raise BadTask(
                "collate returned None for a rank's share of a global batch, and training_step "
                "needs a batch. Return the samples that are usable, and leave broken ones out of "
                "the data set"
            )
        self._weight = own_samples / self._num_samples
        schedule = self._session.ctx.spec.schedule
        own.lr = set_rates(self._rates, schedule, self._passes.parts)
        own.before.take()
        self._session.change()
        own.mean.begin(state.step, self._weight)
        self._values = own.run(state, batch)
        loss = self._values.pop(LOSS, torch.zeros(())).to(self._peers.device)
        return loss * own_samples, own_samples

    def last_pass(self, loss_sum: torch.Tensor | None, number: int | None, votes: Votes) -> None:
        peers, numbers = self._peers, self._passes.sums.gradient(votes)
        extra = torch.zeros(1 + MOST_VALUES, device=peers.device)
        extra[0] = float(self._own.mean.num_updates)
        for at, value in enumerate(self._values.values(), start=1):
            extra[at] = value.to(peers.device) * self._weight if self._weight else 0.0
        # Encoded for DDP, which divides by the world size.
        self._sent = torch.cat([numbers.to(peers.device) / peers.world_size, extra])
        self._work = peers.start_sum(self._sent)

    def take(self) -> StepTotals:
        """Return the totals over all ranks. Raise BadTask if the ranks made other updates."""
        own = self._own
        if self._work is not None:
            self._work.wait()
        self._work = None
        sums = self._peers.result(self._sent)
        length = len(sums) - 1 - MOST_VALUES
        totals = self._passes.sums.totals_of(sums[:length].numpy().tobytes())
        num_updates, *found = sums[length:].tolist()
        is_whole = totals.fault(self._state.step, self._num_samples) is None
        if is_whole and num_updates != own.mean.num_updates * self._peers.world_size:
            raise BadTask(
                f"{own.source} stepped optimizers {own.mean.num_updates} times in step "
                f"{self._state.step + 1} on this rank, and another number of times on others. "
                "Let nothing that only a rank's own samples say decide how often an optimizer steps"
            )
        own.values = {
            name: value if math.isfinite(value) else None
            for name, value in zip(self._values, found, strict=False)
        }
        return totals
