"""Decide which ranks keep their processes after a failure, and which of them also write the state
that they keep. Pure functions of the ranks' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.wire import Verdict
from train_fn.recovery.decision import Decision
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.verdict import Judgement

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


def kept_steps(reports: Sequence[RankReport]) -> dict[int, int]:
    """Return the ranks whose processes can serve the next attempt, with the step of the state that
    each left."""
    return {
        report.rank: report.left_at
        for report in reports
        if report.may_stay and report.left_at is not None
    }


def ranks_to_insure(reports: Sequence[RankReport]) -> list[int]:
    """Return the ranks that write the state they keep in their process as a snapshot, while the
    next attempt starts: one of each node.

    Otherwise the death of a process in the next start could cost the only copy. A large state that
    two processes hold is not written, since the next attempt would wait for it.
    """
    holders = [report for report in reports if report.may_stay and report.stays_at is not None]
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
