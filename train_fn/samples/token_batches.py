"""Choose the samples of each global batch by their lengths: as many as fit into a number of tokens.

Samples of about the same length are one bucket. An epoch goes through the buckets from the longest
samples to the shortest and cuts it into batches: the first sample of a batch decides how many it
has, so that padding to the longest wastes little. Which batch comes when, and from which buckets,
follows from lengths and seed alone; which samples of a bucket it gets also from the epoch. So every
epoch has as many steps, of the same sizes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from everstep.spec.sections import TrainSpec
from train_fn.errors import BadTask
from train_fn.samples.sampler import IndexArray, MicroBatch, Sampler, key, permute, share_of

_BUCKETS, _BATCHES = 12, 13
"""Purposes of the orders of samples in a bucket, and of the batches of an epoch."""


class _Buckets(NamedTuple):
    """The samples by bucket, the longest first; and an entry for each bucket."""

    order: IndexArray
    begin: IndexArray
    """Its first place in the order."""
    size: IndexArray
    longest: IndexArray
    """Tokens of its longest sample."""


class _Batches(NamedTuple):
    """Arrays with an entry for each global batch of an epoch."""

    bucket: IndexArray
    """That of its first sample."""
    start: IndexArray
    """Its first place in the order of buckets."""
    size: IndexArray
    """Its samples."""
    num_micro: IndexArray


@dataclass(frozen=True, eq=False)
class TokenSampler(Sampler):
    """Sample by tokens, like ``Sampler``: global and micro-batch size are in tokens, padding
    included. A micro-batch has more only if a single sample is longer. A batch has no more
    micro-batches than the sizes say, so that ranks have equal shares of most."""

    lengths: IndexArray
    """Tokens of each sample, none above ``global_batch_size``."""

    @property
    def steps_per_epoch(self) -> int:
        return len(self._batches.size)

    def size_of(self, k: int) -> int:
        return int(self._batches.size[k])

    def num_micro(self, k: int) -> int:
        return int(self._batches.num_micro[k])

    @cached_property
    def fullest(self) -> int:
        return int(np.argmax(self._batches.num_micro))

    def num_before(self, k: int) -> int:
        return int(self._batches.size[:k].sum())

    def global_batch(self, epoch: int, k: int) -> IndexArray:
        buckets, bucket = self._buckets, int(self._batches.bucket[k])
        at, parts = int(self._batches.start[k]), list[IndexArray]()
        stop = at + self.size_of(k)
        while at < stop:
            begin, size = int(buckets.begin[bucket]), int(buckets.size[bucket])
            end = min(stop, begin + size)
            places = np.arange(at - begin, end - begin, dtype=np.uint64)
            chosen = permute(key(self.seed, bucket, _BUCKETS), epoch, size, places)
            parts.append(buckets.order[begin + chosen])
            at, bucket = end, bucket + 1
        return np.concatenate(parts)

    def share(self, epoch: int, k: int, rank: int, world_size: int) -> list[MicroBatch]:
        indices, num_micro = self.global_batch(epoch, k), self.num_micro(k)
        parts = (
            (number, share_of(len(indices), number, num_micro))
            for number in self.part(num_micro, rank, world_size)
        )
        return [
            MicroBatch(epoch, number, indices[part.start : part.stop], k) for number, part in parts
        ]

    def first_micro_batch(self) -> MicroBatch:
        return self.share(0, 0, 0, 1)[0]

    def with_smallest(self, total_steps: int) -> set[int]:
        batches = self._batches
        return {int(np.argmin((batches.size // batches.num_micro)[:total_steps]))}

    def tokens_in(self, epoch: int, k: int) -> int:
        return int(self.lengths[self.global_batch(epoch, k)].sum())

    @property
    def fingerprint(self) -> str:
        return f", by lengths {hashlib.sha256(self.lengths.tobytes()).hexdigest()[:16]}"

    @cached_property
    def _buckets(self) -> _Buckets:
        # Bounds are powers of two and seven steps between them, in integers: a logarithm may have
        # other last bits on another processor.
        exponents = np.frexp(self.lengths.astype(np.float64))[1].astype(np.int64) - 1
        names = 8 * exponents + (self.lengths * 8 >> exponents)
        order = np.argsort((names.max() - names).astype(np.uint16), kind="stable")
        begin = np.flatnonzero(np.diff(names[order], prepend=-1))
        size = np.diff(begin, append=len(order))
        return _Buckets(order, begin, size, np.maximum.reduceat(self.lengths[order], begin))

    @cached_property
    def _batches(self) -> _Batches:
        buckets, num_samples = self._buckets, self.num_samples
        ends = (buckets.begin + buckets.size).tolist()
        in_micro = np.maximum(1, self.micro_batch_size // buckets.longest)
        most = in_micro * max(1, self.global_batch_size // self.micro_batch_size)
        fits = np.minimum(self.global_batch_size // buckets.longest, most).tolist()
        starts, of_bucket, at, bucket = list[int](), list[int](), 0, 0
        while at < num_samples:
            while at >= ends[bucket]:
                bucket += 1
            starts.append(at)
            of_bucket.append(bucket)
            at += fits[bucket]
        places = np.arange(len(starts), dtype=np.uint64)
        order = permute(key(self.seed, _BATCHES), 0, len(starts), places)
        size = np.diff(starts, append=num_samples)
        num_micro = -(-size // in_micro[of_bucket])
        arrays = np.array(of_bucket), np.array(starts), size, num_micro
        return _Batches(*(each[order] for each in arrays))


def token_sampler(
    train: TrainSpec, micro_tokens: int, dataset: Any, most: int | None, name: str
) -> TokenSampler:
    """Return the sampler of a training set that gives ``lengths``. Raises BadTask.

    Args:
        micro_tokens: of a micro-batch, padding included.
        most: tokens that are used of it; None for all.
        name: of the data set, for errors.
    """
    lengths = lengths_of(dataset, name, most)
    longest = int(np.argmax(lengths))
    if lengths[longest] > train.global_batch_size:
        raise BadTask(
            f"sample {longest} of {name} has {lengths[longest]} tokens, and a global batch has at "
            f"most {train.global_batch_size}: {int((lengths > train.global_batch_size).sum())} of "
            f"{len(lengths)} samples fit into none. Cut them in the data set, or raise "
            "train.global_batch_size, which counts tokens with train.batch_by: tokens"
        )
    return TokenSampler(len(lengths), train.global_batch_size, micro_tokens, train.seed, lengths)


def lengths_of(dataset: Any, name: str, most: int | None = None) -> IndexArray:
    """Return the tokens of each sample of a data set, as it says them; with ``most``, of the first
    samples that have so many together. Raises BadTask."""
    said: Any = getattr(dataset, "lengths", None)
    said = said() if callable(said) else said
    if said is None:
        raise BadTask(
            f"train.batch_by is tokens, and {name} ({type(dataset).__name__}) has no lengths. Give "
            "it an attribute lengths, a whole number for each sample, or leave batch_by out"
        )
    try:
        found = np.asarray(said)
    except ValueError:  # lists of several lengths
        found = np.zeros(0)
    if not len(dataset):
        raise BadTask(f"{name} is empty; give it samples, or leave it out")
    if found.dtype.kind not in "iu" or found.shape != (len(dataset),):
        raise BadTask(
            f"lengths of {name} is an array of {found.dtype} of shape {found.shape}; it must hold "
            f"a whole number for each of its {len(dataset)} samples"
        )
    lengths = found.astype(np.int64)  # before: unsigned, -1 is a large number
    if (lengths < 1).any():
        raise BadTask(
            f"lengths of {name} says {lengths.min()} for sample {int(np.argmin(lengths))}; a "
            "length is at least 1. Leave empty samples out"
        )
    return lengths if most is None else lengths[: 1 + int((np.cumsum(lengths) < most).sum())]
