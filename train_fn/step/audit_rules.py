"""Which steps are audited, whose micro-batch each rank computes again, and who computed wrongly.
Everything here is pure, so all ranks decide alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from train_fn.samples.randomness import key

_STEPS, _RANKS, _PLACES = 13, 14, 15
"""Purposes of the draws for audits."""


class Computed(NamedTuple):
    """Hold what one rank computed of a micro-batch: equal for equal bits."""

    samples: int
    """Digest of the batch."""
    loss: str
    """The exact loss and weight, in hexadecimal."""
    gradient: int
    """Digest of the gradients of this micro-batch alone."""
    buffers: int
    """Digest of what the forward pass changed, such as running statistics."""

    def differing(self, other: Computed) -> list[str]:
        """Return what differs, in words; nothing if all is equal."""
        words = ("its samples", "its loss", "its gradient", "what its forward pass changes")
        return [word for word, one, two in zip(words, self, other, strict=True) if one != two]


class Dispute(NamedTuple):
    """Two computations of one micro-batch that differ."""

    number: int
    """Of the micro-batch, in the global batch."""
    owner: int
    """The rank whose micro-batch it is."""
    auditor: int
    own: Computed
    audited: Computed


def is_audited(seed: int, step: int, fraction: float) -> bool:
    """Return whether the step after ``step`` steps done is audited: ``fraction`` of all are."""
    return key(seed, step, _STEPS) < fraction * (1 << 64)


def audited_rank(seed: int, step: int, rank: int, world_size: int) -> int:
    """Return the rank of whose micro-batches ``rank`` computes one again: its neighbour at a
    distance that changes from audit to audit. A rank that is alone audits itself."""
    if world_size == 1:
        return 0
    return (rank + 1 + key(seed, step, _RANKS) % (world_size - 1)) % world_size


def audited_place(seed: int, step: int, rank: int, share_size: int) -> int:
    """Return which of the micro-batches in the share of ``rank`` is computed again."""
    return key(seed, step, rank, _PLACES) % share_size


def settled(dispute: Dispute, again: Sequence[Computed]) -> tuple[int, ...]:
    """Return the ranks that computed a disputed micro-batch wrongly; none if it cannot be decided.

    The result of most ranks counts, if at least two computations had it.

    Args:
        again: what each rank found when all of them computed the micro-batch once more.
    """
    usual, count = Counter(again).most_common(1)[0]
    results = [
        (dispute.owner, dispute.own),
        (dispute.auditor, dispute.audited),
        *enumerate(again),
    ]
    agreeing = sum(found == usual for _, found in results)
    if 2 * count <= len(again) or agreeing < 2:
        return ()
    return tuple(sorted({rank for rank, found in results if found != usual}))
