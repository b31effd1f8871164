"""Where to go on from: a pure choice among what all ranks found, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.checkpoints.lineage import RestorePoint, voided_by
from storage.run_names import CheckpointName
from train_fn.snapshots.store import Label, Origin


@dataclass(frozen=True)
class Offer:
    """A snapshot, and the rank that can read it."""

    rank: int
    label: Label


@dataclass(frozen=True)
class Rejection:
    """A state that was newer than the chosen one, or as new, and cannot be trusted."""

    name: str
    problem: str


@dataclass(frozen=True)
class Elected:
    """The newest trustworthy snapshot, None for none, and those that were rejected."""

    offer: Offer | None
    rejected: tuple[Rejection, ...]


def elect(offers: list[Offer], submission: int) -> Elected:
    """The newest snapshot of this submission and those before it wins; of several equal ones that
    of the lowest rank that can read it.

    Snapshots of one step that differ contradict each other, and none of them is trusted. Those that
    a later attempt left at the same step take precedence over earlier ones, since it went on from a
    state that the ranks had agreed on. What a newer submission left is its own: this one has been
    replaced.
    """
    rejected: list[Rejection] = []
    usable: list[Offer] = []
    for offer in offers:
        if offer.label.submission > submission:
            continue
        if offer.label.problem:
            rejected.append(Rejection(snapshot_name(offer.label), offer.label.problem))
        else:
            usable.append(offer)
    while usable:
        newest = max((offer.label.step, offer.label.origin) for offer in usable)
        peers = [offer for offer in usable if (offer.label.step, offer.label.origin) == newest]
        digests = {offer.label.digest for offer in peers}
        if len(digests) == 1:
            return Elected(
                min(peers, key=lambda offer: (offer.rank, offer.label.rank)), tuple(rejected)
            )
        rejected += [
            Rejection(
                snapshot_name(label),
                f"differs from the other snapshots of step {label.step}; digest {label.digest}",
            )
            for label in dict.fromkeys(offer.label for offer in peers)
        ]
        usable = [offer for offer in usable if offer not in peers]
    return Elected(None, tuple(rejected))


def in_lineage(
    offers: list[Offer], starts: Mapping[Origin, RestorePoint]
) -> tuple[list[Offer], tuple[Rejection, ...]]:
    """The offers that every later attempt lets stand, and the others.

    An attempt that could not reach a snapshot went on from an older state; what it did then is the
    run, and the snapshot, met again on a node that came back, is not. Nor is what a process
    published that was given up but not dead: one of this submission, or all the ranks of an older
    one.

    Args:
        starts: where each attempt began, by (submission, attempt).
    """
    standing, rejected = [], []
    for offer in offers:
        label = offer.label
        start = voided_by(CheckpointName(label.step, *label.origin), starts)
        if start is None:
            standing.append(offer)
        else:
            went_on = "began anew" if start.fresh else f"went on from step {start.step}"
            rejected.append(Rejection(snapshot_name(label), f"a later attempt {went_on}"))
    return standing, tuple(rejected)


def snapshot_name(label: Label) -> str:
    """How events name a snapshot."""
    return f"snapshot of step {label.step} by rank {label.rank} of attempt {label.attempt}"
