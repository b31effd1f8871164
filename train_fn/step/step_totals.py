"""Send the facts that all ranks need about a step in the all-reduce of its gradients, without an
extra collective.

A rank's numbers are the gradient of a parameter that nothing else uses (``Carrier``). DDP sums them
with the first bucket that the backward pass fills. A step is taken only if its totals are complete:
every rank sent numbers for this step, and all samples of the global batch are accounted for
(``StepTotals.fault``). All ranks receive the same totals, so they agree on whether to stop, to
refuse the step, or to report.

DDP sums in float32 and divides by the world size. So numbers are multiplied by the world size
before they are sent. Integers are sent byte by byte, since sums of bytes are small enough to be
exact.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from storage.run_control import Stop
from train_fn.samples.ledger import Count
from train_fn.samples.randomness import MASK64
from train_fn.step.peers import Peers

_FIELDS = "QBIIIQBBBBQ"
"""Weight, whether the loss is not finite; samples, unexpected, missing; a checkpoint's step;
cancel, pause, save, news; the sample hash.

All but the last are the same from step to step, mostly."""
_WHOLE = struct.Struct(f"<{_FIELDS[:-1]}")
_MOST_WEIGHT = 1 << 48
"""A weight below it is sent exactly, a larger one with the precision of float32."""
_NUM_FRACTIONS = 3
"""Loss, rank of a loss that is not finite, and the weight's fraction (all of a weight that is too
large). These come first."""
_HASH = struct.Struct(f"<{_FIELDS[-1]}")
_NUM_NUMBERS = _NUM_FRACTIONS + _WHOLE.size + _HASH.size
"""The numbers that are summed over ranks. Not counted: each rank's own slots for step and time."""
_FLOAT_BYTES = 4
_LAYOUT = f"={_NUM_FRACTIONS}f{_FLOAT_BYTES * _WHOLE.size}s{_FLOAT_BYTES * _HASH.size}s"
"""The fractions as float32, then the bytes of integers, which are already encoded as float32."""
_SENT = struct.Struct(_LAYOUT)
_ENDS = list(
    itertools.accumulate(map(struct.calcsize, (f"<{field}" for field in _FIELDS[:-1])), initial=0)
)
_REMEMBERED = 16
_STEP_MARKS = 1 << 12
"""Steps are distinguished modulo this. So float32 holds the mark exactly, even multiplied by the
world size."""


class Expected(NamedTuple):
    """Hold what one rank sends about its samples if the loader yields what the sampler expects.
    Computed before the step."""

    samples: Count
    told_hash: bytes
    """The sample hash as encoded by ``told_hashes``."""


_NOTHING = Expected(Count(), bytes(_FLOAT_BYTES * _HASH.size))


class Facts(NamedTuple):
    """Hold the sums of all ranks' fields. They are mostly the same from step to step."""

    weight: int
    num_nonfinite: int
    """Ranks whose loss is not finite."""
    num_samples: int
    num_unexpected: int
    num_missing: int
    checkpoint_step: int
    """Step of a newly committed checkpoint to report; 0 for none."""
    cancels: int
    pauses: int
    saves: int
    num_with_news: int = 0
    """Ranks that saw a forward pass change a tensor that the ranks have not agreed on yet
    (``VolatileBuffers.agree``)."""

    @property
    def stop(self) -> Stop | None:
        """Return the user's request to cancel or pause that at least one rank has received."""
        return "cancel" if self.cancels else "pause" if self.pauses else None

    @property
    def save(self) -> bool:
        """Return whether to save the state after this step. Rank 0 decides, and all ranks receive
        the same answer."""
        return self.saves > 0


