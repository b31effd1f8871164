"""The totals of a global batch over all ranks, and what makes them complete.

A step is taken only if every rank sent its numbers for this step, and all samples of the global
batch are accounted for (``StepTotals.fault``). All ranks receive the same totals, so they agree on
whether to stop, to refuse the step, or to report.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from storage.run_control import Stop
from train_fn.samples.ledger import Count
from train_fn.step.totals_encoding import CACHE_SIZE, FIELD_ENDS, HASH_ENDS, decode_integers

_STEP_MARKS = 1 << 12
"""Steps are distinguished modulo this. So float32 holds the mark exactly, even multiplied by the
world size."""


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


@lru_cache(CACHE_SIZE)
def decode_facts(sums: bytes) -> Facts:
    """Decode the sums of the integer fields. Cached, since they are mostly the same from step to
    step."""
    return Facts(*decode_integers(sums, FIELD_ENDS))


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
    headers: tuple[float, ...] = ()
    """For each rank the same number of values, the fingerprint of its step before this one."""

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
        facts, (sample_hash,) = self.facts, decode_integers(self.hash_sums, HASH_ENDS)
        return Count(facts.num_samples, facts.num_unexpected, facts.num_missing, sample_hash)


def step_mark(step: int) -> int:
    """Return the mark that a rank sends for the step after ``step`` steps done. It is never 0,
    which is what a silent rank adds."""
    return step % _STEP_MARKS + 1
