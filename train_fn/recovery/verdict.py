"""Decide which rank failed first and what the failure was: a pure function of the evidence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from everstep.wire import ErrorKind, Verdict
from train_fn.recovery.evidence import VERDICT_OF_KIND, Evidence, RankReport, kind_of_death
from train_fn.recovery.links import Pairs, words

ALL_DIED = "the processes of all ranks ended"
"""Signature of a failure in which they did, though their nodes live and nothing says why."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on one failure, and the rank that failed first."""

    verdict: Verdict
    first_rank: int | None
    node_id: str | None
    step: int | None
    """Steps done; None if the run's position was not known yet."""
    exception: str | None
    signature: str | None
    """Equal for two occurrences of one bug."""
    kind: ErrorKind | None = None
    """Kind of the first rank's error; None if that rank raised none."""
    detail: dict[str, Any] = field(default_factory=dict)
    """The evidence as the failure event shows it."""
    pairs: Pairs = frozenset()
    """Pairs of nodes that do not hear each other, if nothing else explains the failure."""

    @property
    def worked_s(self) -> float | None:
        """Return how long a script that reports no steps had been running; None for other runs."""
        worked_s: float | None = self.detail.get("worked_s")
        return worked_s

    @property
    def place(self) -> str:
        """Return a phrase for where the run was."""
        if self.step is not None:
            return f"at step {self.step}"
        if self.worked_s is not None:
            return f"of a script that had run for {self.worked_s:.1f} s"
        return "before the first step"


def judge(evidence: Evidence) -> Judgement:
    """Return the verdict on one failure.

    A dead process outweighs every exception: its peers' exceptions follow from its death. Among
    ranks that raised on their own, the earliest is first. Errors of collectives follow from the end
    of another rank and are never blamed.
    """
    dead = sorted((r for r in evidence.ranks if r.died), key=lambda r: (r.node_alive, r.rank))
    stuck = [r for r in evidence.ranks if r.unresponsive]
    raised = sorted(
        (r for r in evidence.ranks if r.error and not r.error.collateral), key=_raised_at
    )
    if dead:
        judgement = _judgement(evidence, dead[0], _death_verdict(dead[0]))
        is_of_all = len(dead) == len(evidence.ranks) > 1
        return _of_all(judgement) if is_of_all else judgement
    if stuck:
        proven = [r for r in stuck if not r.is_unproven]
        judgement = _judgement(evidence, proven[0] if proven else None, Verdict.HANG)
        return replace(judgement, exception=judgement.exception or stuck[0].hang)
    if raised:
        error = raised[0].error
        assert error is not None
        judgement = _judgement(evidence, raised[0], VERDICT_OF_KIND[error.kind])
        # If ranks differ, and no majority shows which are wrong, all say so.
        kinds = {report.error and report.error.kind for report in evidence.ranks}
        apart = len(evidence.ranks) > 1 and kinds == {ErrorKind.CORRUPTION}
        return replace(judgement, first_rank=None, node_id=None) if apart else judgement
    draining = [r for r in evidence.ranks if r.node_draining]
    if draining:
        return _judgement(evidence, draining[0], Verdict.PREEMPTION)
    if evidence.control_error is not None:
        return _judgement(evidence, None, Verdict.CONTROL_PLANE)
    hung = [r for r in evidence.ranks if r.still_running and not r.held_up]
    if hung and any(r.error for r in evidence.ranks):
        # All others left a failed collective; they were waiting for the rank that stayed.
        return _judgement(evidence, hung[0], Verdict.HANG)
    judgement = _judgement(evidence, None, Verdict.UNKNOWN)
    return replace(judgement, exception=words(evidence.pairs)) if evidence.pairs else judgement


def _of_all(judgement: Judgement) -> Judgement:
    """Return the judgement of the death of all ranks, with a signature if no node died."""
    if judgement.verdict is not Verdict.WORKER_LOST:
        return judgement
    detail = judgement.detail | {"signature": ALL_DIED}
    return replace(judgement, signature=ALL_DIED, detail=detail)


def _raised_at(report: RankReport) -> tuple[float, int]:
    assert report.error is not None
    return report.error.at, report.rank


def _death_verdict(report: RankReport) -> Verdict:
    if report.preempted or report.node_draining:
        return Verdict.PREEMPTION
    if not report.node_alive:
        return Verdict.NODE_LOST
    kind = kind_of_death(report.death)
    return Verdict.WORKER_LOST if kind is None else VERDICT_OF_KIND[kind]


def _judgement(evidence: Evidence, first: RankReport | None, verdict: Verdict) -> Judgement:
    error = first.error if first else None
    exception = error.summary if error else evidence.control_error
    if first is not None and error is None:
        exception = first.hang
    elif first is None and verdict is Verdict.HANG:
        exception = next((report.hang for report in evidence.ranks if report.hang), None)
    return Judgement(
        verdict=verdict,
        first_rank=first.rank if first else None,
        node_id=first.node_id if first else None,
        step=error.step if error and error.step is not None else evidence.last_step,
        exception=exception,
        signature=error.signature if error else None,
        kind=error.kind if error else None,
        detail=evidence.detail(first),
        pairs=evidence.pairs if first is None else frozenset(),
    )
