"""A rank's report of a step as numbers in the all-reduce of its gradients, and what is known of a
step before it begins.
"""

from __future__ import annotations

import itertools
import math
import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from train_fn.samples.ledger import Count, sample_hash
from train_fn.samples.sampler import MASK64, MicroBatch, Sampler
from train_fn.step.peers import Peers
from train_fn.step.report import (
    FLOAT_BYTES,
    HASH_BYTES,
    NO_VOTES,
    StepFacts,
    StepTotals,
    Votes,
    decode_integers,
    encode_bytes,
    encode_hash,
    step_mark,
)

# A report as float32 numbers whose sum over ranks is exact.
#
# DDP sums gradients in float32 and divides by the world size. So every number is multiplied by the
# world size before it is sent. Integers are sent byte by byte: float32 holds sums of bytes exactly.
#
# The numbers, in this order:
#
# - loss, rank of a loss that is not finite, and the weight's fraction (the whole of a weight that
#   is too large);
# - the bytes of the integer fields, in the order of ``StepFacts``;
# - the bytes of the sample hash, which differ from step to step, unlike most other fields;
# - for each rank a slot for the mark of its step, then for each rank one for its own seconds, then
#   for each rank one for those that it waited for data, then for each rank those of its fingerprint
#   of the step before.

NUM_FRACTIONS = 3
NUM_OF_HEADER = 3
"""Slots of a rank's fingerprint: 12 bits in each, which float32 holds exactly, even multiplied by
the world size."""
NUM_OF_RANK = 3 + NUM_OF_HEADER
"""All slots of a rank."""
_SLOT_BITS = 12
_FIELDS = "QBIIIQBBB"
"""Formats of weight, whether the loss is not finite; samples, unexpected, missing; a checkpoint's
step; cancel, pause, save."""
_INTEGERS = struct.Struct(f"<{_FIELDS}")
NUM_SUMMED = NUM_FRACTIONS + _INTEGERS.size + HASH_BYTES
"""The numbers before the slots of each rank."""
FIELD_ENDS = list(
    itertools.accumulate(map(struct.calcsize, (f"<{field}" for field in _FIELDS)), initial=0)
)
"""Offsets at which the bytes of the integer fields begin and end."""
WEIGHT_BYTES = FIELD_ENDS[1]
MAX_EXACT_WEIGHT = 1 << 48
"""A weight below it is sent exactly, a larger one with the precision of float32."""
SUMMED_FORMAT = f"={NUM_FRACTIONS}f{FLOAT_BYTES * _INTEGERS.size}s{FLOAT_BYTES * HASH_BYTES}s"
"""The fractions, then the bytes of the integers, each already encoded as a float32."""
CACHE_SIZE = 16


class Expected(NamedTuple):
    """Hold what one rank sends about its samples if the loader yields what the sampler expects.
    Computed before the step."""

    samples: Count
    encoded_hash: bytes
    """The sample hash as encoded by ``encode_hash``."""


NOTHING_EXPECTED = Expected(Count(), bytes(FLOAT_BYTES * HASH_BYTES))


def expect(samples: Count, world_size: int) -> Expected:
    """Return ``samples`` with their hash encoded for a group of ``world_size``."""
    return Expected(samples, encode_hash(samples.sample_hash, world_size))


def encode_header(fingerprint: int, world_size: int) -> tuple[int, ...]:
    """Return the slots of a fingerprint as a rank of a group of ``world_size`` sends them."""
    mask = (1 << _SLOT_BITS) - 1
    return tuple(
        world_size * (fingerprint >> (_SLOT_BITS * place) & mask) for place in range(NUM_OF_HEADER)
    )


@lru_cache(CACHE_SIZE)
def encode_fields(fields: tuple[int, ...], world_size: int) -> bytes:
    """Encode the integer fields. Cached, since they are mostly the same from step to step."""
    return encode_bytes(_INTEGERS.pack(*fields), world_size)


@lru_cache(CACHE_SIZE)
def decode_facts(sums: bytes) -> StepFacts:
    """Decode the sums of the integer fields. Cached, since they are mostly the same from step to
    step."""
    return StepFacts(*decode_integers(sums, FIELD_ENDS))


_SUMMED = struct.Struct(SUMMED_FORMAT)


