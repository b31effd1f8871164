"""Decide what a sweep does next. Pure: the same facts give the same actions, in any order of
arrival.

Carrying out the actions changes the facts so that they are not decided again. So a crash between
any two of them is harmless: the next look decides the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everstep.wire import RunStatus
from service.model.states import LIVE
from service.sweeps.halving import Ranking, TrialFacts, is_finite

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
