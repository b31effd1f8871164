"""What every rank says of a step, and what all of them hear: complete before anyone takes the step.

A report travels in two forms. Sums ride in the all-reduce of the step's gradients, as numbers that
float32 adds exactly (``report_sums.py``). Rows of bytes go from every rank to all others: beside
the sums of ``train_fn/elastic``, and beside a user's own loop (``ReportRows``).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from storage.run_control import Stop
from train_fn.samples.ledger import Count
from train_fn.samples.sampler import MASK64


class Votes(NamedTuple):
    """What a rank asks for, or has seen, that all ranks must hear of at the same step."""

    stop: Stop | None = None
    """The user's request to cancel or pause that this rank has received."""
    checkpoint_step: int = 0
    """Step of a newly committed checkpoint to report; 0 for none."""
    save: bool = False
    """Whether to save the state after this step."""
    own_s: float = 0.0
    """Seconds of this rank's own work in the step before."""
    data_s: float = 0.0
    """Seconds that this rank has waited for its loader since its report before."""


NO_VOTES = Votes()


class StepReport(NamedTuple):
    """What one rank says of a step."""

    step: int
    """Steps done: before it, or with it in a user's own loop."""
    samples: Count = Count()
    """This rank's samples, if Everstep's loader read them."""
    numbers: Sequence[float] = ()
    """Loss and weight of each of this rank's micro-batches, in order; the metrics of rank 0 in a
    user's own loop."""
    fingerprint: int = 0
    """``Fingerprints.header`` of the step before, which must be the same on all ranks."""
    votes: Votes = NO_VOTES
    num_updates: int = 0
    """Of a user's own loop: calls of optimizers' ``step`` since the attempt began."""
    has_ended: bool = False
    """The rank has left its loop: no further step comes from it."""
    names_hash: int = 0
    """Of rank 0 in a user's own loop: identifies the names of its metrics."""
    batch: int = 0
    """A digest of this rank's batch from a loader of its own; 0 if it is not known."""
    ends_epoch: bool = False
    """Of a user's own loop: whether the step ended an epoch of its loader."""


# ---------------------------------------------------------------- totals

# The totals of a global batch over all ranks, and what makes them complete.
#
# A step is taken only if every rank sent its numbers for this step, and all samples of the global
# batch are accounted for (``StepTotals.fault``). All ranks receive the same totals, so they agree
# on whether to stop, to refuse the step, or to report.

_STEP_MARKS = 1 << 12
"""Steps are distinguished modulo this. So float32 holds the mark exactly, even multiplied by the
world size."""


class StepFacts(NamedTuple):
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
    facts: StepFacts
    hash_sums: bytes
    """The sums of the bytes of the ranks' hashes."""
    step_marks: tuple[float, ...]
    """For each rank, the ``step_mark`` of the step that it sent; 0 if it sent nothing."""
    own_s: tuple[float, ...]
    """For each rank, the seconds of its own work in the step before this one; 0 if unknown."""
    nonfinite_ranks: float
    """The sum of (rank + 1) over ranks whose loss is not finite."""
    headers: tuple[float, ...] = ()
    """For each rank the same number of values, the fingerprint of its step before this one."""
    data_s: tuple[float, ...] = ()
    """For each rank, the seconds that it waited for its loader in this step."""

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

    def fingerprints(self) -> list[tuple[float, ...]]:
        """Return the fingerprint of each rank, in slots that are equal for equal ones."""
        world_size = len(self.step_marks)
        size = len(self.headers) // world_size
        return [self.headers[rank * size : (rank + 1) * size] for rank in range(world_size)]

    @property
    def are_ranks_apart(self) -> bool:
        """Return whether gradients or weights of the ranks differed after the step before."""
        size = len(self.headers) // len(self.step_marks)
        return self.headers[:size] * len(self.step_marks) != self.headers

    def counted(self) -> Count:
        """Return the count of all ranks' samples."""
        facts, (sample_hash,) = self.facts, decode_integers(self.hash_sums, _HASH_ENDS)
        return Count(facts.num_samples, facts.num_unexpected, facts.num_missing, sample_hash)


def step_mark(step: int) -> int:
    """Return the mark that a rank sends for the step after ``step`` steps done. It is never 0,
    which is what a silent rank adds."""
    return step % _STEP_MARKS + 1


# ---------------------------------------------------------------- integers in sums

# Integers travel through sums of float32 numbers byte by byte: float32 holds sums of bytes exactly.

FLOAT_BYTES = 4
HASH_BYTES = 8
_HASH_ENDS = [0, HASH_BYTES]