class ReportSums:
    """Collect a rank's facts about a step, and have DDP sum them over ranks.

    They are the gradient of ``numbers``: a parameter of the module that DDP wraps, but of no model
    and no optimizer. A step calls ``begin``, ``add`` for each micro-batch, ``backward`` with the
    last, and ``take``.

    Between a model's passes the caches are cold. One torch call, or touching five objects not used
    since the last step, then costs as much as everything here. So there are few of both.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        num_used = NUM_SUMMED + NUM_OF_RANK * peers.world_size
        num_numbers = num_used + num_used % 2
        """An even number: the gradients behind it in DDP's bucket begin at whole words."""
        self.numbers = nn.Parameter(
            torch.zeros(num_numbers, dtype=torch.float32, device=peers.device)
        )
        self._outgoing = np.zeros(num_numbers, np.float32)
        """The slots of other ranks stay zero."""
        self._outgoing_tensor = torch.from_numpy(self._outgoing)
        padding = 4 * (num_numbers - num_used)
        self._received = struct.Struct(
            f"{SUMMED_FORMAT}{NUM_OF_RANK * peers.world_size}f{padding}x"
        )
        self.begin(0)

    def begin(self, step: int, expected: Expected = NOTHING_EXPECTED, fingerprint: int = 0) -> None:
        """Begin the step after ``step`` steps done.

        Args:
            expected: describes the samples that this rank's loader should yield.
            fingerprint: ``Fingerprints.header`` of the step before, which must be the same on all
                ranks.
        """
        self._step, self._expected, self._fingerprint = step, expected, fingerprint
        self._loss, self._weight = 0.0, 0.0
        self._on_device: list[tuple[torch.Tensor, torch.Tensor | float]] = []
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
            self._on_device.append((loss_sum.detach(), weight))
        if difference is not None:
            self._expected = expect(self._expected.samples + difference, self._peers.world_size)

    def backward(self, loss: torch.Tensor, votes: Votes = NO_VOTES) -> None:
        """Run ``loss.backward()``, and send the collected facts in its all-reduce."""
        torch.autograd.backward((loss, self.numbers), (None, self.gradient(votes)))

    def gradient(self, votes: Votes = NO_VOTES) -> torch.Tensor:
        """Return the numbers that ``backward`` sends, in a tensor that the next call overwrites.
        Nothing here waits for a CUDA device."""
        stop, checkpoint_step, save, own_s, data_s = votes
        world_size, rank = self._peers.world_size, self._peers.rank
        loss, weight, (samples, encoded_hash) = self._loss, self._weight, self._expected
        nonfinite = not math.isfinite(loss)
        whole = math.floor(weight) if 0 <= weight < MAX_EXACT_WEIGHT else 0
        counts = (samples.num_samples, samples.num_unexpected, samples.num_missing)
        requests = (checkpoint_step, stop == "cancel", stop == "pause", save)
        fields = encode_fields((whole, nonfinite, *counts, *requests), world_size)
        fractions = (
            world_size * loss,
            world_size * nonfinite * (rank + 1),
            world_size * (weight - whole),
        )
        _SUMMED.pack_into(self._outgoing.data, 0, *fractions, fields, encoded_hash)
        self._outgoing[NUM_SUMMED + rank] = world_size * step_mark(self._step)
        self._outgoing[NUM_SUMMED + world_size + rank] = world_size * own_s
        self._outgoing[NUM_SUMMED + 2 * world_size + rank] = world_size * data_s
        begin = NUM_SUMMED + 3 * world_size + NUM_OF_HEADER * rank
        self._outgoing[begin : begin + NUM_OF_HEADER] = encode_header(self._fingerprint, world_size)
        if not self._on_device:
            return self._outgoing_tensor
        of_losses = self._numbers_on_device()
        rest = self._outgoing_tensor[len(of_losses) :].to(self._peers.device, non_blocking=True)
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
        facts, world_size = decode_facts(fields), self._peers.world_size
        marks, own_s = of_ranks[:world_size], of_ranks[world_size : 2 * world_size]
        data_s, headers = of_ranks[2 * world_size : 3 * world_size], of_ranks[3 * world_size :]
        return StepTotals(
            loss,
            fraction + facts.weight,
            facts,
            hash_sums,
            tuple(marks),
            tuple(own_s),
            nonfinite_ranks,
            tuple(headers),
            tuple(data_s),
        )

    def _numbers_on_device(self) -> torch.Tensor:
        """Compute on the device the numbers that depend on losses and weights there: the fractions,
        the weight's bytes, and whether the loss is not finite."""
        device = self._peers.device
        losses, weights = zip(*self._on_device, strict=True)
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
            (weight >= 0) & (weight < MAX_EXACT_WEIGHT), weight.floor(), torch.zeros_like(weight)
        )
        sizes = torch.pow(256.0, torch.arange(WEIGHT_BYTES, dtype=torch.float64, device=device))
        bytes_of_weight = (whole / sizes).floor().remainder(256.0)
        fractions = torch.stack([loss, nonfinite * (self._peers.rank + 1), weight - whole])
        return torch.cat([fractions, bytes_of_weight, nonfinite[None]]).float()


# ---------------------------------------------------------------- plans

# What is known of a rank's part of a step before it begins.


class StepPlan(NamedTuple):
    """Describe one rank's part of one global batch."""

    num_samples: int
    """Samples in the global batch."""
    share: list[MicroBatch]
    hashes: list[int]
    """The ledger's hash of each micro-batch's samples."""
    expected: Expected
    """What the rank sends about its samples if the loader yields all of these."""
    num_tokens: int | None = None
    """Tokens in the global batch, if its samples have a known length."""


class StepPlans:
    """Return the plans of one rank, step by step."""

    def __init__(self, sampler: Sampler, rank: int, world_size: int) -> None:
        self._sampler, self._rank, self._world_size = sampler, rank, world_size
        self._newest: tuple[int, StepPlan] | None = None

    def of(self, step: int) -> StepPlan:
        """Return the plan of the step after ``step`` steps done."""
        if self._newest is None or self._newest[0] != step:
            self._newest = step, self._plan(step)
        return self._newest[1]

    def _plan(self, step: int) -> StepPlan:
        epoch, k = divmod(step, self._sampler.steps_per_epoch)
        share = self._sampler.share(epoch, k, self._rank, self._world_size)
        hashes = [sample_hash(epoch, step, micro.indices) for micro in share]
        count = Count(sum(len(micro.indices) for micro in share), 0, 0, sum(hashes) & MASK64)
        return StepPlan(
            self._sampler.size_of(k),
            share,
            hashes,
            expect(count, self._world_size),
            self._sampler.tokens_in(epoch, k),
        )
