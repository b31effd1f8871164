"""Choose the snapshot to resume from, among those that all ranks found. A pure function, so every
rank makes the same choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from storage.checkpoints.reader import RestorePoint, voided_by
from storage.run_control import Distrust, struck_by
from storage.run_dir import CheckpointName
from train_fn.snapshots.store import Label, Origin


@dataclass(frozen=True)
class Candidate:
    """Name a state and a rank that can read it."""

    rank: int
    label: Label


@dataclass(frozen=True)
class Rejection:
    """Describe a snapshot that is not used, and why."""

    name: str
    problem: str


@dataclass(frozen=True)
class Elected:
    """Hold the newest trusted snapshot (None if there is none), and the rejected ones."""

    candidate: Candidate | None
    rejected: tuple[Rejection, ...]
    candidates: tuple[Candidate, ...] = ()
    """All candidates of the state: those of every piece of it, and equal ones of several ranks."""


def elect(candidates: list[Candidate], submission: int) -> Elected:
    """Elect the newest snapshot of this submission or an earlier one. Among equal ones, that of the
    lowest rank that can read it wins.

    If snapshots of the same step and attempt differ, none of them is trusted. At the same step, a
    later attempt's snapshots win over an earlier one's, since that attempt resumed from a state
    that the ranks had agreed on. Snapshots of a newer submission are ignored, since it has replaced
    this one. A state in pieces counts if every one of its pieces is somewhere; pieces of two
    attempts never mix.
    """
    rejected: list[Rejection] = []
    moments: dict[tuple[int, Origin], list[Candidate]] = {}
    for candidate in candidates:
        if candidate.label.submission > submission:
            continue
        if candidate.label.problem:
            rejected.append(Rejection(snapshot_name(candidate.label), candidate.label.problem))
        else:
            moments.setdefault((candidate.label.step, candidate.label.origin), []).append(candidate)
    for _, peers in sorted(moments.items(), key=itemgetter(0), reverse=True):
        digests: dict[int, set[str | None]] = {}
        for candidate in peers:
            digests.setdefault(_compared(candidate.label), set()).add(candidate.label.digest)
        alike = [candidate for candidate in peers if len(digests[_compared(candidate.label)]) == 1]
        if alike and are_whole([candidate.label for candidate in alike]):
            return Elected(
                min(alike, key=lambda candidate: (candidate.rank, candidate.label.rank)),
                tuple(rejected),
                tuple(alike),
            )
        differing = (
            candidate.label for candidate in peers if len(digests[_compared(candidate.label)]) > 1
        )
        rejected += [
            Rejection(
                snapshot_name(label),
                f"differs from the other snapshots of step {label.step}; digest {label.digest}",
            )
            for label in dict.fromkeys(differing)
        ]
    return Elected(None, tuple(rejected))


def _compared(label: Label) -> int:
    """Return a key. Labels with one key must have equal digests: all of a state that every rank
    holds whole, else the copies of one rank's piece."""
    return -1 if label.pieces == 1 else label.rank


def are_whole(labels: Sequence[Label]) -> bool:
    """Return whether these pieces of one state are all of it."""
    pieces = {label.piece for label in labels}
    return {piece.number for piece in pieces} == set(range(labels[0].pieces)) and len(
        {piece.of for piece in pieces}
    ) == 1


def in_lineage(
    candidates: list[Candidate], starts: Mapping[Origin, RestorePoint]
) -> tuple[list[Candidate], tuple[Rejection, ...]]:
    """Return the candidates that no later attempt voids, and rejections of the others.

    An attempt that could not reach a snapshot resumed from an older state, and the run continued
    from there. So the snapshot is void, even if its node comes back. The same holds for snapshots
    of a process that was evicted but still ran, in this submission or an older one.

    Args:
        starts: where each attempt started, by (submission, attempt).
    """
    standing, rejected = [], []
    for candidate in candidates:
        label = candidate.label
        start = voided_by(CheckpointName(label.step, *label.origin), starts)
        if start is None:
            standing.append(candidate)
        else:
            went_on = "began anew" if start.fresh else f"went on from step {start.step}"
            rejected.append(Rejection(snapshot_name(label), f"a later attempt {went_on}"))
    return standing, tuple(rejected)


def trusted(
    candidates: Sequence[Candidate], distrusted: Sequence[Distrust]
) -> tuple[list[Candidate], tuple[Rejection, ...]]:
    """Return the candidates that no entry covers, and rejections of the others."""
    standing: list[Candidate] = []
    rejected: dict[str, Rejection] = {}
    for candidate in candidates:
        label = candidate.label
        entry = struck_by(distrusted, label.origin, label.step)
        if entry is None:
            standing.append(candidate)
        else:
            name = snapshot_name(label)
            rejected[name] = Rejection(name, entry.problem)
    return standing, tuple(rejected.values())


def snapshot_name(label: Label) -> str:
    """Return the name of a snapshot in events."""
    piece = f"{label.piece} of the " if label.pieces > 1 else ""
    return f"{piece}snapshot of step {label.step} by rank {label.rank} of attempt {label.attempt}"


def odd_ranks(of_ranks: Sequence[Hashable], of: int = 1) -> tuple[int, ...]:
    """Return the ranks that differ from most; none if there is no majority.

    Args:
        of: how many pieces of a state the ranks hold. Rank r has piece r % of, and is compared with
            those that have it, too.
    """
    found = []
    for number in range(of):
        alike = of_ranks[number::of]
        usual, count = Counter(alike).most_common(1)[0]
        if 2 * count > len(alike):
            found += [number + of * at for at, value in enumerate(alike) if value != usual]
    return tuple(sorted(found))
