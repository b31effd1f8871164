"""Find the rank that did not enter the collective in which the others wait, from the counts that
torch's flight recorder keeps on every rank.

The host of a GPU runs ahead: it may have enqueued a collective that the device has not started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_GROUP = "0"
"""torch's name of the process group of all ranks."""
UNKNOWN = -1


@dataclass(frozen=True)
class CollectiveCounts:
    """How far one rank is in the collectives of the group of all ranks."""

    enqueued: int
    """Number of the last collective that the rank called."""
    started: int = UNKNOWN
    """Number of the last one that the device has started; gloo does not record it."""


def read_counts(dump: bytes | str) -> CollectiveCounts | None:
    """Return the counts in a dump of the flight recorder (version 2, as JSON); None if it has
    none."""
    try:
        status = json.loads(dump)["pg_status"][DEFAULT_GROUP]
        return CollectiveCounts(
            int(status["last_enqueued_collective"]), int(status["last_started_collective"])
        )
    except (ValueError, KeyError, TypeError):
        return None


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
