"""The rules by which a node that fails too often is cordoned. Pure functions over failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from everstep.options.serve import (
    DEFAULT_CORDON_FAILURES,
    DEFAULT_CORDON_RUNS,
    DEFAULT_CORDON_WINDOW_S,
)
from everstep.wire import ErrorKind, Verdict
from everstep.wire.events import GPU_FAULTY, NODE_UNFIT
from service.model.rows import NodeFailure

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


def find_suspects(
    failures: Iterable[NodeFailure], rule: CordonRule, now: float, pardoned_at: Mapping[str, float]
) -> tuple[Suspect, ...]:
    """Return the nodes that failed too often or were not fit for a run, the worst first.

    Args:
        failures: Records in any order. Those outside the window, or not a node's fault, are
            ignored.
        rule: The limits.
        now: Unix seconds.
        pardoned_at: Node id -> when it was opened again, unix seconds. Failures up to then are
            ignored.
    """
    by_node: dict[str, list[NodeFailure]] = {}
    for failure in failures:
        recent = now - rule.window_s < failure.at <= now and failure.at > pardoned_at.get(
            failure.node_id, float("-inf")
        )
        if recent and _is_nodes_fault(failure):
            by_node.setdefault(failure.node_id, []).append(failure)
    suspects = []
    for node_id, found in by_node.items():
        runs = {failure.run_id for failure in found}
        unfit = [failure for failure in found if failure.kind is ErrorKind.NODE]
        if unfit:
            newest = max(unfit, key=lambda failure: failure.at)
            reason = (
                f"not fit for {newest.run_id}: {newest.exception.removeprefix(f'{NODE_UNFIT}: ')}"
            )
            suspects.append(Suspect(node_id, len(found), len(runs), reason))
        elif faulty := [failure for failure in found if GPU_FAULTY in failure.exception]:
            newest = max(faulty, key=lambda failure: failure.at)
            faults = newest.exception.rpartition(GPU_FAULTY)[2]
            reason = f"{GPU_FAULTY}{faults}; seen by {newest.run_id}"
            suspects.append(Suspect(node_id, len(found), len(runs), reason))
        elif 0 < rule.runs <= len(runs) or 0 < rule.failures <= len(found):
            suspects.append(Suspect(node_id, len(found), len(runs), _reason(found, rule)))
    return tuple(
        sorted(
            suspects,
            key=lambda suspect: (-suspect.num_failures, -suspect.num_runs, suspect.node_id),
        )
    )


def choose_to_cordon(
    suspects: Sequence[Suspect], worker_nodes: Collection[str], marked: Collection[str]
) -> tuple[tuple[Suspect, ...], tuple[Suspect, ...]]:
    """Return the suspects to cordon, and those to spare so that half of the cluster stays open.

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
        if 2 * (num_open - 1) < len(worker_nodes):
            spared.append(suspect)
            continue
        num_open -= 1
        chosen.append(suspect)
    return tuple(chosen), tuple(spared)


def _is_nodes_fault(failure: NodeFailure) -> bool:
    """Return whether a failure may be the node's fault. Too little GPU memory is the model's."""
    return failure.verdict in NODE_VERDICTS and failure.kind is not ErrorKind.DEVICE_MEMORY


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
