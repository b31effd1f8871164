"""Find the rank that did not enter the collective in which the others wait, from the counts that
torch's flight recorder keeps on every rank.

The host of a GPU runs ahead: it may have enqueued a collective that the device has not started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

UNKNOWN = -1
_OF_ALL_RANKS = ("default_pg", "")
"""torch's description of the process group of all ranks, and under its wrapper for debugging."""


@dataclass(frozen=True)
class CollectiveCounts:
    """How far one rank is in the collectives of the group of all ranks."""

    enqueued: int
    """Number of the last collective that the rank called."""
    started: int = UNKNOWN
    """Number of the last one that the device has started; gloo does not record it."""


def read_counts(enqueued: int, dump: bytes | str) -> CollectiveCounts | None:
    """Return the counts of the group of all ranks; None if they cannot be told from the dump.

    The recorder keeps groups that ended in this process, and numbers groups anew in each process.
    So the group is that of the newest collective, if this has the number that the group says. gloo
    numbers sends and receives like collectives, and records only collectives. Ranks may differ in
    those numbers, so they count for nothing.

    Args:
        enqueued: number of the group's last collective, as the group itself says.
        dump: what the flight recorder holds (version 2, as JSON).
    """
    if enqueued == 0:
        return CollectiveCounts(0)
    try:
        found = json.loads(dump)
        entries = [each for each in found["entries"] if each["process_group"][1] in _OF_ALL_RANKS]
        last = entries[-1]
        numbers = {each["collective_seq_id"] for each in entries if each["pg_id"] == last["pg_id"]}
        started = int(found["pg_status"][str(last["pg_id"])]["last_started_collective"])
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    if last["collective_seq_id"] != enqueued:
        return None
    if last["profiling_name"].startswith("gloo:") and len(numbers) <= enqueued - min(numbers):
        return None
    return CollectiveCounts(enqueued, started)


def find_late(counts: Mapping[int, CollectiveCounts | None]) -> list[int]:
    """Return the ranks that did not enter the last collective of the others; none if that is not
    known, or if all ranks are equally far.

    A rank whose host called fewer collectives is late. If all hosts are equally far, a rank whose
    device started fewer is.

    Args:
        counts: the counts of every rank; None for a rank that did not tell them.
    """
    known = {rank: each for rank, each in counts.items() if each is not None}
    if len(known) < max(2, len(counts)):
        return []
    late = _behind({rank: each.enqueued for rank, each in known.items()})
    return late or _behind({rank: each.started for rank, each in known.items()})


def _behind(numbers: Mapping[int, int]) -> list[int]:
    if UNKNOWN in numbers.values():
        return []
    least, most = min(numbers.values()), max(numbers.values())
    return [rank for rank, number in sorted(numbers.items()) if number == least < most]
