"""What all ranks need to know of a step, added up in one small all-reduce that travels while backward runs.

Together with a successful backward it is the step's gate: whoever has it knows that every rank got as far as this step's last
backward, and all ranks that have it hold the same numbers, so that they agree to stop, to refuse the step, or to report.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from storage.run_dir import Stop
from train_fn.collectives import Peers
from train_fn.ledger import Count
from train_fn.randomness import MASK64

_LIMB_BITS = 22
"""A 64-bit hash travels as three numbers of 22 bits: their sums over 2**31 ranks are still exact in float64."""
_LIMB = (1 << _LIMB_BITS) - 1


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


class StepSum:
    """One rank's part of a step's totals: add every micro-batch, start, then wait."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | float] = []
        self._count = Count()
        self._work: dist.Work | None = None

    def add(self, loss_sum: torch.Tensor, weight: torch.Tensor | float, counted: Count) -> None:
        self._losses.append(loss_sum.detach())
        self._weights.append(weight)
        self._count += counted

    def start(self, stop: Stop | None, checkpoint_step: int, save: bool = False, own_s: float = 0.0) -> None:
        """Send it off. On CUDA nothing here waits for the device."""
        device = self._peers.device
        loss = torch.stack(self._losses).sum(dtype=torch.float64)
        tensors = [weight.detach().double() for weight in self._weights if isinstance(weight, torch.Tensor)]
        numbers = [float(weight) for weight in self._weights if not isinstance(weight, torch.Tensor)]
        count, hashed = self._count, self._count.sample_hash
        known = [
            *(0.0, 0.0, 0.0),
            sum(numbers),
            *(count.num_samples, count.num_unexpected, count.num_missing),
            *(hashed & _LIMB, hashed >> _LIMB_BITS & _LIMB, hashed >> 2 * _LIMB_BITS),
            *(stop == "cancel", stop == "pause", checkpoint_step, save),
            *(own_s if rank == self._peers.rank else 0.0 for rank in range(self._peers.world_size)),
        ]
        vector = torch.tensor(known, dtype=torch.float64).to(device, non_blocking=True)
        nonfinite = torch.logical_not(torch.isfinite(loss)).double()
        vector[:3] += torch.stack([loss, nonfinite, nonfinite * (self._peers.rank + 1)])
        if tensors:
            vector[3] += torch.stack(tensors).sum().to(device)
        self._vector = vector
        self._work = self._peers.start_sum(vector)

    def wait(self) -> StepTotals:
        """The sums over all ranks; raises what the collective raised when a peer is gone."""
        if self._work is not None:
            self._work.wait()
        sums = self._vector.tolist()
        self._peers.require_whole()  # the device has come past this step's gradients as well: they were queued before
        loss, nonfinite, ranks, weight, samples, unexpected, missing, low, mid, high, *told = sums
        cancels, pauses, step, save, *own_s = told
        hashed = int(low) + (int(mid) << _LIMB_BITS) + (int(high) << 2 * _LIMB_BITS) & MASK64
        return StepTotals(
            loss_sum=loss,
            weight=weight,
            count=Count(int(samples), int(unexpected), int(missing), hashed),
            num_nonfinite=int(nonfinite),
            nonfinite_rank=int(ranks) - 1 if nonfinite == 1 else None,
            stop="cancel" if cancels else "pause" if pauses else None,
            checkpoint_step=int(step),
            save=save > 0,
            own_s=tuple(own_s),
        )