class StepTotals(NamedTuple):
    """Hold the totals of one global batch over all ranks."""

    loss_sum: float
    weight: float
    """Samples or tokens that ``loss_sum`` is a sum over."""
    facts: Facts
    hash_sums: bytes
    """The sums of the bytes of the ranks' hashes."""
    step_marks: tuple[float, ...]
    """For each rank, the ``step_mark`` of the step that it sent; 0 if it sent nothing."""
    own_s: tuple[float, ...]
    """For each rank, the seconds of its own work in the step before this one; 0 if unknown."""
    nonfinite_ranks: float
    """The sum of (rank + 1) over ranks whose loss is not finite."""

    def fault(self, step: int, num_samples: int) -> str | None:
        """Return why these totals are not those of a complete step; None if they are.

        Args:
            step: steps done before it.
            num_samples: samples in its global batch.
        """
        mark = step_mark(step)
        apart = [
            rank
            for rank, found in enumerate(self.step_marks)
            if not mark - 0.5 < found < mark + 0.5
        ]
        if apart:
            silent = [rank for rank in apart if self.step_marks[rank] == 0]
            said = f"rank {apart[0]} " + (
                "sent nothing" if silent else f"sent {self.step_marks[apart[0]]:g}, not {mark}"
            )
            return (
                f"{len(self.step_marks) - len(apart)} of {len(self.step_marks)} ranks took part "
                f"in it; {said}"
            )
        facts = self.facts
        found = facts.num_samples - facts.num_unexpected + facts.num_missing
        if found != num_samples:
            return (
                f"the ranks accounted for {found} samples, but the global batch has {num_samples}"
            )
        return None

    @property
    def nonfinite_rank(self) -> int | None:
        """Return the rank whose loss is not finite; None unless it is exactly one."""
        return round(self.nonfinite_ranks) - 1 if self.facts.num_nonfinite == 1 else None

    def counted(self) -> Count:
        """Return the count of all ranks' samples."""
        facts, (sample_hash,) = self.facts, _numbers_of(self.hash_sums, [0, _HASH.size])
        return Count(facts.num_samples, facts.num_unexpected, facts.num_missing, sample_hash)


class Carrier:
    """Collect a rank's facts about a step, and have DDP sum them over ranks.

    They are the gradient of ``numbers``: a parameter of the module that DDP wraps, but of no model
    and no optimizer. A step calls ``begin``, ``add`` for each micro-batch, ``backward`` with the
    last, and ``take``.

    Between a model's passes the caches are cold. One torch call, or touching five objects not used
    since the last step, then costs as much as everything here. So there are few of both.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.numbers = nn.Parameter(
            torch.zeros(
                _NUM_NUMBERS + 2 * peers.world_size, dtype=torch.float32, device=peers.device
            )
        )
        self._written = np.zeros(_NUM_NUMBERS + 2 * peers.world_size, np.float32)
        """The slots of other ranks stay zero."""
        self._told = torch.from_numpy(self._written)
        self._received = struct.Struct(f"{_LAYOUT}{2 * peers.world_size}f")
        self.begin(0)

    def begin(self, step: int, expected: Expected = _NOTHING) -> None:
        """Begin the step after ``step`` steps done. ``expected`` describes the samples that this
        rank's loader should yield."""
        self._step, self._expected = step, expected
        self._loss, self._weight = 0.0, 0.0
        self._of_device: list[tuple[torch.Tensor, torch.Tensor | float]] = []
        """Losses and weights that are still on the device."""

    def add(
        self, loss_sum: torch.Tensor, weight: torch.Tensor | float, difference: Count | None = None
    ) -> None:
        """Add one micro-batch. ``difference`` is the correction from expected to loaded samples;
        None if they are equal."""
        if self._peers.on_cpu:
            self._loss += loss_sum.item()
            self._weight += float(weight)
        else:
            self._of_device.append((loss_sum.detach(), weight))
        if difference is not None:
            self._expected = expected(self._expected.samples + difference, self._peers.world_size)

    def backward(
        self,
        loss: torch.Tensor,
        stop: Stop | None = None,
        checkpoint_step: int = 0,
        *,
        save: bool = False,
        has_news: bool = False,
        own_s: float = 0.0,
    ) -> None:
        """Run ``loss.backward()``, and send the collected facts in its all-reduce.

        Args:
            stop: the user's request to cancel or pause that this rank has received.
            checkpoint_step: step of a newly committed checkpoint to report; 0 for none.
            save: whether to save the state after this step.
            has_news: whether this rank saw a tensor change that the ranks have not agreed on.
            own_s: seconds of this rank's own work in the step before.
        """
        torch.autograd.backward(
            (loss, self.numbers),
            (None, self.gradient(stop, checkpoint_step, save, own_s, has_news)),
        )

    def gradient(
        self,
        stop: Stop | None = None,
        checkpoint_step: int = 0,
        save: bool = False,
        own_s: float = 0.0,
        has_news: bool = False,
    ) -> torch.Tensor:
        """Return the numbers that ``backward`` sends, in a tensor that the next call overwrites.
        Nothing here waits for a CUDA device."""
        world_size, rank = self._peers.world_size, self._peers.rank
        loss, weight, (samples, told_hash) = self._loss, self._weight, self._expected
        nonfinite = not math.isfinite(loss)
        whole = math.floor(weight) if 0 <= weight < _MOST_WEIGHT else 0
        counted = (samples.num_samples, samples.num_unexpected, samples.num_missing)
        words = (checkpoint_step, stop == "cancel", stop == "pause", save, has_news)
        fields = _told_fields((whole, nonfinite, *counted, *words), world_size)
        fractions = (
            world_size * loss,
            world_size * nonfinite * (rank + 1),
            world_size * (weight - whole),
        )
        _SENT.pack_into(self._written.data, 0, *fractions, fields, told_hash)
        self._written[_NUM_NUMBERS + rank] = world_size * step_mark(self._step)
        self._written[_NUM_NUMBERS + world_size + rank] = world_size * own_s
        if not self._of_device:
            return self._told
        of_losses = self._of_losses_on_device()
        rest = self._told[len(of_losses) :].to(self._peers.device, non_blocking=True)
        return torch.cat([of_losses * world_size, rest])

    def take(self) -> StepTotals:
        """Return the totals over all ranks. Call this after ``backward`` has returned. It waits
        until the device has finished."""
        sums, self.numbers.grad = self.numbers.grad, None
        assert sums is not None
        return self.totals_of(self._peers.result(sums).numpy().tobytes())

    def totals_of(self, sums: bytes) -> StepTotals:
        """Decode the sums of all ranks' numbers: as many float32 values as ``numbers`` has."""
        loss, nonfinite_ranks, fraction, fields, hash_sums, *of_ranks = self._received.unpack(sums)
        facts, world_size = _facts_of(fields), self._peers.world_size
        marks, own_s = tuple(of_ranks[:world_size]), tuple(of_ranks[world_size:])
        return StepTotals(
            loss, fraction + facts.weight, facts, hash_sums, marks, own_s, nonfinite_ranks
        )

    def _of_losses_on_device(self) -> torch.Tensor:
        """Compute on the device the first of the numbers, which depend on losses and weights that
        are there."""
        device = self._peers.device
        losses, weights = zip(*self._of_device, strict=True)
        loss = torch.stack(losses).sum(dtype=torch.float64)
        known = sum(float(weight) for weight in weights if not isinstance(weight, torch.Tensor))
        tensors = [
            weight.detach().double().to(device)
            for weight in weights
            if isinstance(weight, torch.Tensor)
        ]
        weight = torch.stack(
            [torch.full((), known, dtype=torch.float64, device=device), *tensors]
        ).sum()
        nonfinite = torch.logical_not(torch.isfinite(loss)).double()
        whole = torch.where(
            (weight >= 0) & (weight < _MOST_WEIGHT), weight.floor(), torch.zeros_like(weight)
        )
        sizes = torch.pow(256.0, torch.arange(_ENDS[1], dtype=torch.float64, device=device))
        bytes_of_weight = (whole / sizes).floor().remainder(256.0)
        fractions = torch.stack([loss, nonfinite * (self._peers.rank + 1), weight - whole])
        return torch.cat([fractions, bytes_of_weight, nonfinite[None]]).float()


