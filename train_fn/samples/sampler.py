"""Choose the samples of each global batch and the rank that runs them, at any world size, by pure
functions; and seed generators.

An epoch's order is a permutation that is computed index by index (a keyed Feistel network,
cycle-walking), so that a data set of any size costs no memory and a resume at any step costs no
time. Global batch k of an epoch is positions [k*B, (k+1)*B) of the permutation; the last one of an
epoch is short, so that every sample is used exactly once. A global batch is cut into canonical
micro-batches whatever the world size, and ranks take contiguous runs of whole micro-batches: of
near-equal length, or as ``division`` says.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from train_fn.samples.shares import Division

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
    division: Division = field(default_factory=Division, kw_only=True, compare=False, repr=False)
    """How ranks divide the micro-batches."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("the training set is empty; there is nothing to train on")
        assert 1 <= self.micro_batch_size <= self.global_batch_size

    @property
    def fingerprint(self) -> str:
        """Identifies what beside the data's own fingerprint decides the order of samples."""
        return ""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def size_of(self, k: int) -> int:
        """Return the number of samples in an epoch's global batch ``k``."""
        return min(self.global_batch_size, self.num_samples - k * self.global_batch_size)

    def num_micro(self, k: int) -> int:
        """Return the number of micro-batches in an epoch's global batch ``k``."""
        return -(-self.size_of(k) // self.micro_batch_size)

    @property
    def fullest(self) -> int:
        """Return the global batch of an epoch that has the most micro-batches."""
        return 0

    def num_before(self, k: int) -> int:
        """Return the number of samples in an epoch's global batches before ``k``."""
        return min(k * self.global_batch_size, self.num_samples)

    def first_micro_batch(self) -> MicroBatch:
        """Return the run's first micro-batch, with which every attempt begins."""
        return MicroBatch(0, 0, self.global_batch(0, 0)[: self.micro_batch_size])

    def with_smallest(self, total_steps: int) -> set[int]:
        """Return global batches of an epoch, of which one has the smallest micro-batch of all."""
        steps = self.steps_per_epoch
        return {0, steps - 1} if total_steps >= steps else {0}

    def tokens_in(self, epoch: int, k: int) -> int | None:
        """Return the tokens of a global batch; None if its samples have no known length."""
        return None

    def numbers(self, k: int, rank: int, world_size: int) -> range:
        """Return the numbers of the micro-batches that a rank runs of an epoch's global batch
        ``k``."""
        return self.part(self.num_micro(k), rank, world_size)

    def part(self, count: int, rank: int, world_size: int) -> range:
        """Return a rank's contiguous part of ``count`` micro-batches, also of an evaluation."""
        planned = self.division.of(count, world_size)
        return share_of(count, rank, world_size) if planned is None else planned[rank]

    def is_full(self, step: int) -> bool:
        """Return whether the ranks have as many micro-batches in a step as in any."""
        return self.num_micro(step % self.steps_per_epoch) == self.num_micro(self.fullest)

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
            for number in self.part(num_micro, rank, world_size)
        ]

    def stream(self, epoch: int, k: int, rank: int, world_size: int) -> Iterator[MicroBatch]:
        """Yield a rank's micro-batches from global batch ``k`` of ``epoch`` on, over all later
        epochs, without end; none if there are more ranks than micro-batches.

        Loader processes fetch ahead: a search for the first one would never end.
        """
        if not self.share(epoch, self.fullest, rank, world_size):
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


# ---------------------------------------------------------------- randomness

# Counter-based randomness: every random choice depends only on its purpose, never on which process
# makes it or when.
#
# All of it uses one mixing function, the finaliser of splitmix64 (Steele, Lea and Flood, "Fast
# splittable pseudorandom number generators", 2014). It works on Python integers for keys and on
# numpy arrays for samples.

UInt64Array = NDArray[np.uint64]

MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U30, _U27, _U31, _U11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_FIRST_U64, _SECOND_U64, _GOLDEN_U64 = np.uint64(_FIRST), np.uint64(_SECOND), np.uint64(_GOLDEN)


def key(*parts: int) -> int:
    """Return one 64-bit key from integers. Their order matters."""
    state = 0
    for part in parts:
        state = (state ^ (part & MASK64)) + _GOLDEN & MASK64
        state = (state ^ (state >> 30)) * _FIRST & MASK64
        state = (state ^ (state >> 27)) * _SECOND & MASK64
        state ^= state >> 31
    return state


def mix(values: UInt64Array, keyed: int | UInt64Array) -> UInt64Array:
    """Return a new array with 64 random bits for every value, under one key or a key for each."""
    mixed = (values ^ (np.uint64(keyed) if isinstance(keyed, int) else keyed)) + _GOLDEN_U64
    mixed ^= mixed >> _U30
    mixed *= _FIRST_U64
    mixed ^= mixed >> _U27
    mixed *= _SECOND_U64
    mixed ^= mixed >> _U31
    return mixed


