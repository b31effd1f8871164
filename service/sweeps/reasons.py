"""The reasons that a sweep shows, and those of the runs that it cancels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from everstep.spec.sweep import SweepSpec
from everstep.text.close_names import closest
from everstep.text.words import count
from everstep.wire.sweep import SweepReason, SweepReasonCode, SweepStatus
from service.model.sweep_rows import SweepRow, TrialRow
from service.sweeps.decide import Outcome, SweepFacts, lacks_metric, waits_for_user

_MOST_NAMED: Final = 5


@dataclass(frozen=True)
class Look:
    """A sweep as one look finds it."""

    sweep: SweepRow
    spec: SweepSpec
    rows: Sequence[TrialRow]
    facts: SweepFacts

    def run_id(self, number: int) -> str:
        run_id = self.rows[number].run_id
        assert run_id is not None and self.rows[number].number == number
        return run_id


def while_running(look: Look) -> SweepReason | None:
    """Return what a running sweep waits for, or which of its runs failed; None if all is well."""
    if lacks_metric(look.facts):
        message = "A run ended without reporting the metric; the other runs are cancelled."
        return SweepReason(code=SweepReasonCode.METRIC_MISSING, message=message)
    waiting = [look.run_id(trial.number) for trial in waits_for_user(look.facts)]
    if waiting:
        paused = "a run is" if len(waiting) == 1 else f"{len(waiting)} runs are"
        message = f"waits: {paused} paused. Resume or cancel {_named(waiting)}."
        return SweepReason(code=SweepReasonCode.WAITING_FOR_PAUSED_RUNS, message=message)
    return _failed(look.rows)


def at_the_end(look: Look, outcome: Outcome, names: list[str]) -> SweepReason | None:
    """Return why a sweep has its final status; None if every run trained as it should. ``names``
    are the metrics of a run, if the sweep's is missing."""
    sweep, spec = look.sweep, look.spec
    if outcome == "metric_missing":
        near = closest(spec.metric, names)
        guess = f" Did you mean {near}?" if near else ""
        message = (
            f"No run reported {spec.metric}; the metrics are {', '.join(names) or 'none'}.{guess} "
            "Submit the sweep again with one of them."
        )
        return SweepReason(code=SweepReasonCode.METRIC_MISSING, message=message)
    if outcome == "no_value":
        message = (
            f"No run trained to its end with finite values of {spec.metric}; `everstep metrics "
            "RUN` shows them."
        )
        return SweepReason(code=SweepReasonCode.NO_VALUE, message=message)
    if outcome == "cancelled":
        if sweep.state == SweepStatus.STOPPING and sweep.reason_code is not None:
            code = SweepReasonCode(sweep.reason_code)
            return SweepReason(code=code, message=sweep.reason_message or "")
        message = "Every run was cancelled or deleted before its end."
        return SweepReason(code=SweepReasonCode.RUNS_CANCELLED, message=message)
    return _failed(look.rows)


def of_cancelled_run(look: Look) -> str:
    """Return why a sweep cancels a run."""
    if look.sweep.state == SweepStatus.STOPPING:
        return "the sweep was cancelled"
    if lacks_metric(look.facts):
        return f"no run reports its metric {look.spec.metric}"
    return "other runs were better at its rung"


def _failed(rows: Sequence[TrialRow]) -> SweepReason | None:
    failed = [str(row.run_id) for row in rows if row.status == "FAILED"]
    if not failed:
        return None
    which = "its only run" if len(rows) == 1 else f"{len(failed)} of {count(len(rows), 'run')}"
    message = f"{which} failed: {_named(failed)}. `everstep why RUN` shows the cause."
    return SweepReason(code=SweepReasonCode.RUNS_FAILED, message=message)


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    return ", ".join(ids[:_MOST_NAMED]) + more