def expected(samples: Count, world_size: int) -> Expected:
    return Expected(samples, told_hashes([samples.sample_hash], world_size)[0])


def step_mark(step: int) -> int:
    """Return the mark that a rank sends for the step after ``step`` steps done. It is never 0,
    which is what a silent rank adds."""
    return step % _STEP_MARKS + 1


def told_hashes(hashes: Sequence[int], world_size: int) -> list[bytes]:
    """Return each hash as a rank of a group of ``world_size`` sends it."""
    each = _sent(np.array(hashes, dtype="<u8").tobytes(), world_size)
    size = _FLOAT_BYTES * _HASH.size
    return [each[start : start + size] for start in range(0, len(each), size)]


@lru_cache(_REMEMBERED)
def _told_fields(fields: tuple[int, ...], world_size: int) -> bytes:
    """Encode the fields. Cached, like ``_facts_of``, since they are mostly the same from step to
    step."""
    return _sent(_WHOLE.pack(*fields), world_size)


@lru_cache(_REMEMBERED)
def _facts_of(sums: bytes) -> Facts:
    return Facts(*_numbers_of(sums, _ENDS))


def _sent(whole: bytes, world_size: int) -> bytes:
    """Return every byte as a float32, multiplied by the world size that DDP divides by."""
    return (np.frombuffer(whole, np.uint8).astype(np.float32) * np.float32(world_size)).tobytes()


def _numbers_of(sums: bytes, ends: Sequence[int]) -> list[int]:
    """Return the sums of fields modulo 2**64, like the hash, from the sums of their bytes. Each
    field has its lowest byte first.

    Args:
        sums: float32 values.
        ends: offsets in ``sums`` where fields begin and end.
    """
    sums_of_bytes = np.rint(np.nan_to_num(np.frombuffer(sums, np.float32))).tolist()
    return [
        sum(int(byte) << (8 * place) for place, byte in enumerate(sums_of_bytes[begin:end]))
        & MASK64
        for begin, end in itertools.pairwise(ends)
    ]
