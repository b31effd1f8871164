"""Fold a run's history into its stragglers: ranks that slow their peers down."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from everstep.wire import GpuUse, NodeTimes, RankTimes, Straggler, StragglerReport
from everstep.wire.events import EventKind
from service.model.rows import EventRow

GPU_EVENTS: Final = 512
"""Number of newest ``gpu_use`` events that are searched: two for each rank of a large run."""
KINDS: Final = frozenset({EventKind.STRAGGLER, EventKind.ATTEMPT_STARTED, EventKind.ATTEMPT_ENDED})


def stragglers(
    events: Iterable[EventRow], newest: EventRow | None, gpu_use: Iterable[EventRow] = ()
) -> StragglerReport:
    """Return every rank that was found slow, oldest first, and the last reported step times.

    Args:
        events: The history, only kinds in KINDS.
        newest: The last ``rank_times`` event; None if there is none.
        gpu_use: The last ``gpu_use`` events, newest first.
    """
    found: list[dict[str, Any]] = []
    open_ones: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.kind != EventKind.STRAGGLER:
            _end(open_ones.values(), event.at)
            open_ones.clear()
        elif event.data["slow"]:
            open_ones[event.data["rank"]] = {
                **event.data,
                "at": _time(event.at),
                "attempt": event.attempt,
                "ended_at": None,
            }
            found.append(open_ones[event.data["rank"]])
        else:
            _end([open_ones.pop(event.data["rank"], {})], event.at)
    stragglers = tuple(Straggler.model_validate(each) for each in found)
    gpus = _gpus(gpu_use)
    if newest is None:
        return StragglerReport(
            at=None,
            attempt=None,
            step=None,
            step_s=None,
            ranks=(),
            nodes=(),
            stragglers=stragglers,
            gpus=gpus,
        )
    ranks = tuple(RankTimes.model_validate(rank) for rank in newest.data["ranks"])
    return StragglerReport(
        at=_time(newest.at),
        attempt=newest.attempt,
        step=newest.data["step"],
        step_s=newest.data["step_s"],
        ranks=ranks,
        nodes=_by_node(ranks),
        stragglers=stragglers,
        gpus=gpus,
    )


def _end(open_ones: Iterable[dict[str, Any]], at: float) -> None:
    for each in open_ones:
        if each:
            each["ended_at"] = max(_time(at), each["at"])


def _gpus(newest_first: Iterable[EventRow]) -> tuple[GpuUse, ...]:
    """Return the last report of each rank of the newest attempt."""
    found: dict[int, GpuUse] = {}
    attempt = None
    for event in newest_first:
        attempt = event.attempt if attempt is None else attempt
        if event.attempt == attempt and event.data["rank"] not in found:
            found[event.data["rank"]] = GpuUse.model_validate({**event.data, "at": _time(event.at)})
    return tuple(found[rank] for rank in sorted(found))


def _by_node(ranks: Iterable[RankTimes]) -> tuple[NodeTimes, ...]:
    """Return the means over each node's ranks, in the order of their first rank."""
    nodes: dict[str, list[RankTimes]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node_id, []).append(rank)
    return tuple(
        NodeTimes(
            node_id=node_id,
            ranks=tuple(rank.rank for rank in found),
            own_s=sum(rank.own_s for rank in found) / len(found),
            wait_s=sum(rank.wait_s for rank in found) / len(found),
            skew=sum(rank.skew for rank in found) / len(found),
        )
        for node_id, found in nodes.items()
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
