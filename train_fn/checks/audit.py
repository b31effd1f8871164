"""Audits: in some steps every rank computes a micro-batch of another rank again, and the ranks
compare digests before anyone takes the step. This finds a processor whose wrong results are
alike on every rank. Below: drills that a rank carries out itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from everstep.wire.drills import DrillKind
from train_fn.checks.check import Moment, checked
from train_fn.checks.ranks import Together
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, Miscomputed, PeerMiscomputed, few
from train_fn.samples.sampler import MicroBatch, generators_kept, key
from train_fn.samples.streams import StreamSet
from train_fn.snapshots.election import odd_ranks
from train_fn.step.fingerprints import (
    Computed,
    Dispute,
    PassRecord,
    audited_place,
    audited_rank,
    is_audited,
    local,
    settled,
)
from train_fn.tasks.protocol import METHOD, makes_own_steps, where

if TYPE_CHECKING:
    from train_fn.loop.build import Parts
    from train_fn.loop.passes import Passes

_WAY_OUT = "or set train.audit_fraction to 0"
NOT_WATCHED: AbstractContextManager[None] = contextlib.nullcontext()


class _Finding(NamedTuple):
    """What one rank has to say in an audit."""

    own: Computed | None
    """Of its own micro-batch, as it went into the step; None if its share is empty."""
    audited: Computed | None
    """Of the micro-batch of another rank."""
    gradient: int
    """Digest of the summed gradient."""
    weights: tuple[int, int]
    """Digests of the weights when the step began, and now."""


@checked(Moment.STEP, cost="one micro-batch more a rank, in audited steps")
class StepAudit:
    """Audit the steps that are due. A step calls ``begin``; ``watched`` around each pass; and
    ``check`` between its exchange and its commit.

    Raises BadTask if the task's micro-batches cannot be computed again.
    """

    def __init__(
        self, ctx: WorkerContext, passes: Passes, together: Together, flips: RankFaults
    ) -> None:
        self._passes, self._together, self._flips = passes, together, flips
        parts = passes.parts
        self._parts, self._peers = parts, passes.peers
        self._state, self._sampler, self._trained = parts.state, parts.sampler, parts.trained
        self._fraction = ctx.spec.train.audit_fraction
        _require_repeatable(passes)
        self.is_due = False
        """Whether the present step is audited."""
        self._own: MicroBatch | None = None
        self._record: PassRecord | None = None
        self._weights: list[int] = []
        """Sums of the weights when the step began."""

    def begin(self) -> None:
        """Begin a step."""
        self.is_due = is_audited(self._sampler.seed, self._state.step, self._fraction)
        if self.is_due:
            self._own, self._record = self._micro_of(self._peers.rank), None
            self._weights = self._trained.sums()

    def watched(self, number: int) -> AbstractContextManager[None]:
        """Return the context of this rank's pass over micro-batch ``number``."""
        if not self.is_due or self._own is None or self._own.number != number:
            return NOT_WATCHED
        return self._watch()

    def check(self) -> None:
        """Compare what the ranks computed, if this step is due. A collective in such a step, which
        leaves no trace.

        Raise Miscomputed on ranks that computed wrongly, or on all if it cannot be decided, and
        PeerMiscomputed on the others.
        """
        if not self.is_due:
            return
        audited = self._micro_of(self._audited_by(self._peers.rank))
        finding = _Finding(
            None if self._record is None else self._record.computed(),
            None if audited is None else self._computed(audited),
            self._together.fingerprints.of_gradients(),
            (key(*self._weights), key(*self._trained.sums())),
        )
        found: list[_Finding] = self._peers.gather(finding)
        if len({digest for each in found for digest in each.weights}) > 1:
            self._raise_for_weights()
        disputes = []
        for auditor in range(self._peers.world_size):
            owner = self._audited_by(auditor)
            own, again, micro = found[owner].own, found[auditor].audited, self._micro_of(owner)
            if own is not None and again is not None and micro is not None and own != again:
                disputes.append(Dispute(micro.number, owner, auditor, own, again))
        gradients = [each.gradient for each in found]
        if disputes or len(set(gradients)) > 1:
            self._settle(disputes, gradients)

    @checked(Moment.RESTORED, cost="one micro-batch, twice")
    def rehearse(self) -> None:
        """Compute a micro-batch of the next step twice. Raise BadTask if results differ on one
        rank: an audit would blame a node for what the task does. A collective."""
        state = self._state
        if state.step >= self._parts.last_step:
            return
        [micro, *_] = self._sampler.share(state.epoch, state.k, 0, 1)
        first, second = self._computed(micro), self._computed(micro)
        differing = [each for each in self._peers.gather(first.differing(second)) if each]
        if differing:
            raise BadTask(
                f"{' and '.join(differing[0])} differ when one micro-batch is computed twice. "
                "train.audit_fraction compares results between ranks. Let "
                f"{where(self._parts.task, 'loss')} and the data set draw from the global "
                "generators "
                f"of torch, numpy and Python only, and depend on nothing else, {_WAY_OUT}"
            )

    # -- parts of it

    def _audited_by(self, rank: int) -> int:
        return audited_rank(self._sampler.seed, self._state.step, rank, self._peers.world_size)

    def _micro_of(self, rank: int) -> MicroBatch | None:
        """Return the micro-batch of a rank that is audited; None if it has none in this step."""
        state, sampler = self._state, self._sampler
        share = sampler.share(state.epoch, state.k, rank, self._peers.world_size)
        if not share:
            return None
        return share[audited_place(sampler.seed, state.step, rank, len(share))]

    def _new_record(self) -> PassRecord:
        passes = self._passes
        return PassRecord(passes.module, self._trained.with_gradient, passes.moving.now)

    @contextmanager
    def _watch(self) -> Iterator[None]:
        handle = None
        if self._flips.take(DrillKind.CORRUPT_GRADIENT):
            chosen = self._flips.chosen(self._parts)
            handle = chosen.register_hook(_flipped)  # type: ignore[no-untyped-call]
        self._record = self._new_record()
        try:
            with self._record:
                yield
        finally:
            if handle is not None:
                handle.remove()

    def _computed(self, micro: MicroBatch) -> Computed:
        """Compute a micro-batch once more, and leave no trace of it."""
        passes, state = self._passes, self._state
        with generators_kept(self._peers.device), _gradients_kept(passes):
            batch = passes.load(micro).batch
            with passes.moving.repeated(), self._new_record() as record:
                passes.seed(state.step, micro.number)
                loss_sum, _ = passes.module(batch)
                loss = loss_sum * passes.loss_scale(self._sampler.size_of(state.k))
                state.scaler.scale(loss).backward()
        return record.computed()

    def _settle(self, disputes: Sequence[Dispute], gradients: Sequence[int]) -> None:
        """Find out who is wrong: all ranks compute the disputed micro-batches once more. Raises."""
        again = [self._computed(self._micro(dispute)) for dispute in disputes]
        found = self._peers.gather(again)
        ranks, what = set[int](), list[str]()
        for place, dispute in enumerate(disputes):
            ranks.update(settled(dispute, [results[place] for results in found]))
            what.append(
                f"{' and '.join(dispute.own.differing(dispute.audited))} of micro-batch "
                f"{dispute.number} differ between ranks {dispute.owner} and {dispute.auditor}"
            )
        if len(set(gradients)) > 1:
            ranks.update(odd_ranks(gradients))
            what.append("the summed gradient differs between ranks")
        error = Miscomputed(self._state.step, sorted(ranks), ", and ".join(what))
        if ranks and self._peers.rank not in ranks:
            raise PeerMiscomputed(str(error))
        raise error

    def _raise_for_weights(self) -> None:
        """Raise RanksApart or PeerApart: weights are wrong, so the state of this step is not to be
        trusted. A collective."""
        trained = self._trained
        found = self._peers.gather((trained.sums(), self._weights))
        pairs = [pair for now, before in found for pair in ((now, before), (now, found[0][0]))]
        names = {name for now, other in pairs for name in trained.differing(now, other)}
        sums = [tuple(now) for now, _ in found]
        changed = tuple(rank for rank, (now, before) in enumerate(found) if now != before)
        what = f"weights {few(sorted(names))}"
        self._together.raise_apart(sums, what, changed or odd_ranks(sums))

    def _micro(self, dispute: Dispute) -> MicroBatch:
        micro = self._micro_of(dispute.owner)
        assert micro is not None
        return micro