def encode_bytes(data: bytes, world_size: int) -> bytes:
    """Return every byte as a float32, multiplied by the world size that DDP divides by."""
    return (np.frombuffer(data, np.uint8).astype(np.float32) * np.float32(world_size)).tobytes()


def encode_hash(sample_hash: int, world_size: int) -> bytes:
    """Return a hash as a rank of a group of ``world_size`` sends it."""
    return encode_bytes(sample_hash.to_bytes(8, "little"), world_size)


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


# ---------------------------------------------------------------- rows

# A report as bytes that reach every rank as they are: nothing is added up on the way.
#
# Each rank receives the rows of all ranks, and computes the step's totals from them. So losses and
# weights are exact, and the same at every world size: ``math.fsum`` rounds once.

_FIXED = struct.Struct("<QqqqQQQddQQQI5?")
"""Steps done and one more, which is never 0; samples, unexpected, missing, hash; fingerprint; a
checkpoint's step; seconds of own work, and of waiting for data; updates, hash of names, batch; how
many numbers; cancel, pause, save, ended, epoch's end."""


class ReportRows:
    """Encode and decode the reports of one attempt.

    Args:
        most_numbers: the largest number of ``numbers`` of a rank.
    """

    def __init__(self, most_numbers: int) -> None:
        self._numbers, self._most = struct.Struct(f"<{most_numbers}d"), most_numbers
        self.num_bytes = _FIXED.size + self._numbers.size

    def encode(self, report: StepReport) -> bytes:
        samples, numbers, votes = report.samples, report.numbers, report.votes
        fixed = _FIXED.pack(
            report.step + 1,
            samples.num_samples,
            samples.num_unexpected,
            samples.num_missing,
            samples.sample_hash,
            report.fingerprint,
            votes.checkpoint_step,
            votes.own_s,
            votes.data_s,
            report.num_updates,
            report.names_hash,
            report.batch,
            len(numbers),
            votes.stop == "cancel",
            votes.stop == "pause",
            votes.save,
            report.has_ended,
            report.ends_epoch,
        )
        return fixed + self._numbers.pack(*numbers, *[0.0] * (self._most - len(numbers)))

    def decode(self, data: bytes) -> StepReport | None:
        """Return the report of a rank; None if it sent nothing."""
        fixed = _FIXED.unpack_from(data)
        mark, counts, (cancel, pause, save, *ends) = fixed[0], fixed[1:5], fixed[13:]
        fingerprint, saved, own_s, data_s, num_updates, names_hash, batch, length = fixed[5:13]
        if mark == 0:
            return None
        stop: Stop | None = "cancel" if cancel else "pause" if pause else None
        return StepReport(
            mark - 1,
            Count(*counts),
            self._numbers.unpack_from(data, _FIXED.size)[:length],
            fingerprint,
            Votes(stop, saved, save, own_s, data_s),
            num_updates,
            ends[0],
            names_hash,
            batch,
            ends[1],
        )


def stop_of(reports: Sequence[StepReport]) -> Stop | None:
    """Return the stop that at least one rank has received."""
    stops = {report.votes.stop for report in reports}
    return "cancel" if "cancel" in stops else "pause" if "pause" in stops else None


def totals_of(reports: Sequence[StepReport | None]) -> StepTotals:
    """Return the totals over the reports of all ranks, by rank."""
    found = [report for report in reports if report is not None]
    votes = [report.votes for report in found]
    samples = sum((report.samples for report in found), Count())
    nonfinite = [
        rank
        for rank, report in enumerate(reports)
        if report is not None and not all(map(math.isfinite, report.numbers[::2]))
    ]
    facts = StepFacts(
        0,
        len(nonfinite),
        samples.num_samples,
        samples.num_unexpected,
        samples.num_missing,
        max((each.checkpoint_step for each in votes), default=0),
        sum(each.stop == "cancel" for each in votes),
        sum(each.stop == "pause" for each in votes),
        sum(each.save for each in votes),
    )
    return StepTotals(
        _total([loss for report in found for loss in report.numbers[::2]]),
        _total([weight for report in found for weight in report.numbers[1::2]]),
        facts,
        encode_hash(samples.sample_hash, 1),
        tuple(0.0 if report is None else float(step_mark(report.step)) for report in reports),
        tuple(0.0 if report is None else report.votes.own_s for report in reports),
        float(sum(rank + 1 for rank in nonfinite)),
        tuple(0.0 if report is None else float(report.fingerprint) for report in reports),
        tuple(0.0 if report is None else report.votes.data_s for report in reports),
    )


def _total(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):  # infinities of both signs, or too large a sum
        return math.nan
