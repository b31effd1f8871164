"""Compute a step's value of each tensor that forward passes change: over the passes of this rank,
then over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from train_fn.step.peers import Peers
from train_fn.step.untrained import Rule, copy_all

_ALIGNMENT = 16
"""Alignment in bytes that suits the elements of every dtype."""


class StepValues:
    """Accumulate the values of ``tensors`` by their rules, and exchange them between ranks.

    Tensors of rule ``mean`` share one float64 vector of weighted sums, which the ranks add up.
    Those of rule ``first`` share one vector of bytes, which rank 0 broadcasts.
    """

    def __init__(self, tensors: list[torch.Tensor], rules: Sequence[Rule], peers: Peers) -> None:
        self._peers = peers
        self._means = [at for at, rule in enumerate(rules) if rule == "mean"]
        self._firsts = [at for at, rule in enumerate(rules) if rule == "first"]
        means = [tensors[at] for at in self._means]
        size = sum(tensor.numel() for tensor in means)
        self._sums = torch.zeros(size, dtype=torch.float64, device=peers.device)
        self._values = torch.zeros_like(self._sums)
        self._sum_of = _views_like(means, self._sums)
        self._value_of = _views_like(means, self._values)
        self._bytes, self._first_of = _flat_like([tensors[at] for at in self._firsts], peers.device)
        self._works: list[dist.Work] = []

    def add(
        self, now: list[torch.Tensor], num_samples: int, *, is_first: bool, number: int = 0
    ) -> None:
        """Add the tensors as they are after a forward pass on ``num_samples`` samples.

        Args:
            is_first: whether it is this rank's first pass of the step.
            number: of its micro-batch.
        """
        if is_first and self._means:
            copy_all(self._sum_of, [now[at] for at in self._means])
            # Infinity times 0 is NaN, not 0.
            self._sums.mul_(num_samples) if num_samples else self._sums.zero_()
        elif num_samples and self._means:
            copy_all(self._value_of, [now[at] for at in self._means])
            self._sums.add_(self._values, alpha=num_samples)
        if is_first and self._firsts and self._peers.rank == 0:
            copy_all(self._first_of, [now[at] for at in self._firsts])

    def start(self) -> None:
        """Start the collectives over ranks."""
        sums = self._peers.start_sum(self._sums) if self._means else None
        firsts = self._peers.start_broadcast(self._bytes, 0) if self._firsts else None
        self._works = [work for work in (sums, firsts) if work is not None]

    def wait(self) -> None:
        """Wait for the collectives. Raise their error if a peer is gone."""
        for work in self._works:
            work.wait()
        self._works = []

    def write_to(self, tensors: list[torch.Tensor], num_samples: int) -> None:
        """Write the step's values into ``tensors``. ``num_samples`` counts the global batch."""
        if self._means:
            self._sums.div_(num_samples)
            copy_all([tensors[at] for at in self._means], self._sum_of)
        if self._firsts:
            copy_all([tensors[at] for at in self._firsts], self._first_of)


def _views_like(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return consecutive parts of ``flat``, with the shape of each of ``tensors``."""
    if not tensors:
        return []
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _flat_like(
    tensors: list[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one flat uint8 tensor with room for all ``tensors``, and views into it with the dtype
    and shape of each."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + math.ceil(size / _ALIGNMENT) * _ALIGNMENT)
    flat = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
    views = [
        flat[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        for tensor, begin, size in zip(tensors, begins, sizes, strict=False)
    ]
    return flat, views
