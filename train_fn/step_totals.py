"""What all ranks need to know of a step, carried by the all-reduce of its gradients: no collective is added for it.

The numbers of a rank are the gradient of a parameter that nothing else uses (``Carrier``). DDP adds them up with the first bucket
that backward fills, so that a backward that returns is the step's gate: whoever comes out of it knows that every rank got as far as
this step's last backward, and all ranks that do hold the same numbers, so that they agree to stop, to refuse the step, to report.

DDP adds float32, and divides by the number of ranks: numbers are sent that many times as large, and whole ones byte by byte, since
the sums of bytes are small enough to come out exact.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from storage.run_dir import Stop
from train_fn.collectives import Peers
from train_fn.ledger import Count
from train_fn.randomness import MASK64

_FIELDS = "QBIIIQBBBQ"
"""Weight, whether the loss is not finite; samples, unexpected, missing; a checkpoint's step; cancel, pause, save; samples' hash.

All but the last are the same from step to step, mostly."""
_WHOLE = struct.Struct(f"<{_FIELDS}")
_MOST_WEIGHT = 1 << 48
"""A weight below it is sent exactly; of one above, the digits of a float32."""
_NUM_FRACTIONS = 3
"""Loss, rank of a loss that is not finite, and the weight's fraction or all of one that is too large. They come first."""
_NUM_NUMBERS = _NUM_FRACTIONS + _WHOLE.size
"""All but the ranks' own times."""
_SENT = struct.Struct(f"={_NUM_NUMBERS}f")
_SIZES = [struct.calcsize(f"<{field}") for field in _FIELDS]
_ENDS = list(itertools.accumulate(_SIZES, initial=0))
_FRACTIONS, _HASH = struct.Struct(f"={_NUM_FRACTIONS}f"), struct.Struct(f"={_SIZES[-1]}f")
_OWN_AT = _SENT.size
_HASH_AT = _OWN_AT - _HASH.size
"""Where in the numbers' bytes, float32, the ranks' own times begin, and the hash."""
_REMEMBERED = 64


class Told(NamedTuple):
    """What one rank tells the others."""

    values: list[float]
    """As ``_NUM_NUMBERS`` has them."""
    own_s: float
    of_losses: torch.Tensor | None
    """On a device, which alone knows them yet, the first of ``values``."""


class StepTotals(NamedTuple):
    """One global batch, over all ranks."""

    loss_sum: float
    weight: float
    """Samples or tokens that ``loss_sum`` is a sum over."""
    counted: Count
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
        # Written anew at every step, of which the other ranks' own times stay zero. With cold caches one call of torch costs as
        # much as all of this does.
        self._told = torch.zeros(_NUM_NUMBERS + peers.world_size)
        self._written: memoryview[float] = memoryview(self._told.numpy()).cast("B").cast("f")  # type: ignore[arg-type]
        self._carried = (self.numbers,)  # an attribute that torch does not look for among a module's
        self._sums = memoryview(b"")
        self._sums_at = 0
        """The gradient's memory, where DDP adds up at every step, and its address."""

    def backward(self, loss: torch.Tensor, told: Told) -> None:
        """``loss.backward()``, in which the parameter's gradient is what this rank tells."""
        torch.autograd.backward((loss, *self._carried), (None, self.gradient(told)))

    def gradient(self, told: Told) -> torch.Tensor:
        """The numbers as one tensor, which the next call overwrites. On CUDA nothing here waits for the device."""
        rank, world_size = self._peers.rank, self._peers.world_size
        _SENT.pack_into(self._written, 0, *[world_size * value for value in told.values])
        self._written[_NUM_NUMBERS + rank] = world_size * told.own_s
        if told.of_losses is None:
            return self._told
        rest = self._told[len(told.of_losses) :].to(self._peers.device, non_blocking=True)
        return torch.cat([told.of_losses * world_size, rest])

    def take(self) -> StepTotals:
        """The totals over all ranks, once backward has returned; the device has finished it then, too."""
        (numbers,) = self._carried
        grad, numbers.grad = numbers.grad, None
        assert grad is not None
        sums = self._memory_of(grad)
        self._peers.require_whole()
        return totals_of(sums, self._peers.world_size)

    def _memory_of(self, grad: torch.Tensor) -> memoryview:
        if not self._peers.on_cpu:
            return grad.cpu().numpy().data.cast("B")
        address = grad.data_ptr()
        if address != self._sums_at:
            self._sums, self._sums_at = grad.numpy().data.cast("B"), address
        return self._sums


