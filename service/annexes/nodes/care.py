"""The care of nodes: the file of marks, nodes that are gone, and nodes that fail too often."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import structlog

from everstep.options.serve import (
    DEFAULT_CORDON_FAILURES,
    DEFAULT_CORDON_RUNS,
    DEFAULT_CORDON_WINDOW_S,
)
from everstep.wire import ErrorKind, Verdict
from everstep.wire.events import GPU_FAULTY, NODE_UNFIT
from service.annexes.nodes.store import MarksFile, NodeMarkStore
from service.cluster.ray_jobs import RayError, RayJobs
from service.model.rows import NodeFailure, NodeMarkRow
from storage.errors import StorageError

INTERVAL_S: Final = 5.0
BY_ITSELF: Final = "everstep"
"""Author of the mark of a node that failed too often."""

log = structlog.get_logger(__name__)


class NodeCare:
    """Looks after nodes, beside the reconciler's ticks.

    Args:
        marks: Marks of nodes.
        file: File of marks for drivers.
        ray: The cluster.
        rule: When a node is cordoned automatically.
        clock: Unix seconds.
    """

    def __init__(
        self,
        marks: NodeMarkStore,
        file: MarksFile,
        ray: RayJobs,
        rule: CordonRule,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._marks = marks
        self._file = file
        self._ray = ray
        self._rule = rule
        self._clock = clock
        self._spared: frozenset[str] = frozenset()

    async def check(self) -> None:
        """Check all nodes once. Raises DatabaseError."""
        rows = await asyncio.to_thread(self._marks.all)
        suspects = await self._suspects(rows)
        if rows or suspects:
            await self._care(rows, suspects)
        try:
            if await asyncio.to_thread(self._file.publish):
                log.info("updated the file of marked nodes for drivers")
        except StorageError as exc:
            log.warning(
                "the file of marked nodes could not be written; trying again", problem=str(exc)
            )

    async def _suspects(self, rows: Mapping[str, NodeMarkRow]) -> tuple[Suspect, ...]:
        if not self._rule.is_on:
            return ()
        now = self._clock()
        failures = await asyncio.to_thread(self._marks.failures_since, now - self._rule.window_s)
        pardoned = {node_id: row.at for node_id, row in rows.items() if row.state == "open"}
        return find_suspects(failures, self._rule, now, pardoned)

    async def _care(self, rows: Mapping[str, NodeMarkRow], suspects: tuple[Suspect, ...]) -> None:
        try:
            nodes = await self._ray.live_nodes()
        except RayError as exc:
            log.debug("the nodes could not be looked after", problem=str(exc))
            return
        living = {node.node_id for node in nodes}
        for node_id in await asyncio.to_thread(
            self._marks.note_living, living, self._rule.window_s
        ):
            log.info("forgot the mark of a node that is gone", node_id=node_id)
        marked = {node_id for node_id, row in rows.items() if row.mark is not None}
        # half of the cluster is half of the nodes that can run ranks
        able = {n.node_id for n in nodes if any(n.resources.get(kind) for kind in ("CPU", "GPU"))}
        chosen, spared = choose_to_cordon(suspects, able, marked)
        for suspect in chosen:
            known = rows.get(suspect.node_id)
            known_at = known.at if known else None
            if await asyncio.to_thread(
                self._marks.cordon_if_unchanged,
                suspect.node_id,
                known_at,
                BY_ITSELF,
                suspect.reason,
            ):
                log.warning(
                    "cordoned a node that fails too often",
                    node_id=suspect.node_id,
                    reason=suspect.reason,
                )
        for suspect in spared:
            if suspect.node_id not in self._spared:
                log.warning(
                    "a node fails too often and is not cordoned; cordon it yourself if it is at "
                    "fault",
                    because=suspect.doubt
                    or "less than half of the cluster would stay open without it",
                    node_id=suspect.node_id,
                    reason=suspect.reason,
                )
        self._spared = frozenset(suspect.node_id for suspect in spared)


# ---------------------------------------------------------------- unhealthy

# The rules by which a node that fails too often is cordoned. Pure functions over failures.

NODE_VERDICTS: Final = frozenset(
    {
        Verdict.NODE_LOST,
        Verdict.WORKER_LOST,
        Verdict.OUT_OF_MEMORY,
        Verdict.HANG,
        Verdict.HARDWARE,
        Verdict.SILENT_CORRUPTION,
    }
)
"""Verdicts that may be a node's fault. Errors of user code, storage or control plane are not."""
_SHOWN_RUNS: Final = 3
_DOUBT: Final = "one user or one archive of code may be the cause of all its failures"
_Counted: TypeAlias = tuple[NodeFailure, str]
"""A failure with its cause."""


