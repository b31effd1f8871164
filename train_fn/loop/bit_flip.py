"""Drills that flip one low bit in this rank's memory, as a faulty processor would: peers must
notice."""

from __future__ import annotations

import logging

import torch
from torch import nn

from everstep.wire.drills import DrillKind
from train_fn.context import WorkerContext
from train_fn.loop.replica import Replica

logger = logging.getLogger(__name__)

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a number, by bytes."""


class BitFlips:
    """Carry out each drill once, on the rank and in the attempt that it names."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._done: str | None = None

    def flip(self, replica: Replica, *, is_audited: bool) -> None:
        """Flip the bit that the newest drill asks for. Call it between the exchange of a step and
        its digests. In a step that is audited, the audit flips bits of gradients."""
        for kind in (DrillKind.CORRUPT_GRADIENT, DrillKind.CORRUPT_WEIGHTS):
            if (is_audited and kind is DrillKind.CORRUPT_GRADIENT) or not self.take(kind):
                continue
            parameter = self.chosen(replica)
            tensor = parameter.grad if kind is DrillKind.CORRUPT_GRADIENT else parameter.data
            if tensor is None or tensor.layout is not torch.strided:
                logger.warning("drill %s: there is no gradient in which to flip a bit", kind)
                return
            flip_low_bit(tensor)
            logger.warning("drill %s flipped a bit at step %d", kind, replica.state.step)

    def take(self, kind: DrillKind) -> bool:
        """Return whether this rank is to flip a bit now, in a drill of this kind. It is then done
        with that drill."""
        order = self._ctx.flip_ordered()
        if order is None or order.id == self._done or order.kind is not kind:
            return False
        self._done = order.id
        return (order.rank, order.attempt) == (self._ctx.world_rank, self._ctx.attempt)

    @staticmethod
    def chosen(replica: Replica) -> nn.Parameter:
        """Return the parameter in which a bit is flipped."""
        return replica.parameters[len(replica.parameters) // 2]


@torch.no_grad()
def flip_low_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the middle number of a tensor."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    place = tuple(size // 2 for size in values.shape)
    number = values[place].reshape(1).clone().view(_WORDS[values.element_size()])
    values[place] = (number ^ 1).view(values.dtype)[0]
