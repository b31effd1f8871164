"""Counter-based randomness: every random choice depends only on its purpose, never on which process
makes it or when.

All of it uses one mixing function, the finaliser of splitmix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014). It works on Python integers for keys and on numpy
arrays for samples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

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


def seed_micro_batch(
    seed: int, step: int, number: int, device: torch.device, *, torch_alone: bool = False
) -> None:
    """Seed the global generators for one micro-batch's forward pass, such as for dropout.

    With ``torch_alone`` seed only those of torch, for models that are known to use no other.
    """
    keyed = key(seed, step, number, 2)
    if torch_alone:
        torch.default_generator.manual_seed(keyed)
    else:
        _seed_all(keyed)
    if device.type == "cuda":
        torch.cuda.manual_seed(keyed)


def torch_generators(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the torch generators that a forward pass on ``device`` may use."""
    states = [torch.default_generator.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch after the block."""
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch_generators(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torchs[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(torchs[1], device)


def _seed_all(keyed: int) -> None:
    torch.default_generator.manual_seed(keyed)
    random.seed(keyed)
    np.random.seed(keyed & 0xFFFFFFFF)