@dataclass(frozen=True)
class CordonRule:
    """How often a node may fail within ``window_s`` seconds. 0 is no limit."""

    runs: int = DEFAULT_CORDON_RUNS
    """Number of runs that failed on the node and so cordon it."""
    failures: int = DEFAULT_CORDON_FAILURES
    """Number of failures on the node that cordon it."""
    window_s: float = DEFAULT_CORDON_WINDOW_S

    @property
    def is_on(self) -> bool:
        """Whether there is a limit."""
        return self.runs > 0 or self.failures > 0


DEFAULT_RULE: Final = CordonRule()


@dataclass(frozen=True)
class Suspect:
    """A node that failed too often, with the evidence in words."""

    node_id: str
    num_failures: int
    num_runs: int
    reason: str
    doubt: str | None = None
    """What other than the node may be the cause of all this; None if nothing is known."""


def find_suspects(
    failures: Iterable[NodeFailure], rule: CordonRule, now: float, pardoned_at: Mapping[str, float]
) -> tuple[Suspect, ...]:
    """Return the nodes that failed too often or were not fit for a run, the worst first.

    Failures that one user's code may have caused or reported in the node's place are counted once
    (``causes``). A node that failed too often only without this rule is a suspect with a doubt.

    Args:
        failures: Records in any order. Those outside the window, or not a node's fault, are
            ignored.
        rule: The limits.
        now: Unix seconds.
        pardoned_at: Node id -> when it was opened again, unix seconds. Failures up to then are
            ignored.
    """
    recent = sorted(
        (each for each in failures if now - rule.window_s < each.at and _may_be_nodes(each)),
        key=lambda each: (each.at, each.node_id, each.run_id),
    )
    first_named: dict[str, str] = {}
    by_node: dict[str, list[_Counted]] = {}
    for failure, cause in zip(recent, causes(recent), strict=True):
        if _fault_in_words(failure) is not None:
            first_named.setdefault(cause, failure.node_id)
        if failure.at > pardoned_at.get(failure.node_id, float("-inf")):
            by_node.setdefault(failure.node_id, []).append((failure, cause))
    suspects = []
    for node_id, found in by_node.items():
        of_node = [failure for failure, _ in found]
        runs = {failure.run_id for failure in of_node}
        shown = _shown_fault(found, first_named)
        if shown is not None:
            suspects.append(Suspect(node_id, len(found), len(runs), shown))
        elif _is_too_often(rule, len(runs), len(found)):
            doubt = None if _is_too_often(rule, *_counts(found)) else _DOUBT
            reason = _reason(of_node, rule)
            suspects.append(Suspect(node_id, len(found), len(runs), reason, doubt))
    return tuple(
        sorted(
            suspects,
            key=lambda suspect: (-suspect.num_failures, -suspect.num_runs, suspect.node_id),
        )
    )


def causes(failures: Sequence[NodeFailure]) -> list[str]:
    """Return what may have caused each failure in the node's place, as a name to compare.

    - Built-in code does not end its own process: each run is a cause of its own, named by its id.
    - User code can end, hang, fill and falsify its process, and write its run's history. Failures
      of runs that share a user or an archive have one cause, through any number of runs.
    - How much memory a built-in task needs is its submitter's choice, so out of memory is theirs.
    """
    groups: list[set[str]] = []
    for names in filter(None, map(_others, failures)):
        touched = [group for group in groups if group & names]
        groups = [group for group in groups if not group & names]
        groups.append(names.union(*touched))
    return [
        next((min(group) for group in groups if group & _others(failure)), failure.run_id)
        for failure in failures
    ]


