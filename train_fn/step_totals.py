"""What all ranks need to know of a step, carried by the all-reduce of its gradients: no collective is added for it.

The numbers of a rank are the gradient of a parameter that nothing else uses (``Carrier``). DDP adds them up with the first bucket
that backward fills, so that a backward that returns is the step's gate: whoever comes out of it knows that every rank got as far as
this step's last backward, and all ranks that do hold the same numbers, so that they agree to stop, to refuse the step, to report.

DDP adds float32, and divides by the number of ranks: numbers are sent that many times as large, and whole ones in parts of 10 bits,
whose sums are small enough to come out exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from storage.run_dir import Stop
from train_fn.collectives import Peers
from train_fn.ledger import Count
from train_fn.randomness import MASK64

_PART_BITS = 10
_PARTS_32, _PARTS_48, _PARTS_64 = 4, 5, 7
"""Parts of a whole number of so many bits."""
_MOST_WEIGHT = 1 << 48
"""A weight below it is sent exactly; of one above, the digits of a float32."""
_OF_LOSSES = 4 + _PARTS_48
"""Numbers that come of losses and weights."""
_NUM_NUMBERS = _OF_LOSSES + 3 * _PARTS_32 + _PARTS_64 + _PARTS_48 + 3
"""All but the ranks' own times."""


@dataclass(frozen=True)
class StepTotals:
    """One global batch, over all ranks."""

    loss_sum: float
    weight: float
    """Samples or tokens that ``loss_sum`` is a sum over."""
    count: Count
    num_nonfinite: int
    """Ranks whose loss is not finite."""
    nonfinite_rank: int | None
    """The one rank, where it is one."""
    stop: Stop | None
    """What at least one rank has heard that the user asked for."""
    checkpoint_step: int
    """Step of a checkpoint that has been committed since and is to be reported; 0 for none."""
    save: bool
    """Whether the state after this step is to be saved: rank 0's word, on every rank the same."""
    own_s: tuple[float, ...] = ()
    """Of each rank, the seconds of its own work in the step before this one; 0 where it does not know them."""


class Carrier(nn.Module):
    """The parameter whose gradient the numbers are. Part of the module that DDP wraps, of no model, and of no optimizer."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers
        self.numbers = nn.Parameter(torch.zeros(_NUM_NUMBERS + peers.world_size, device=peers.device))

    def attach(self, loss: torch.Tensor, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """``loss``, whose backward carries ``numbers`` (of this rank; default: zeros) along."""
        carried = torch.zeros_like(self.numbers) if numbers is None else numbers * self._peers.world_size
        attached: torch.Tensor = _Attach.apply(loss, self.numbers, carried)  # type: ignore[no-untyped-call]
        return attached

    def take(self) -> list[float]:
        """The sums over all ranks, once backward has returned; the device has finished it then, too."""
        assert self.numbers.grad is not None
        sums: list[float] = self.numbers.grad.tolist()
        self.numbers.grad = None
        self._peers.require_whole()
        return sums


class _Attach(torch.autograd.Function):
    """The loss as it is; in backward the parameter gets the carried numbers, whatever the loss is multiplied by."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, parameter: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
        ctx.carried = carried
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, ctx.carried, None


class StepSum:
    """One rank's part of a step's totals: every micro-batch is added."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | float] = []
        self._count = Count()

    def add(self, loss_sum: torch.Tensor, weight: torch.Tensor | float, counted: Count) -> None:
        self._losses.append(loss_sum.detach())
        self._weights.append(weight)
        self._count += counted

    def numbers(self, stop: Stop | None, checkpoint_step: int, save: bool = False, own_s: float = 0.0) -> torch.Tensor:
        """What this rank tells the others, for ``Carrier.attach``. On CUDA nothing here waits for the device."""
        count = self._count
        known = [
            *_parts(count.num_samples, _PARTS_32),
            *_parts(count.num_unexpected, _PARTS_32),
            *_parts(count.num_missing, _PARTS_32),
            *_parts(count.sample_hash, _PARTS_64),
            *_parts(checkpoint_step, _PARTS_48),
            *(stop == "cancel", stop == "pause", save),
            *(own_s if rank == self._peers.rank else 0.0 for rank in range(self._peers.world_size)),
        ]
        if self._peers.device.type == "cpu":
            return torch.tensor([*self._of_losses(), *known], dtype=torch.float32)
        of_losses = self._of_losses_on_device()
        return torch.cat([of_losses, torch.tensor(known, dtype=torch.float32).to(self._peers.device, non_blocking=True)])

    def _of_losses(self) -> list[float]:
        loss, weight = sum(map(float, self._losses)), sum(map(float, self._weights))
        nonfinite = not math.isfinite(loss)
        whole = math.floor(weight) if 0 <= weight < _MOST_WEIGHT else 0
        return [loss, nonfinite, nonfinite * (self._peers.rank + 1), weight - whole, *_parts(whole, _PARTS_48)]

    def _of_losses_on_device(self) -> torch.Tensor:
        """The same numbers, where the device alone knows the losses, and those weights that are tensors."""
        device = self._peers.device
        loss = torch.stack(self._losses).sum(dtype=torch.float64)
        known = sum(float(weight) for weight in self._weights if not isinstance(weight, torch.Tensor))
        tensors = [weight.detach().double().to(device) for weight in self._weights if isinstance(weight, torch.Tensor)]
        weight = torch.stack([torch.full((), known, dtype=torch.float64, device=device), *tensors]).sum()
        nonfinite = torch.logical_not(torch.isfinite(loss)).double()
        whole = torch.where((weight >= 0) & (weight < _MOST_WEIGHT), weight.floor(), torch.zeros_like(weight))
        sizes = torch.pow(2.0**_PART_BITS, torch.arange(_PARTS_48, dtype=torch.float64, device=device))
        parts = (whole / sizes).floor().remainder(2.0**_PART_BITS)
        head = torch.stack([loss, nonfinite, nonfinite * (self._peers.rank + 1), weight - whole])
        return torch.cat([head, parts]).float()


def totals_of(sums: Sequence[float], world_size: int) -> StepTotals:
    """What ``Carrier.take`` gave, read."""
    rest = iter(sums)
    loss, nonfinite, ranks, fraction = next(rest), _whole(rest, 1), _whole(rest, 1), next(rest)
    weight = fraction + _whole(rest, _PARTS_48)
    samples, unexpected, missing = (_whole(rest, _PARTS_32) for _ in range(3))
    hashed, checkpoint_step = _whole(rest, _PARTS_64) & MASK64, _whole(rest, _PARTS_48)
    cancels, pauses, saves = (_whole(rest, 1) for _ in range(3))
    own_s = tuple(rest)
    assert len(own_s) == world_size
    return StepTotals(
        loss_sum=loss,
        weight=weight,
        count=Count(samples, unexpected, missing, hashed),
        num_nonfinite=nonfinite,
        nonfinite_rank=ranks - 1 if nonfinite == 1 else None,
        stop="cancel" if cancels else "pause" if pauses else None,
        checkpoint_step=checkpoint_step,
        save=saves > 0,
        own_s=own_s,
    )


def _parts(value: int, num_parts: int) -> list[int]:
    """A whole number of at least 0 in parts of ``_PART_BITS`` bits, the lowest first."""
    return [value >> _PART_BITS * number & (1 << _PART_BITS) - 1 for number in range(num_parts)]


def _whole(sums: Iterator[float], num_parts: int) -> int:
    """The sum of all ranks' whole numbers of so many parts."""
    return sum(round(next(sums)) << _PART_BITS * number for number in range(num_parts))
