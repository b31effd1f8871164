"""What the ranks tell each other of every committed step, in one small all-reduce beside training.

A rank starts it when it commits a step (``start``), and reads it before it changes anything for the
next one (``read``). By then every rank has taken part in that next step's gradients, so the answer
is there. If the ranks did not commit the same step, the present one is not used: nothing of it was
saved, since whoever saves reads the agreement first.
"""

from __future__ import annotations

import struct
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from storage.run_control import Stop
from train_fn.errors import StepNotWhole
from train_fn.samples.ledger import Count
from train_fn.samples.sampler import MASK64
from train_fn.step.peers import Peers

_LOOK_S = 0.001
_HALF = 32
_HALF_MASK = (1 << _HALF) - 1
_UPDATES_BITS = 30
_UPDATES_MASK = (1 << _UPDATES_BITS) - 1
_STEP_MASK = _HALF_MASK
MOST_VALUES = 16
"""Metrics of a step that rank 0 sends to the others."""
_NUM_SUMS = 7


class Word(NamedTuple):
    """What one rank says when it commits a step."""

    step: int
    """Steps done."""
    num_updates: int
    """Calls of optimizers' ``step`` since the attempt began."""
    stop: Stop | None = None
    """The stop that this rank has heard of."""
    samples: Count = Count()
    """This rank's samples of the step, if it reads them from Everstep's loader."""
    has_ended: bool = False
    """The rank has left its loop: no further step comes from it."""
    values: tuple[float, ...] = ()
    """Of rank 0: the step's metrics."""
    names_hash: int = 0
    """Of rank 0: identifies the names of ``values``."""
    batch: int = 0
    """A digest of this rank's batch from a loader of its own; 0 if it is not known."""


class Agreed(NamedTuple):
    """What all ranks said of one step."""

    places: tuple[tuple[int, int], ...]
    """(steps done, updates) of each rank."""
    stop: Stop | None
    num_samples: int
    sample_hash: int
    num_ended: int
    names_hash: int = 0
    values: tuple[float, ...] = ()
    """MOST_VALUES metrics of rank 0, those that it did not send are 0."""
    batches: tuple[int, ...] = ()
    """The digest of each rank's batch."""

    def fault(self, word: Word, expected: Count | None) -> str | None:
        """Return how the ranks differ; None if all said what this rank did.

        Args:
            word: what this rank said.
            expected: all samples of the step's global batch; None if they are not known.
        """
        mine = _place(word)
        for rank, (step, num_updates) in enumerate(self.places):
            if step != mine[0]:
                return f"rank {rank} committed step {step} where this rank committed {mine[0]}"
            if num_updates != mine[1]:
                return (
                    f"rank {rank} made {num_updates} optimizer steps up to step {step}, this rank "
                    f"{mine[1]}"
                )
        if self.num_ended != (len(self.places) if word.has_ended else 0):
            return f"{self.num_ended} of {len(self.places)} ranks left their loop after it"
        if expected is not None and (self.num_samples, self.sample_hash) != (
            expected.num_samples,
            expected.sample_hash,
        ):
            return (
                f"the ranks' samples are not those of its global batch ({self.num_samples} of "
                f"{expected.num_samples}); give es.loader the same dataset, global_batch_size and "
                "seed on all ranks"
            )
        return None


def encoded(word: Word, rank: int, world_size: int) -> list[int]:
    """Return the integers that a rank sends. Their sums over all ranks fit in 63 bits."""
    step, num_updates = _place(word)
    places, batches = [0] * world_size, [0] * world_size
    places[rank] = step << _UPDATES_BITS | num_updates
    batches[rank] = word.batch
    samples = word.samples
    return [
        word.stop == "cancel",
        word.stop == "pause",
        word.has_ended,
        samples.num_samples,
        samples.sample_hash & _HALF_MASK,
        samples.sample_hash >> _HALF,
        word.names_hash,
        *struct.unpack(f"<{MOST_VALUES}q", struct.pack(f"<{MOST_VALUES}d", *_padded(word.values))),
        *places,
        *batches,
    ]


def decoded(sums: list[int]) -> Agreed:
    """Return what all ranks said, from the sums of what they sent."""
    cancels, pauses, num_ended, num_samples, low, high, names_hash = sums[:_NUM_SUMS]
    bits = sums[_NUM_SUMS : _NUM_SUMS + MOST_VALUES]
    of_ranks = sums[_NUM_SUMS + MOST_VALUES :]
    places = of_ranks[: len(of_ranks) // 2]
    return Agreed(
        tuple((each >> _UPDATES_BITS, each & _UPDATES_MASK) for each in places),
        "cancel" if cancels else "pause" if pauses else None,
        num_samples,
        (low + (high << _HALF)) & MASK64,
        num_ended,
        names_hash,
        struct.unpack(f"<{MOST_VALUES}d", struct.pack(f"<{MOST_VALUES}q", *bits)),
        tuple(of_ranks[len(places) :]),
    )


def _padded(values: tuple[float, ...]) -> tuple[float, ...]:
    return (*values, *[0.0] * (MOST_VALUES - len(values)))


def _place(word: Word) -> tuple[int, int]:
    return word.step & _STEP_MASK, word.num_updates & _UPDATES_MASK


class Agreement:
    """The exchange of one rank. It has a process group of its own: on the user's, a rank that makes
    another number of steps would have its numbers summed with its peers' gradients.

    A collective: all ranks make it at once.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._group: Any = None if peers.alone else dist.new_group(backend="gloo")
        self._word: Word | None = None
        self._expected: Count | None = None
        self._sent: torch.Tensor | None = None
        self._work: Any = None
        self.fault: str | None = None
        """Why the newest step must not be used, once that is known."""

    def start(self, word: Word, expected: Count | None) -> None:
        """Tell the others of a committed step. ``expected`` counts all samples of its global
        batch."""
        self._word, self._expected = word, expected
        numbers = encoded(word, self._peers.rank, self._peers.world_size)
        self._sent = torch.tensor(numbers, dtype=torch.int64)
        if self._group is not None:
            self._work = dist.all_reduce(self._sent, group=self._group, async_op=True)

    def read(self) -> Agreed | None:
        """Wait for what all ranks said of the newest step, and return it; None if it was read.

        Raises StepNotWhole on every rank if they did not all commit the same step. A dead peer
        raises what its collective does.
        """
        if self._word is None:
            return None
        if self._work is not None:
            self._work.wait()
        return self._checked()

    @property
    def is_pending(self) -> bool:
        """Return whether the newest step was committed, and not read of."""
        return self._word is not None

    def settle(self, within_s: float) -> Agreed | None:
        """Return what all ranks said of the newest step, after an error; None if a peer died before
        it could say anything.

        Raises StepNotWhole if they have not.
        """
        deadline = time.monotonic() + within_s
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_S)
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError:
                return None
        return self._checked()

    def close(self) -> None:
        """End the exchange on a rank whose peers live."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _checked(self) -> Agreed:
        word, sent = self._word, self._sent
        assert word is not None and sent is not None
        self._word = self._work = None
        agreed = decoded(sent.tolist())
        self.fault = agreed.fault(word, self._expected)
        if self.fault is not None:
            raise StepNotWhole(max(0, word.step - 1), self.fault)
        return agreed
