"""Choose the samples of each global batch, and the rank that runs them. All functions are pure and
work at any world size.

An epoch's order is a permutation that is computed index by index (a keyed Feistel network,
cycle-walking), so that a data set of any size costs no memory and a resume at any step costs no
time. Global batch k of an epoch is positions [k*B, (k+1)*B) of the permutation; the last one of an
epoch is short, so that every sample is used exactly once. A global batch is cut into canonical
micro-batches whatever the world size, and ranks take contiguous near-equal runs of whole
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from train_fn.samples.randomness import key, mix

IndexArray = NDArray[np.int64]

_ROUNDS = 8
_BLOCK = 1 << 16
"""Positions that are permuted at once. Two such blocks are cached, so a step costs only a slice."""


@dataclass(frozen=True)
class MicroBatch:
    """Describe one canonical micro-batch. ``number`` is its place in the global batch; ``indices``
    are positions in the data set."""

    epoch: int
    number: int
    indices: IndexArray
    k: int = 0
    """The global batch within its epoch."""


@dataclass(frozen=True)
class Sampler:
    """Compute the order of one run's training samples. Sizes are in samples."""

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("the training set is empty; there is nothing to train on")
        assert 1 <= self.micro_batch_size <= self.global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def size_of(self, k: int) -> int:
        """Return the number of samples in an epoch's global batch ``k``."""
        return min(self.global_batch_size, self.num_samples - k * self.global_batch_size)

    def num_micro(self, k: int) -> int:
        """Return the number of micro-batches in an epoch's global batch ``k``."""
        return -(-self.size_of(k) // self.micro_batch_size)

    def numbers(self, k: int, rank: int, world_size: int) -> range:
        """Return the numbers of the micro-batches that a rank runs of an epoch's global batch
        ``k``."""
        return share_of(self.num_micro(k), rank, world_size)

    def samples_before(self, k: int) -> int:
        """Return the samples in the first ``k`` global batches of an epoch."""
        return min(k * self.global_batch_size, self.num_samples)

    def global_batch(self, epoch: int, k: int) -> IndexArray:
        """Return the sample indices of the epoch's global batch ``k``, in canonical order."""
        start = k * self.global_batch_size
        stop = start + self.size_of(k)
        assert 0 <= start < stop
        blocks = [
            _block(self.seed, epoch, self.num_samples, number)[
                max(start - number * _BLOCK, 0) : min(stop - number * _BLOCK, _BLOCK)
            ]
            for number in range(start // _BLOCK, (stop - 1) // _BLOCK + 1)
        ]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def share(self, epoch: int, k: int, rank: int, world_size: int) -> list[MicroBatch]:
        """Return the micro-batches of one global batch that a rank runs, in order; may be empty."""
        indices = self.global_batch(epoch, k)
        num_micro = -(-len(indices) // self.micro_batch_size)
        size = self.micro_batch_size
        return [
            MicroBatch(epoch, number, indices[number * size : (number + 1) * size], k)
            for number in share_of(num_micro, rank, world_size)
        ]

    def stream(self, epoch: int, k: int, rank: int, world_size: int) -> Iterator[MicroBatch]:
        """Yield a rank's micro-batches from global batch ``k`` of ``epoch`` on, over all later
        epochs, without end; none if there are more ranks than micro-batches.

        Loader processes fetch ahead: a search for the first one would never end.
        """
        if not self.share(epoch, 0, rank, world_size):  # the first global batch is the largest
            return
        while True:
            for position in range(k, self.steps_per_epoch):
                yield from self.share(epoch, position, rank, world_size)
            epoch, k = epoch + 1, 0


class WholeShares(Sampler):
    """Cuts every global batch into one micro-batch for each rank, of nearly equal size. None has a
    single sample, which BatchNorm cannot train on, if the global batch has several: the last ranks
    then have none."""

    def share(self, epoch: int, k: int, rank: int, world_size: int) -> list[MicroBatch]:
        """Return the one micro-batch of a rank; may be empty."""
        indices = self.global_batch(epoch, k)
        num_micro = max(1, min(world_size, len(indices) // 2))
        if rank >= num_micro:
            return []
        part = share_of(len(indices), rank, num_micro)
        return [MicroBatch(epoch, rank, indices[part.start : part.stop], k)]


def share_of(count: int, rank: int, world_size: int) -> range:
    """Return a rank's contiguous share of ``count`` things. Lower ranks take one more if it does
    not divide evenly."""
    each, rest = divmod(count, world_size)
    start = rank * each + min(rank, rest)
    return range(start, start + each + (rank < rest))


@lru_cache(maxsize=2)
def _block(seed: int, epoch: int, num_samples: int, number: int) -> IndexArray:
    positions = np.arange(number * _BLOCK, min((number + 1) * _BLOCK, num_samples), dtype=np.uint64)
    indices = permute(seed, epoch, num_samples, positions)
    indices.flags.writeable = False
    return indices


def permute(seed: int, epoch: int, num_samples: int, positions: NDArray[np.uint64]) -> IndexArray:
    """Return the sample index at each position of the epoch's permutation of
    ``range(num_samples)``. Vectorised, O(1) memory per index.

    A Feistel network permutes the smallest power of two that holds ``num_samples``; what falls
    outside walks on along its cycle until it falls inside, which keeps it a permutation (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    num_bits = max(2, (num_samples - 1).bit_length())
    keys = [key(seed, epoch, number, 3) for number in range(_ROUNDS)]
    values = _feistel(positions, num_bits, keys)
    outside = np.flatnonzero(values >= num_samples)
    while outside.size:
        walked = _feistel(values[outside], num_bits, keys)
        values[outside] = walked
        outside = outside[walked >= num_samples]
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], num_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """Permute [0, 2**num_bits): halves of near-equal width that swap in each of an even number of
    rounds."""
    left_bits, right_bits = num_bits // 2, num_bits - num_bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    for keyed in keys:
        left, right = right, left ^ (mix(right, keyed) & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right
