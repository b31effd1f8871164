"""Say what failures cost: steps, or reports and the work between them.

A step of a task or a protected loop is an optimizer step. A step of a Ray Train function is one of
its reports: what it did since the last one is done again and counts as no step. So its cost is a
number of reports and a time. Commands, pages, drills, notebooks and TensorBoard use these words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.text.words import count, duration
from everstep.wire import Failure, Run
from everstep.wire.drills import DrillReport


def unit(of: Run | DrillReport) -> str:
    """Return what the steps of a run are: ``step`` or ``report``."""
    return "step" if of.redone_s is None else "report"


def of_run(run: Run) -> str:
    """Return what all failures of a run cost: ``2 steps lost``.

    A run that was restarted before any step was reported has lost a number that nobody knows: a
    user's script may report none.
    """
    if run.restarts and not run.step and not run.steps_lost and not run.redone_s:
        return "no steps reported"
    words = f"{count(run.steps_lost, unit(run))} lost"
    return f"{words} and {_redone(run.redone_s, ' between reports')}" if run.redone_s else words


def of_failure(fault: Failure) -> str | None:
    """Return what a failure cost; None if that is not known."""
    evidence = fault.evidence
    if evidence.get("worked_s") is not None:
        return _redone(float(evidence["worked_s"]))
    return _lost(fault.steps_lost, evidence.get("lost_unit"), evidence.get("since_report_s"))


def of_recovery(data: Mapping[str, Any]) -> str | None:
    """Return what the failure before a ``recovered`` event cost; None if the run reports no
    steps."""
    return _lost(data.get("steps_lost"), data.get("unit"), data.get("since_report_s"))


def of_drill(report: DrillReport) -> str | None:
    """Return what the fault of a drill cost; None if that is not known."""
    reports = None if report.redone_s is None else "reports"
    return _lost(report.steps_lost, reports, report.redone_s)


def _lost(num: int | None, unit: str | None, since_report_s: float | None) -> str | None:
    """Return steps or reports lost, and how long a loop had worked since its last report."""
    if num is None:
        return None
    words = f"{count(num, 'step' if unit is None else 'report')} lost"
    if unit is None or since_report_s is None:
        return words
    return f"{words} and {_redone(since_report_s, ' since the last one')}"


def _redone(seconds: float, since: str = "") -> str:
    return f"at most {duration(seconds)} of work{since} done again"