def _others(failure: NodeFailure) -> set[str]:
    """Return what may be the cause of a failure in the node's place."""
    if failure.archive is None and failure.verdict != Verdict.OUT_OF_MEMORY:
        return set()
    names = {"owner": failure.owner or failure.run_id, "archive": failure.archive}
    return {f"{kind} {name}" for kind, name in names.items() if name is not None}


def _counts(found: Sequence[_Counted]) -> tuple[int, int]:
    """Return the numbers of runs and failures, each cause but built-in code counted once."""
    built_in = [failure.run_id for failure, cause in found if cause == failure.run_id]
    num_others = len({cause for failure, cause in found if cause != failure.run_id})
    return len(set(built_in)) + num_others, len(built_in) + num_others


def _shown_fault(found: Sequence[_Counted], first_named: Mapping[str, str]) -> str | None:
    """Return the fault of a node that a run has shown, in its words; None if there is none.

    User code can write such words about any node. So its cause is believed about the first node
    that it named, and about others only together with another cause.
    """
    told = [each for each in found if _fault_in_words(each[0]) is not None]
    believed = len({cause for _, cause in told}) > 1 or any(
        cause == failure.run_id or first_named[cause] == failure.node_id for failure, cause in told
    )
    return _fault_in_words(told[-1][0]) if believed else None


def _fault_in_words(failure: NodeFailure) -> str | None:
    """Return the fault of a node that one failure is enough to show; None for others."""
    if failure.kind is ErrorKind.NODE:
        return f"not fit for {failure.run_id}: {failure.exception.removeprefix(f'{NODE_UNFIT}: ')}"
    if GPU_FAULTY in failure.exception:
        faults = failure.exception.rpartition(GPU_FAULTY)[2]
        return f"{GPU_FAULTY}{faults}; seen by {failure.run_id}"
    return None


def _is_too_often(rule: CordonRule, num_runs: int, num_failures: int) -> bool:
    return 0 < rule.runs <= num_runs or 0 < rule.failures <= num_failures


def choose_to_cordon(
    suspects: Sequence[Suspect], worker_nodes: Collection[str], marked: Collection[str]
) -> tuple[tuple[Suspect, ...], tuple[Suspect, ...]]:
    """Return the suspects to cordon, and those to spare because of a doubt, or so that half of the
    cluster stays open.

    Args:
        suspects: The worst first.
        worker_nodes: Live nodes that can run ranks. Half of them must stay open. Other suspects are
            ignored.
        marked: Nodes that are cordoned or draining now.
    """
    chosen: list[Suspect] = []
    spared: list[Suspect] = []
    num_open = sum(node not in marked for node in worker_nodes)
    for suspect in suspects:
        if suspect.node_id not in worker_nodes or suspect.node_id in marked:
            continue
        if suspect.doubt is not None or 2 * (num_open - 1) < len(worker_nodes):
            spared.append(suspect)
            continue
        num_open -= 1
        chosen.append(suspect)
    return tuple(chosen), tuple(spared)


def _may_be_nodes(failure: NodeFailure) -> bool:
    """Return whether a failure may be the node's fault. Too little GPU memory is the model's, and
    an ``os._exit`` the code's."""
    is_codes = failure.kind in (ErrorKind.DEVICE_MEMORY, ErrorKind.EXITED)
    return failure.verdict in NODE_VERDICTS and not is_codes


def _reason(found: Sequence[NodeFailure], rule: CordonRule) -> str:
    verdicts = ", ".join(
        f"{verdict} {count}"
        for verdict, count in Counter(failure.verdict for failure in found).most_common()
    )
    newest_first = sorted(found, key=lambda failure: failure.at, reverse=True)
    runs = list(dict.fromkeys(failure.run_id for failure in newest_first))
    named = ", ".join(runs[:_SHOWN_RUNS]) + (
        f" and {len(runs) - _SHOWN_RUNS} more" if len(runs) > _SHOWN_RUNS else ""
    )
    times, plural = len(found), "s" if len(found) != 1 else ""
    return (
        f"{times} failure{plural} within {rule.window_s / 60:g} min began on this node "
        f"({verdicts}), in {named}"
    )
