"""Decide what a sweep does next. Pure: the same facts give the same actions, in any order of
arrival.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from everstep.spec.sweep import AshaSpec, SweepSpec
from everstep.text.words import closest, count
from everstep.wire import RunStatus
from everstep.wire.sweep import SweepReason, SweepReasonCode, SweepStatus
from service.annexes.sweeps.store import SweepRow, TrialRow
from service.model.states import LIVE
from storage.run_control import Stop

# ---------------------------------------------------------------- halving

# Asynchronous successive halving: where the rungs are, and which runs go on from them.
#
# A run trains to a rung and pauses there with its value of the metric. It goes on if it is among
# the best of those that have reached the rung: of ``n`` runs, ``n // reduction_factor`` go on. No
# run waits for the others to reach the rung: each new value is judged with those that are known.
# (Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020.)

DEFAULT_RUNGS: Final = 2
"""Rungs where ``min_steps`` does not set the first."""
_LOST: Final = frozenset({RunStatus.FAILED, RunStatus.CANCELLED})


@dataclass(frozen=True)
class TrialFacts:
    """What the engine knows of one run of a sweep."""

    number: int
    status: RunStatus | None = None
    """Status of its run; None before it is submitted."""
    is_gone: bool = False
    """Whether its run was deleted."""
    stop: Stop | None = None
    """What its run was asked to do."""
    rung: int = 0
    """Rungs from which it went on: it trains to the rung of this number."""
    results: tuple[float | None, ...] = ()
    """Its value at each rung that it has reached; None was not finite."""
    has_metric: bool = False
    """Whether it ever reported the metric."""
    has_value: bool = False
    """Whether one of the values was finite."""

    @property
    def is_submitted(self) -> bool:
        return self.status is not None or self.is_gone

    @property
    def has_ended(self) -> bool:
        return self.is_gone or (self.status is not None and self.status.terminal)

    @property
    def is_lost(self) -> bool:
        """Return whether it ended without training to its end."""
        return self.is_gone or self.status in _LOST

    @property
    def is_at_rung(self) -> bool:
        """Return whether it has reached the rung that it trained to."""
        return len(self.results) > self.rung


def rung_step(scheduler: AshaSpec, rung: int, total_steps: int | None) -> int | None:
    """Return the step of a rung, 0 is the first; None if the run has no such rung, or its length is
    not known yet.

    >>> [rung_step(AshaSpec(name="asha"), rung, 90) for rung in range(3)]
    [10, 30, None]
    >>> [rung_step(AshaSpec(name="asha", min_steps=20), rung, 90) for rung in range(3)]
    [20, 60, None]
    """
    factor = scheduler.reduction_factor
    if scheduler.min_steps is not None:
        step = scheduler.min_steps * factor**rung
    elif total_steps is None or rung >= DEFAULT_RUNGS:
        return None
    else:
        step = math.ceil(total_steps / factor ** (DEFAULT_RUNGS - rung))
    return step if total_steps is None or step < total_steps else None


class Ranking:
    """The order of the runs of a sweep at each rung.

    A value that is not finite is the worst, and never goes on. Of equal values the run with the
    lower number is better. A run that ended without training to its end counts among those that
    reached the rung, and leaves its place to the next best.
    """

    def __init__(
        self, trials: Collection[TrialFacts], reduction_factor: int, *, larger_is_better: bool
    ) -> None:
        self._trials = trials
        self._factor = reduction_factor
        self._sign = -1.0 if larger_is_better else 1.0
        self._best: dict[int, frozenset[int]] = {}

    def may_go_on(self, trial: TrialFacts) -> bool:
        """Return whether a run at a rung is among the best there."""
        return trial.number in self.best_at(len(trial.results) - 1)

    def best_at(self, rung: int) -> frozenset[int]:
        """Return the numbers of the runs that may go on from a rung."""
        if rung not in self._best:
            self._best[rung] = self._found_best(rung)
        return self._best[rung]

    def _found_best(self, rung: int) -> frozenset[int]:
        reached = [trial for trial in self._trials if len(trial.results) > rung]
        running = [
            trial for trial in reached if not trial.is_lost and is_finite(trial.results[rung])
        ]
        best = sorted(running, key=lambda trial: self._place(trial, rung))
        return frozenset(trial.number for trial in best[: len(reached) // self._factor])

    def sorted(self, trials: Collection[TrialFacts]) -> list[TrialFacts]:
        """Return runs that wait at their rungs: those of the highest rung first, then the best."""
        return sorted(
            trials,
            key=lambda trial: (-len(trial.results), self._place(trial, len(trial.results) - 1)),
        )

    def _place(self, trial: TrialFacts, rung: int) -> tuple[bool, float, int]:
        value = trial.results[rung]
        if value is None or not math.isfinite(value):
            return (True, 0.0, trial.number)
        return (False, self._sign * value, trial.number)


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


# ---------------------------------------------------------------- decide

Outcome = Literal["succeeded", "runs_failed", "metric_missing", "no_value", "cancelled"]


@dataclass(frozen=True)
class SweepFacts:
    """A sweep and its runs, in the order of their numbers."""

    trials: tuple[TrialFacts, ...]
    larger_is_better: bool
    max_parallel: int | None = None
    reduction_factor: int | None = None
    """None trains every run to its end."""
    cancelling: bool = False


@dataclass(frozen=True)
class Submit:
    """Submit the run."""

    number: int


@dataclass(frozen=True)
class Pause:
    """Pause the run at its rung."""

    number: int


@dataclass(frozen=True)
class GoOn:
    """Let the run train on to rung ``rung``."""

    number: int
    rung: int
    is_paused: bool
    """Whether the run has to be resumed for that."""


@dataclass(frozen=True)
class Cancel:
    """Cancel the run."""

    number: int


@dataclass(frozen=True)
class End:
    """End the sweep."""

    outcome: Outcome


Action = Submit | Pause | GoOn | Cancel | End


def decide(sweep: SweepFacts) -> tuple[Action, ...]:
    """Return what to do now, in order; nothing while the sweep waits for its runs."""
    if sweep.cancelling:
        return _stopped(sweep, "cancelled")
    if lacks_metric(sweep):
        return _stopped(sweep, "metric_missing")
    live = [trial for trial in sweep.trials if trial.status in LIVE]
    actions = _at_rungs(sweep, live)
    starts = _starts(sweep)
    room = len(starts) if sweep.max_parallel is None else max(0, sweep.max_parallel - len(live))
    actions += starts[:room]
    return tuple(actions) if live or starts else _closed(sweep)


def lacks_metric(sweep: SweepFacts) -> bool:
    """Return whether a run trained to its end without ever reporting the metric, and no other run
    reported it either: the rest would train for nothing."""
    ended = any(trial.status == RunStatus.SUCCEEDED for trial in sweep.trials)
    return ended and not any(trial.has_metric for trial in sweep.trials)


def waits_for_user(sweep: SweepFacts) -> list[TrialFacts]:
    """Return runs that are paused and not at a rung: somebody else paused them."""
    paused = [trial for trial in sweep.trials if trial.status == RunStatus.PAUSED]
    if sweep.reduction_factor is None:
        return paused
    return [trial for trial in paused if not trial.is_at_rung]


def _ranking(sweep: SweepFacts) -> Ranking | None:
    if sweep.reduction_factor is None:
        return None
    return Ranking(sweep.trials, sweep.reduction_factor, larger_is_better=sweep.larger_is_better)


def _at_rungs(sweep: SweepFacts, live: list[TrialFacts]) -> list[Action]:
    """Return what becomes of runs that train and have reached their rungs."""
    ranking = _ranking(sweep)
    if ranking is None:
        return []
    return [
        GoOn(trial.number, len(trial.results), is_paused=False)
        if ranking.may_go_on(trial)
        else Pause(trial.number)
        for trial in live
        if trial.is_at_rung and trial.stop is None
    ]


def _starts(sweep: SweepFacts) -> list[Action]:
    """Return the runs that could start: paused ones that are among the best of their rung, then
    those that were not submitted yet."""
    found: list[Action] = []
    ranking = _ranking(sweep)
    if ranking is not None:
        best = [trial for trial in _held(sweep) if ranking.may_go_on(trial)]
        found += [_resumed(trial) for trial in ranking.sorted(best)]
    return found + [Submit(trial.number) for trial in sweep.trials if not trial.is_submitted]


def _held(sweep: SweepFacts) -> list[TrialFacts]:
    """Return the runs that are paused at a rung."""
    return [
        trial for trial in sweep.trials if trial.status == RunStatus.PAUSED and trial.is_at_rung
    ]


def _resumed(trial: TrialFacts) -> GoOn:
    return GoOn(trial.number, len(trial.results), is_paused=True)


def _closed(sweep: SweepFacts) -> tuple[Action, ...]:
    """Return what to do when no run trains, waits in the queue, or may start.

    One run at least trains to its end, also if there are fewer runs than ``reduction_factor``, or
    the best one failed: the best of those that wait. The others are cancelled.
    """
    ranking = _ranking(sweep)
    if ranking is not None and (held := _held(sweep)):
        able = [trial for trial in held if is_finite(trial.results[-1])]
        if able and not any(trial.status == RunStatus.SUCCEEDED for trial in sweep.trials):
            return (_resumed(ranking.sorted(able)[0]),)
        if not waits_for_user(sweep):
            return tuple(Cancel(trial.number) for trial in held)
    if waits_for_user(sweep):
        return ()
    return (End(_outcome(sweep)),)


def _outcome(sweep: SweepFacts) -> Outcome:
    if any(trial.status == RunStatus.SUCCEEDED for trial in sweep.trials):
        return "succeeded" if any(trial.has_value for trial in sweep.trials) else "no_value"
    if any(trial.status == RunStatus.FAILED for trial in sweep.trials):
        return "runs_failed"
    diverged = any(t.results and not is_finite(t.results[-1]) for t in sweep.trials)
    return "no_value" if diverged else "cancelled"


def _stopped(sweep: SweepFacts, outcome: Outcome) -> tuple[Action, ...]:
    """Return what to do to end every run, and then the sweep."""
    unended = [trial for trial in sweep.trials if trial.is_submitted and not trial.has_ended]
    if not unended:
        return (End(outcome),)
    return tuple(Cancel(trial.number) for trial in unended if trial.stop != "cancel")


# ---------------------------------------------------------------- reasons

# The reasons that a sweep shows, and those of the runs that it cancels.

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
