"""The facts about one failure of an attempt, collected from every rank before a verdict is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from train_fn.recovery.links import Pairs, as_json, pairs_of
from train_fn.recovery.rank_error import RankError

_DETAIL_CHARS = 4000
_STACK_CHARS = 8000


@dataclass(frozen=True)
class RankReport:
    """What is known about one rank once its group has shut down."""

    rank: int
    node_id: str
    pid: int
    node_alive: bool = True
    """Whether its node's raylet accepted a connection."""
    node_draining: bool = False
    died: bool = False
    """Its process is gone, and the controller did not kill it."""
    death: str | None = None
    """Ray's description of that death."""
    preempted: bool = False
    """Ray says that the node was taken away as announced."""
    unresponsive: bool = False
    """Its process lives but answers no call: it is stopped, or stuck outside Python."""
    is_unproven: bool = False
    """It was killed to free the others, and nothing shows that it is the one that hung."""
    stack: str | None = None
    """Its stack when the rank was taken for hung."""
    hang: str | None = None
    """Why it was taken for hung: the limit that it exceeded, and the setting that allows more."""
    still_running: bool = False
    """Its training thread had not ended when the wait for it was over."""
    held_up: bool = False
    """That thread was waiting in a collective that had not failed yet."""
    kept_step: int | None = None
    """Step whose state was left on its node before that thread was freed."""
    state_bytes: int = 0
    """How large the state is that the rank leaves on its node."""
    stays_at: int | None = None
    """Step of the state that it keeps in its process for the next attempt."""
    unheard: tuple[str, ...] = ()
    """Ids of the nodes from which it heard nothing although it waited for them."""
    error: RankError | None = None

    @property
    def state(self) -> str:
        """How the rank ended, in one or two words."""
        if self.died:
            return "died"
        if self.unresponsive:
            return "unresponsive"
        if self.still_running:
            return "held up" if self.held_up else "still running"
        if self.error is None:
            return "left"
        return "collateral" if self.error.collateral else "raised"

    @property
    def may_stay(self) -> bool:
        """Return whether its process can serve the next attempt: it merely lost a peer, has left
        that peer in order, and keeps a whole state, with what it was trained with.

        A process never builds a second time: what the first build left in it may be in the way.
        """
        has_ended = not (self.died or self.unresponsive or self.still_running)
        return (
            has_ended
            and self.node_alive
            and self.error is not None
            and self.error.collateral
            and self.stays_at is not None
        )


@dataclass(frozen=True)
class Evidence:
    """One failure of an attempt: each rank's report, or why the group could not start."""

    attempt: int
    noticed_at: float
    """Unix seconds."""
    ranks: tuple[RankReport, ...] = ()
    last_step: int | None = None
    """Most steps done, as far as any rank or the journal knows."""
    worked_s: float | None = None
    """How long a script that reports no steps had been running; None for other runs."""
    control_error: str | None = None
    """An error of the controller or of the group's start, not of a training function."""

    @property
    def pairs(self) -> Pairs:
        """Return the pairs of nodes that do not hear each other; none if a rank has died, since its
        host may be gone."""
        if any(report.died for report in self.ranks):
            return frozenset()
        unheard: dict[str, set[str]] = {}
        for report in self.ranks:
            unheard.setdefault(report.node_id, set()).update(report.unheard)
        return pairs_of(unheard)

    def detail(self, first: RankReport | None) -> dict[str, Any]:
        """Return the evidence as JSON: the first failing rank in full, every other in one line."""
        detail: dict[str, Any] = {"ranks": [_line(report) for report in self.ranks]}
        if self.pairs:
            detail["pairs"] = as_json(self.pairs)
        if self.worked_s is not None:
            detail["worked_s"] = round(self.worked_s, 3)
        if self.control_error:
            detail["control_error"] = self.control_error[-_DETAIL_CHARS:]
        if first is not None:
            detail |= {"pid": first.pid, "node_alive": first.node_alive}
            if first.stack:
                detail["stack"] = first.stack[-_STACK_CHARS:]
            if first.death:
                detail["death"] = first.death[-_DETAIL_CHARS:]
            if first.error:
                detail |= _error_detail(first.error)
        return detail


def _error_detail(error: RankError) -> dict[str, Any]:
    detail: dict[str, Any] = {
        "kind": error.kind.value,
        "signature": error.signature,
        "traceback": error.traceback,
        "phase": error.phase,
    }
    if error.place:
        detail["place"] = error.place
    if error.device:
        detail["device"] = error.device
    if error.memory:
        detail["memory"] = error.memory[-_STACK_CHARS:]
    return detail


def _line(report: RankReport) -> dict[str, Any]:
    error = report.error
    return {
        "rank": report.rank,
        "node_id": report.node_id,
        "state": report.state,
        "error": error.summary[:500] if error else None,
        "step": error.step if error else None,
        "snapshot_step": error.snapshot_step if error else report.kept_step,
        **({} if report.stays_at is None else {"stays_at": report.stays_at}),
        "at": error.at if error else None,
        **({"stack": report.stack[-_DETAIL_CHARS:]} if report.stack else {}),
        **({"unheard": list(report.unheard)} if report.unheard else {}),
    }
