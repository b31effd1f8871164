"""Decide which ranks keep their processes after a failure, which of them also write the state that
they keep, and which failures only show that they should not have. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.wire import ErrorKind, Verdict
from everstep.wire.events import GPU_FAULTY
from train_fn.recovery.decision import Decision, PastFailure
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.verdict import Judgement


@dataclass(frozen=True)
class Outliving:
    """What outlives an attempt in a rank's process, beside what Everstep knows and restores."""

    asked_at: str | None = None
    """Line of the user's code that asked for the rank or its peers."""
    children: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    directory: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    of_thread: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    too_much: bool = False
    """Whether there is more of the last kind than can be compared."""

    @property
    def may_decide_steps(self) -> bool:
        """Return whether steps may depend on something that no state holds, so that those of a
        fresh process differ from those of this one."""
        own = (self.environment, self.settings, self.of_thread, self.functions, self.values)
        return any(own)


_WORDS = {
    "children": "processes that it has started run on",
    "threads": "threads or timers that it has started run on",
    "streams": "it has put others in the place of standard streams",
    "environment": "it has changed the environment since its first pass",
    "directory": "it has changed the working directory since its first pass",
    "signals": "it has changed handlers of signals since its first pass",
    "settings": "it has changed settings of torch, numpy or Python since its first pass",
    "of_thread": "it has changed settings that each thread has of its own, and the next attempt "
    "has another thread",
    "functions": "it has replaced functions of libraries since its first pass",
    "values": "what its modules and objects hold, and no state does, has changed since its first "
    "pass",
}


def why_not_to_stay(found: Outliving) -> str | None:
    """Return why a process cannot serve another attempt; None if it can. It stays only if
    everything that outlives the attempt in it is known."""
    if found.asked_at is not None:
        return f"the task has asked for its rank or its peers ({found.asked_at})"
    if found.too_much:
        return "the task's modules and objects hold more than can be compared"
    for name, words in _WORDS.items():
        if names := getattr(found, name):
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            return f"{words}: {', '.join(names[:_NAMES_SHOWN])}{more}"
    return None


_NAMES_SHOWN = 5

SOON_WRITTEN_BYTES = 64 << 20
"""Largest state that is written while the next attempt starts, in time that ranks wait anyway."""


def stays_in_process(judgement: Judgement, decision: Decision) -> bool:
    """Return whether survivors may keep their processes: the next attempt follows at once, and
    nothing is wrong with what they hold.

    After wrong bits no rank's memory is trusted, and no process waits for a backoff.
    """
    return (
        decision.restart
        and decision.backoff_s == 0.0
        and judgement.verdict is not Verdict.SILENT_CORRUPTION
    )


_FROM_OUTSIDE = frozenset(
    {Verdict.WORKER_LOST, Verdict.NODE_LOST, Verdict.PREEMPTION, Verdict.OUT_OF_MEMORY}
)
"""Verdicts of failures that came over a rank, whatever its process held."""

_OF_WHAT_IS_HELD = frozenset(
    {
        *(ErrorKind.USER, ErrorKind.EXITED, ErrorKind.CORRUPTION, ErrorKind.EXCHANGE),
        ErrorKind.DEVICE_MEMORY,
    }
)
"""Kinds of errors that code, memory or state of an earlier attempt may have caused."""


def falls_back(
    judgement: Judgement, past: Sequence[PastFailure], *, has_stayed: bool, has_stepped: bool
) -> bool:
    """Return whether all ranks begin anew in fresh processes before anybody is blamed for a
    failure: what a process holds of an earlier attempt may be its cause. Only what comes back
    there, or was there before, is charged.

    Args:
        past: earlier failures of the run.
        has_stayed: whether the attempt has ranks in processes of earlier ones.
        has_stepped: whether it has made a step.
    """
    if not has_stayed:
        return False
    if judgement.kind is ErrorKind.DEVICE_MEMORY:
        return not any(failure.is_like(judgement) for failure in past)
    if judgement.verdict in _FROM_OUTSIDE and judgement.kind is not ErrorKind.EXITED:
        return False
    if not has_stepped:
        return True
    if any(failure.is_like(judgement) for failure in past):
        return False
    if judgement.verdict is Verdict.HANG:
        # A rank that answers waits for others, or they for it. One that does not is stopped.
        return judgement.detail.get("stack") is not None
    if judgement.verdict is Verdict.UNKNOWN and judgement.kind is None:
        return not judgement.pairs  # a group of an earlier attempt is closed
    if judgement.kind is ErrorKind.DEVICE:
        return GPU_FAULTY not in (judgement.exception or "")
    return judgement.kind in _OF_WHAT_IS_HELD


def kept_steps(reports: Sequence[RankReport]) -> dict[int, int]:
    """Return the ranks whose processes serve the next attempt, with the step of the state that each
    keeps."""
    return {
        report.rank: report.stays_at
        for report in reports
        if report.may_stay and report.stays_at is not None
    }


def ranks_to_insure(reports: Sequence[RankReport]) -> list[int]:
    """Return the ranks that write the state they keep in their process as a snapshot, while the
    next attempt starts: one of each node.

    Otherwise the death of a process in the next start could cost the only copy. A large state that
    two processes hold is not written, since the next attempt would wait for it.
    """
    holders = [report for report in reports if report.may_stay]
    newest = max((report.stays_at or 0 for report in holders), default=0)
    holders = [report for report in holders if report.stays_at == newest]
    is_large = any(report.state_bytes > SOON_WRITTEN_BYTES for report in holders)
    if is_large and len(holders) > 1:
        return []
    return first_of_each_node({report.rank: report.node_id for report in holders})


def first_of_each_node(nodes: Mapping[int, str]) -> list[int]:
    """Return the lowest rank of each node, given each rank's node."""
    first_on = {nodes[rank]: rank for rank in sorted(nodes, reverse=True)}
    return sorted(first_on.values())
