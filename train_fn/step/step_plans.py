"""Plan a rank's work for many steps at once.

Between a model's passes the caches are cold, and one numpy call costs as much as hashing thousands
of samples. So work that depends only on the step is not done there.
"""

from __future__ import annotations

from typing import NamedTuple

from train_fn.samples.ledger import Count, sample_hashes
from train_fn.samples.randomness import MASK64
from train_fn.samples.sampler import MicroBatch, Sampler
from train_fn.step.totals_encoding import Expected, encode_hashes

_MOST_STEPS = 64
_MOST_SAMPLES = 1 << 14
"""Limit on the samples of all steps that are planned at once. Hashing these takes a fraction of a
millisecond."""


class StepPlan(NamedTuple):
    """Describe one rank's part of one global batch."""

    num_samples: int
    """Samples in the global batch."""
    share: list[MicroBatch]
    hashes: list[int]
    """The ledger's hash of each micro-batch's samples."""
    expected: Expected
    """What the rank sends about its samples if the loader yields all of these."""


class StepPlans:
    """Return the plans of one rank, step by step."""

    def __init__(self, sampler: Sampler, rank: int, world_size: int) -> None:
        self._sampler, self._rank, self._world_size = sampler, rank, world_size
        self._first, self._plans = 0, list[StepPlan]()

    def of(self, step: int) -> StepPlan:
        """Return the plan of the step after ``step`` steps done."""
        position = step - self._first
        if not 0 <= position < len(self._plans):
            self._first, self._plans, position = step, self._plan(step), 0
        return self._plans[position]

    def _plan(self, first: int) -> list[StepPlan]:
        sampler = self._sampler
        shares: list[tuple[int, list[MicroBatch]]] = []
        places: list[tuple[int, int]] = []
        num_samples = 0
        while len(shares) < _MOST_STEPS and num_samples < _MOST_SAMPLES:
            step = first + len(shares)
            epoch, k = divmod(step, sampler.steps_per_epoch)
            share = sampler.share(epoch, k, self._rank, self._world_size)
            shares.append((sampler.size_of(k), share))
            places += [(epoch, step)] * len(share)
            num_samples += sum(len(micro.indices) for micro in share)
        hashes = iter(
            sample_hashes(places, [micro.indices for _, share in shares for micro in share])
        )
        of_steps = [[next(hashes) for _ in share] for _, share in shares]
        sums = [sum(each) & MASK64 for each in of_steps]
        encoded = encode_hashes(sums, self._world_size)
        counts = [
            Count(sum(len(micro.indices) for micro in share), 0, 0, total)
            for (_, share), total in zip(shares, sums, strict=True)
        ]
        return [
            StepPlan(size, share, of_step, Expected(count, encoded_hash))
            for (size, share), of_step, count, encoded_hash in zip(
                shares, of_steps, counts, encoded, strict=True
            )
        ]
