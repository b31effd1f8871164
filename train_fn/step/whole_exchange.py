"""Completes the exchange of gradients where a backward did not reach every parameter.

DDP adds a bucket up once all of its parameters have a gradient. A parameter that the last
micro-batch of a share does not use never gets one: its bucket, and those after it, stay this rank's
own, while the other ranks wait for it or take part without it. Such a parameter adds zero, or what
earlier micro-batches of the share gave it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_fn.errors import StepNotWhole

_UNREADY = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
"""How torch's reducer names them: by their place among those that it adds up."""


class _Reach(torch.autograd.Function):
    """Lets a backward reach parameters without giving them anything: DDP's hooks run as they do
    after a gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def finish_exchange(
    wrapped: DistributedDataParallel,
    exchanged: Sequence[nn.Parameter],
    step: int,
    check_flags: Callable[[], None],
) -> None:
    """Let the parameters take part that the backward just done did not reach. Nearly free where it
    reached all.

    Args:
        exchanged: what DDP adds up, in its own order.
        step: steps done, for the message.
        check_flags: raises BadTask where the task froze a parameter; no backward reaches one.

    Raises:
        StepNotWhole: the exchange could not be completed.
    """
    problem = _unfinished(wrapped)
    if problem is None:
        return
    check_flags()
    found = _UNREADY.search(problem)
    missing = [exchanged[int(place)] for place in found[1].split()] if found else []
    if not missing or not all(parameter.requires_grad for parameter in missing):
        raise StepNotWhole(step, problem)
    _Reach.apply(*missing).backward()  # type: ignore[no-untyped-call]
    problem = _unfinished(wrapped)
    if problem is not None:
        raise StepNotWhole(step, problem)


def fill_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give a zero gradient to those that no micro-batch used, as an exchange does: the optimizer
    then treats a parameter the same at every world size."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _unfinished(wrapped: DistributedDataParallel) -> str | None:
    """Return what torch says of an exchange that has not come to its end; None for one that has."""
    try:
        wrapped.reducer._check_reducer_finalized()
    except RuntimeError as exc:
        return str(exc)
    return None