def _flipped(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with one wrong bit, for a drill."""
    wrong = gradient.detach().clone()
    flip_low_bit(wrong)
    return wrong


@contextmanager
def _gradients_kept(passes: Passes) -> Iterator[None]:
    """Let a backward pass in the block begin without gradients, and put back those of the step."""
    parameters = list(passes.module.parameters())
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if passes.used is not None:
            passes.used.forget()


@checked(Moment.RESTORED, cost="none")
def _require_repeatable(passes: Passes) -> None:
    """Raise BadTask if another rank cannot compute this rank's micro-batches again."""
    task = passes.parts.task
    if makes_own_steps(task):
        raise BadTask(
            f"{where(task, METHOD)} makes its own steps, which an audit cannot repeat "
            f"without a change. Let the task return a loss instead, {_WAY_OUT}"
        )
    if passes.exchanges_in_forward:
        raise BadTask(
            f"{where(task, 'build_model')} returned a model that exchanges in its forward "
            "pass, so no rank can repeat a pass of another one alone. Use layers that see one "
            f"micro-batch only, as BatchNorm for SyncBatchNorm, {_WAY_OUT}"
        )
    if isinstance(passes.parts.train_set, StreamSet):
        raise BadTask(
            f"{where(task, 'build_datasets')} returned iterable data, which another rank "
            f"cannot read again at any place. Use a map-style data set, {_WAY_OUT}"
        )
    if passes.changed:
        raise BadTask(
            f"a pass changes {few(passes.changed)}, so its result may depend on the "
            "passes before it, and another rank cannot repeat it. Keep what passes change in "
            "buffers of the model, and take the count of steps from the parameter step of loss, "
            f"{_WAY_OUT}"
        )


# ---------------------------------------------------------------- faults of the rank

# Drills that flip one low bit in this rank's memory, as a faulty processor would, or that slow it
# down: peers must notice.

logger = logging.getLogger(__name__)

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a number, by bytes."""


class RankFaults:
    """Carry out each drill once, on the rank and in the attempt that it names."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._done: str | None = None
        self._pause_s = 0.0

    def slow_down(self, own_s: float) -> None:
        """Wait, from the step on in which a drill asks for it. ``own_s`` is what the rank's own
        work took in the last step, in seconds."""
        if self.take(DrillKind.SLOW_RANK):
            self._pause_s = 2 * own_s or 0.02
        time.sleep(self._pause_s)

    def flip(self, parts: Parts, *, is_audited: bool) -> None:
        """Flip the bit that the newest drill asks for. Call it between the exchange of a step and
        its digests. In a step that is audited, the audit flips bits of gradients."""
        for kind in (DrillKind.CORRUPT_GRADIENT, DrillKind.CORRUPT_WEIGHTS):
            if (is_audited and kind is DrillKind.CORRUPT_GRADIENT) or not self.take(kind):
                continue
            parameter = self.chosen(parts)
            tensor = parameter.grad if kind is DrillKind.CORRUPT_GRADIENT else parameter.data
            tensor = None if tensor is None else local(tensor)
            if tensor is None or tensor.layout is not torch.strided or not tensor.numel():
                logger.warning("drill %s: there is no gradient in which to flip a bit", kind)
                return
            flip_low_bit(tensor)
            logger.warning("drill %s flipped a bit at step %d", kind, parts.state.step)

    def take(self, kind: DrillKind) -> bool:
        """Return whether this rank is to flip a bit now, in a drill of this kind. It is then done
        with that drill."""
        order = self._ctx.flip_ordered()
        if order is None or order.id == self._done or order.kind is not kind:
            return False
        self._done = order.id
        return (order.rank, order.attempt) == (self._ctx.world_rank, self._ctx.attempt)

    @staticmethod
    def chosen(parts: Parts) -> nn.Parameter:
        """Return the parameter in which a bit is flipped."""
        parameters = parts.trained.parameters
        return parameters[len(parameters) // 2]


@torch.no_grad()
def flip_low_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the middle number of a tensor."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    place = tuple(size // 2 for size in values.shape)
    number = values[place].reshape(1).clone().view(_WORDS[values.element_size()])
    values[place] = (number ^ 1).view(values.dtype)[0]