class StepSum:
    """One rank's part of a step's totals: every micro-batch is added."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._losses: list[torch.Tensor | float] = []
        self._weights: list[torch.Tensor | float] = []
        self._count = Count()

    def add(self, loss_sum: torch.Tensor, weight: torch.Tensor | float, counted: Count) -> None:
        self._losses.append(loss_sum.item() if self._peers.on_cpu else loss_sum.detach())
        self._weights.append(weight)
        self._count += counted

    def numbers(self, stop: Stop | None, checkpoint_step: int, save: bool = False, own_s: float = 0.0) -> Told:
        """What this rank tells the others, for ``Carrier.backward``. On CUDA nothing here waits for the device."""
        count = self._count
        loss, nonfinite, fraction, weight = self._of_losses() if self._peers.on_cpu else (0.0, False, 0.0, 0)
        counted = (count.num_samples, count.num_unexpected, count.num_missing)
        asked = (stop == "cancel", stop == "pause", save)
        whole = _WHOLE.pack(weight, nonfinite, *counted, checkpoint_step, *asked, count.sample_hash)
        values = [loss, nonfinite * (self._peers.rank + 1), fraction, *whole]
        return Told(values, own_s, None if self._peers.on_cpu else self._of_losses_on_device())

    def _of_losses(self) -> tuple[float, bool, float, int]:
        """Loss, whether it is not finite, and of the weight what is no whole number and what is."""
        loss, weight = sum(map(float, self._losses)), sum(map(float, self._weights))
        whole = math.floor(weight) if 0 <= weight < _MOST_WEIGHT else 0
        return loss, not math.isfinite(loss), weight - whole, whole

    def _of_losses_on_device(self) -> torch.Tensor:
        """The first of the numbers, where the device alone knows the losses, and those weights that are tensors."""
        device = self._peers.device
        loss = torch.stack([torch.as_tensor(loss, device=device) for loss in self._losses]).sum(dtype=torch.float64)
        known = sum(float(weight) for weight in self._weights if not isinstance(weight, torch.Tensor))
        tensors = [weight.detach().double().to(device) for weight in self._weights if isinstance(weight, torch.Tensor)]
        weight = torch.stack([torch.full((), known, dtype=torch.float64, device=device), *tensors]).sum()
        nonfinite = torch.logical_not(torch.isfinite(loss)).double()
        whole = torch.where((weight >= 0) & (weight < _MOST_WEIGHT), weight.floor(), torch.zeros_like(weight))
        sizes = torch.pow(256.0, torch.arange(_SIZES[0], dtype=torch.float64, device=device))
        bytes_of_weight = (whole / sizes).floor().remainder(256.0)
        fractions = torch.stack([loss, nonfinite * (self._peers.rank + 1), weight - whole])
        return torch.cat([fractions, bytes_of_weight, nonfinite[None]]).float()


def totals_of(sums: memoryview, world_size: int) -> StepTotals:
    """What the sums of all ranks' numbers say: the bytes of ``_NUM_NUMBERS + world_size`` float32."""
    loss, nonfinite_rank, fraction = _FRACTIONS.unpack_from(sums)
    fields = _fields_of(bytes(sums[_FRACTIONS.size : _HASH_AT]))
    weight, num_nonfinite, samples, unexpected, missing, checkpoint_step, cancels, pauses, saves = fields
    return StepTotals(
        loss,
        fraction + weight,
        Count(samples, unexpected, missing, _number(_HASH.unpack_from(sums, _HASH_AT))),
        num_nonfinite,
        round(nonfinite_rank) - 1 if num_nonfinite == 1 else None,
        "cancel" if cancels else "pause" if pauses else None,
        checkpoint_step,
        saves > 0,
        struct.unpack_from(f"={world_size}f", sums, _OWN_AT),
    )


@lru_cache(_REMEMBERED)
def _fields_of(sums: bytes) -> list[int]:
    """All fields but the hash. Remembered, since with cold caches to add them up costs ten times what finding them does."""
    sums_of_bytes = struct.unpack(f"={len(sums) // 4}f", sums)
    return [_number(sums_of_bytes[begin:end]) for begin, end in itertools.pairwise(_ENDS[:-1])]


def _number(sums_of_bytes: Sequence[float]) -> int:
    """A field's sum modulo 2**64, as the hash is, from the sums of its bytes, the lowest first."""
    number = 0
    for byte in reversed(sums_of_bytes):
        number = (number << 8) + round(byte)
    return number & MASK64
