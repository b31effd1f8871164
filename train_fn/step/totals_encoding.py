"""Encode one rank's facts about a step as float32 numbers whose sum over ranks is exact.

DDP sums gradients in float32 and divides by the world size. So every number is multiplied by the
world size before it is sent. Integers are sent byte by byte: float32 holds sums of bytes exactly.

The numbers, in this order:

- loss, rank of a loss that is not finite, and the weight's fraction (the whole of a weight that is
  too large);
- the bytes of the integer fields, in the order of ``step_totals.Facts``;
- the bytes of the sample hash, which differ from step to step, unlike most other fields;
- for each rank a slot for the mark of its step, then for each rank one for its own seconds, then
  for each rank those of its fingerprint of the step before.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from train_fn.samples.ledger import Count
from train_fn.samples.randomness import MASK64

NUM_FRACTIONS = 3
NUM_OF_HEADER = 3
"""Slots of a rank's fingerprint: 12 bits in each, which float32 holds exactly, even multiplied by
the world size."""
NUM_OF_RANK = 2 + NUM_OF_HEADER
"""All slots of a rank."""
_SLOT_BITS = 12
_FIELDS = "QBIIIQBBBB"
"""Formats of weight, whether the loss is not finite; samples, unexpected, missing; a checkpoint's
step; cancel, pause, save, news."""
_INTEGERS = struct.Struct(f"<{_FIELDS}")
_HASH = struct.Struct("<Q")
NUM_SUMMED = NUM_FRACTIONS + _INTEGERS.size + _HASH.size
"""The numbers before the slots of each rank."""
FIELD_ENDS = list(
    itertools.accumulate(map(struct.calcsize, (f"<{field}" for field in _FIELDS)), initial=0)
)
"""Offsets at which the bytes of the integer fields begin and end."""
WEIGHT_BYTES = FIELD_ENDS[1]
HASH_ENDS = [0, _HASH.size]
MAX_EXACT_WEIGHT = 1 << 48
"""A weight below it is sent exactly, a larger one with the precision of float32."""
_FLOAT_BYTES = 4
SUMMED_FORMAT = f"={NUM_FRACTIONS}f{_FLOAT_BYTES * _INTEGERS.size}s{_FLOAT_BYTES * _HASH.size}s"
"""The fractions, then the bytes of the integers, each already encoded as a float32."""
CACHE_SIZE = 16


class Expected(NamedTuple):
    """Hold what one rank sends about its samples if the loader yields what the sampler expects.
    Computed before the step."""

    samples: Count
    encoded_hash: bytes
    """The sample hash as encoded by ``encode_hashes``."""


NOTHING_EXPECTED = Expected(Count(), bytes(_FLOAT_BYTES * _HASH.size))


def expect(samples: Count, world_size: int) -> Expected:
    """Return ``samples`` with their hash encoded for a group of ``world_size``."""
    return Expected(samples, encode_hashes([samples.sample_hash], world_size)[0])


def encode_hashes(hashes: Sequence[int], world_size: int) -> list[bytes]:
    """Return each hash as a rank of a group of ``world_size`` sends it."""
    encoded = _encode_bytes(np.array(hashes, dtype="<u8").tobytes(), world_size)
    size = _FLOAT_BYTES * _HASH.size
    return [encoded[start : start + size] for start in range(0, len(encoded), size)]


def encode_header(fingerprint: int, world_size: int) -> tuple[int, ...]:
    """Return the slots of a fingerprint as a rank of a group of ``world_size`` sends them."""
    mask = (1 << _SLOT_BITS) - 1
    return tuple(
        world_size * (fingerprint >> (_SLOT_BITS * place) & mask) for place in range(NUM_OF_HEADER)
    )


@lru_cache(CACHE_SIZE)
def encode_fields(fields: tuple[int, ...], world_size: int) -> bytes:
    """Encode the integer fields. Cached, since they are mostly the same from step to step."""
    return _encode_bytes(_INTEGERS.pack(*fields), world_size)


def _encode_bytes(data: bytes, world_size: int) -> bytes:
    """Return every byte as a float32, multiplied by the world size that DDP divides by."""
    return (np.frombuffer(data, np.uint8).astype(np.float32) * np.float32(world_size)).tobytes()


def decode_integers(sums: bytes, ends: Sequence[int]) -> list[int]:
    """Return the sums of integers modulo 2**64, from the sums of their bytes. Each integer has its
    lowest byte first.

    Args:
        sums: float32 values.
        ends: offsets in ``sums`` at which integers begin and end.
    """
    sums_of_bytes = np.rint(np.nan_to_num(np.frombuffer(sums, np.float32))).tolist()
    return [
        sum(int(byte) << (8 * place) for place, byte in enumerate(sums_of_bytes[begin:end]))
        & MASK64
        for begin, end in itertools.pairwise(ends)
    ]
