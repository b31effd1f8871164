"""What every rank sends about a step, as plain bytes: nothing is added up on the way.

Each rank receives the headers of all ranks, and computes the step's totals from them. So losses
and weights are exact, and the same at every world size: ``math.fsum`` rounds once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from storage.run_control import Stop
from train_fn.samples.ledger import Count
from train_fn.samples.randomness import MASK64
from train_fn.step.step_totals import Facts, StepTotals, step_mark

_FIXED = struct.Struct("<QqqqQQQdI4?")
"""Steps done and one more, which is never 0; samples, unexpected, missing, hash; fingerprint; a
checkpoint's step; seconds of own work; number of micro-batches; cancel, pause, save, news."""


class Header(NamedTuple):
    """Hold what one rank sends about a step."""

    step: int
    """Steps done before it."""
    samples: Count
    micro_batches: Sequence[tuple[float, float]]
    """Loss and weight of each of this rank's micro-batches, in order."""
    fingerprint: int = 0
    """``Fingerprints.header`` of the step before, which must be the same on all ranks."""
    stop: Stop | None = None
    checkpoint_step: int = 0
    """Step of a newly committed checkpoint to report; 0 for none."""
    save: bool = False
    has_news: bool = False
    own_s: float = 0.0


class HeaderCode:
    """Encode and decode the headers of one attempt.

    Args:
        most_micro_batches: the largest number of micro-batches of a rank.
    """

    def __init__(self, most_micro_batches: int) -> None:
        self._pairs = struct.Struct(f"<{2 * most_micro_batches}d")
        self._most = most_micro_batches
        self.num_bytes = _FIXED.size + self._pairs.size

    def encode(self, header: Header) -> bytes:
        samples, numbers = header.samples, [each for pair in header.micro_batches for each in pair]
        fixed = _FIXED.pack(
            header.step + 1,
            samples.num_samples,
            samples.num_unexpected,
            samples.num_missing,
            samples.sample_hash,
            header.fingerprint,
            header.checkpoint_step,
            header.own_s,
            len(header.micro_batches),
            header.stop == "cancel",
            header.stop == "pause",
            header.save,
            header.has_news,
        )
        return fixed + self._pairs.pack(*numbers, *[0.0] * (2 * self._most - len(numbers)))

    def decode(self, data: bytes) -> Header | None:
        """Return the header of a rank; None if it sent nothing."""
        mark, *counts, fingerprint, checkpoint, own_s, num_micro, cancel, pause, save, news = (
            _FIXED.unpack_from(data)
        )
        samples, unexpected, missing, sample_hash = counts
        if mark == 0:
            return None
        numbers = self._pairs.unpack_from(data, _FIXED.size)[: 2 * num_micro]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        stop: Stop | None = "cancel" if cancel else "pause" if pause else None
        counted = Count(samples, unexpected, missing, sample_hash)
        return Header(mark - 1, counted, pairs, fingerprint, stop, checkpoint, save, news, own_s)


class HeaderTotals(StepTotals):
    """Hold the totals that all ranks compute from all headers. ``hash_sums`` is the sum of the
    ranks' hashes modulo 2**64, in eight bytes."""

    __slots__ = ()

    def counted(self) -> Count:
        """Return the count of all ranks' samples."""
        facts = self.facts
        sample_hash = int.from_bytes(self.hash_sums, "little")
        return Count(facts.num_samples, facts.num_unexpected, facts.num_missing, sample_hash)


def totals_of(headers: Sequence[Header | None]) -> StepTotals:
    """Return the totals over the headers of all ranks, by rank."""
    found = [header for header in headers if header is not None]
    pairs = [pair for header in found for pair in header.micro_batches]
    samples = sum((header.samples for header in found), Count())
    nonfinite = [
        rank
        for rank, header in enumerate(headers)
        if header is not None and not all(math.isfinite(loss) for loss, _ in header.micro_batches)
    ]
    facts = Facts(
        0,
        len(nonfinite),
        samples.num_samples,
        samples.num_unexpected,
        samples.num_missing,
        max((header.checkpoint_step for header in found), default=0),
        sum(header.stop == "cancel" for header in found),
        sum(header.stop == "pause" for header in found),
        sum(header.save for header in found),
        sum(header.has_news for header in found),
    )
    return HeaderTotals(
        _total([loss for loss, _ in pairs]),
        _total([weight for _, weight in pairs]),
        facts,
        (samples.sample_hash & MASK64).to_bytes(8, "little"),
        tuple(0.0 if header is None else float(step_mark(header.step)) for header in headers),
        tuple(0.0 if header is None else header.own_s for header in headers),
        float(sum(rank + 1 for rank in nonfinite)),
        tuple(0.0 if header is None else float(header.fingerprint) for header in headers),
    )


def _total(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):  # infinities of both signs, or too large a sum
        return math.nan
