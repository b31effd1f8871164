"""Complete DDP's gradient all-reduce when a backward pass did not reach every parameter.

DDP all-reduces a bucket once all of its parameters have a gradient. A parameter that this rank's
last micro-batch does not use never becomes ready. Its bucket and those after it are then not
reduced on this rank, while the other ranks wait or go on without it. Such a parameter contributes
zero, or the gradient from the rank's earlier micro-batches.
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
"""How torch's reducer names such parameters: by their index among those that it reduces."""


class _Reach(torch.autograd.Function):
    """Let a backward pass reach parameters without adding to their gradients. DDP's hooks run as
    they do after a gradient."""

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
    """Include the parameters that the last backward pass did not reach in the all-reduce. Costs
    next to nothing if it reached all.

    Args:
        exchanged: the parameters that DDP all-reduces, in DDP's order.
        step: steps done, for the error.
        check_flags: raises BadTask if the task froze a parameter, since no backward pass reaches
            it.

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
    """Give a zero gradient to parameters that no micro-batch used, as the all-reduce does. So the
    optimizer treats a parameter the same at every world size."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def bucket_sizes(wrapped: nn.Module | None) -> list[int]:
    """Return the bytes of DDP's gradient buckets, in the order in which backward fills them; an
    empty list without DDP."""
    if not isinstance(wrapped, DistributedDataParallel):
        return []
    known = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = str(known.get("rebuilt_bucket_sizes") or known.get("bucket_sizes") or "")
    return [int(size) for size in sizes.split(",") if size.strip()]


def _unfinished(wrapped: DistributedDataParallel) -> str | None:
    """Return torch's error if the gradient all-reduce is not complete; None if it is."""
    try:
        wrapped.reducer._check_reducer_finalized()
    except RuntimeError as exc:
        return str(exc)
    return None