def uniform(seed: int, epoch: int, indices: NDArray[np.int64], stream: str) -> NDArray[np.float64]:
    """Return one number in [0, 1) for every sample index. ``stream`` separates different uses of a
    sample's randomness."""
    bits = mix(indices.astype(np.uint64), key(seed, epoch, *stream.encode()))
    return (bits >> _U11).astype(np.float64) * 2.0**-53


def seed_building(seed: int, purpose: int) -> None:
    """Seed the global generators of Python, numpy and torch (on all devices) before a part of the
    task is built.

    Each part has its own ``purpose``, so that its random numbers do not depend on how many an
    earlier part drew.
    """
    keyed = key(seed, purpose)
    torch.manual_seed(keyed)
    _seed_all(keyed)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators of Python, numpy and torch for one sample's transforms."""
    _seed_all(key(seed, epoch, index, 1))


def seed_micro_batch(seed: int, step: int, number: int, device: torch.device) -> None:
    """Seed the global generators for one micro-batch's forward pass, such as for dropout."""
    keyed = key(seed, step, number, 2)
    _seed_all(keyed)
    if device.type == "cuda":
        torch.cuda.manual_seed(keyed)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch after the block."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.default_generator
    of_torch, of_gpu = own.get_state(), None
    if device.type == "cuda":
        of_gpu = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        own.set_state(of_torch)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, device)


def _seed_all(keyed: int) -> None:
    torch.default_generator.manual_seed(keyed)
    random.seed(keyed)
    np.random.seed(keyed & 0xFFFFFFFF)


# ---------------------------------------------------------------- own generators

# Generators that samplers, data and collate functions own are seeded anew, as the global ones are.

_MOST_SEED = (1 << 32) - 1
"""Largest seed that every kind of generator takes."""

_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_MOST_LEVELS, _MOST_PARTS = 6, 256  # how deep they are looked for, and in how large containers


def own_generators(parts: Iterable[Any], *, of_samplers: bool = False) -> list[Any]:
    """Return the generators that these objects own, also in what they hold, as in a transform. Of
    samplers only those in attributes, but for what torch calls ``generator``: that is seeded with
    the order."""
    seen = {id(each): each for each in (random._inst, torch.default_generator)}
    found, level = list[Any](), list(parts)
    for _ in range(1 if of_samplers else _MOST_LEVELS):
        held = {id(each): each for part in level for each in _held(part, of_samplers)}
        level = [each for number, each in held.items() if number not in seen]
        seen |= held
        found += [each for each in level if isinstance(each, _KINDS)]
    return found


def _held(part: Any, of_samplers: bool) -> Iterator[Any]:
    """Yield what an object, a small container or a function holds, and the generators that its
    code reads as globals. A model has generators of its own."""
    is_model = isinstance(part, torch.nn.Module) and next(part.parameters(), None) is not None
    if is_model or isinstance(part, type | ModuleType | MethodType):
        return
    named = part if isinstance(part, dict) else getattr(part, "__dict__", {})
    parts = part if isinstance(part, list | tuple) else named.values()
    if len(parts) <= _MOST_PARTS:
        of_order = named.get("generator") if of_samplers else part
        yield from (
            one for one in parts if one is not of_order or not isinstance(one, torch.Generator)
        )
    kinds = () if of_samplers else type(part).__mro__
    for each in (part, *(each for kind in kinds for each in vars(kind).values())):
        if isinstance(each, FunctionType):
            read = [each.__globals__.get(name) for name in each.__code__.co_names]
            near = (one for one in read if getattr(one, "__globals__", 0) is each.__globals__)
            yield from (*near, *(one for one in read if isinstance(one, _KINDS)))
            yield from (one.cell_contents for one in each.__closure__ or () if one != CellType())


def digest_of(generators: Iterable[Any]) -> str:
    """Return a digest of the states of generators."""
    digest = hashlib.sha256()
    for each in generators:
        is_of_torch = isinstance(each, torch.Generator)
        digest.update(bytes(each.get_state().tolist()) if is_of_torch else pickle.dumps(each))
    return digest.hexdigest()


def seed_anew(generators: Iterable[Any], seed: int) -> None:
    """Seed each of these generators by ``seed`` and its number among them."""
    for number, each in enumerate(generators):
        own = key(seed, number) & _MOST_SEED
        if isinstance(each, torch.Generator):
            each.manual_seed(own)
        elif isinstance(each, np.random.Generator):
            each.bit_generator.state = type(each.bit_generator)(own).state
        else:
            each.seed(own)
