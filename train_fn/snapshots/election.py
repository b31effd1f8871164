"""Choose the snapshot to resume from, among those that all ranks found. A pure function, so every
rank makes the same choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.checkpoints.lineage import RestorePoint, voided_by
from storage.run_control import Distrust, struck_by
from storage.run_names import CheckpointName
from train_fn.snapshots.store import Label, Origin


@dataclass(frozen=True)
class Offer:
    """Name a state and a rank that has it: a snapshot that it can read, or its own."""

    rank: int
    label: Label
    in_process: bool = False
    """Whether the rank has trained it in an earlier attempt of its process. It need not be read."""


@dataclass(frozen=True)
class Rejection:
    """Describe a snapshot that is not used, and why."""

    name: str
    problem: str


@dataclass(frozen=True)
class Elected:
    """Hold the newest trusted snapshot (None if there is none), and the rejected ones."""

    offer: Offer | None
    rejected: tuple[Rejection, ...]


def elect(offers: list[Offer], submission: int) -> Elected:
    """Elect the newest snapshot of this submission or an earlier one. Among equal ones, one that a
    process has kept wins, then the lowest rank that can read it.

    If snapshots of the same step and attempt differ, none of them is trusted. At the same step, a
    later attempt's snapshots win over an earlier one's, since that attempt resumed from a state
    that the ranks had agreed on. Snapshots of a newer submission are ignored, since it has replaced
    this one.
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
                min(peers, key=lambda offer: (not offer.in_process, offer.rank, offer.label.rank)),
                tuple(rejected),
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
    """Return the offers that no later attempt voids, and rejections of the others.

    An attempt that could not reach a snapshot resumed from an older state, and the run continued
    from there. So the snapshot is void, even if its node comes back. The same holds for snapshots
    of a process that was evicted but still ran, in this submission or an older one.

    Args:
        starts: where each attempt started, by (submission, attempt).
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


def trusted(
    offers: Sequence[Offer], distrusted: Sequence[Distrust]
) -> tuple[list[Offer], tuple[Rejection, ...]]:
    """Return the offers that no entry covers, and rejections of the others."""
    standing: list[Offer] = []
    rejected: dict[str, Rejection] = {}
    for offer in offers:
        label = offer.label
        entry = struck_by(distrusted, label.origin, label.step)
        if entry is None:
            standing.append(offer)
        else:
            name = snapshot_name(label)
            rejected[name] = Rejection(name, entry.problem)
    return standing, tuple(rejected.values())


def snapshot_name(label: Label) -> str:
    """Return the name of a snapshot in events."""
    return f"snapshot of step {label.step} by rank {label.rank} of attempt {label.attempt}"
