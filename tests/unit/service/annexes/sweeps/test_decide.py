"""The engine of sweeps, in worlds that hypothesis makes: runs arrive at their rungs in any order,
fail, report NaN, and the process dies between any two actions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.spec.sweep import AshaSpec
from everstep.wire import RunStatus
from service.annexes.sweeps.decide import (
    Cancel,
    End,
    GoOn,
    Pause,
    Submit,
    SweepFacts,
    TrialFacts,
    decide,
    rung_step,
)
from service.model.states import LIVE

SEEDS = st.integers(0, 2**32)
"""Of the order in which things happen."""
VALUES = st.sampled_from([None, math.nan, math.inf, 0.0, 0.5, 0.5, 0.7, 1.0])


@dataclass(frozen=True)
class Fate:
    """What a run will do: its value at each rung, and at which of them it fails, if at any."""

    values: tuple[float | None, ...]
    fails_at: int | None


@dataclass
class World:
    """A sweep whose runs follow their fates."""

    fates: list[Fate]
    sweep: SweepFacts
    ended: str | None = None
    submitted: list[int] = field(default_factory=list)

    def trial(self, number: int) -> TrialFacts:
        return self.sweep.trials[number]

    def live(self) -> list[TrialFacts]:
        return [trial for trial in self.sweep.trials if trial.status in LIVE]

    def set(self, number: int, **changes: object) -> None:
        trials = list(self.sweep.trials)
        trials[number] = replace(trials[number], **changes)  # type: ignore[arg-type]
        self.sweep = replace(self.sweep, trials=tuple(trials))

    def act(self, num_actions: int) -> None:
        """Carry out so many of the actions that are decided now; check each one."""
        actions = decide(self.sweep)
        assert actions == decide(self.sweep)
        for action in actions[:num_actions]:
            self._check(action)
            match action:
                case Submit(number):
                    self.submitted.append(number)
                    self.set(number, status=RunStatus.QUEUED)
                case Pause(number):
                    self.set(number, status=RunStatus.STOPPING, stop="pause")
                case GoOn(number, rung, is_paused):
                    self.set(number, rung=rung)
                    if is_paused:
                        self.set(number, status=RunStatus.QUEUED)
                case Cancel(number):
                    if self.trial(number).status == RunStatus.PAUSED:
                        self.set(number, status=RunStatus.CANCELLED)
                    else:
                        self.set(number, status=RunStatus.STOPPING, stop="cancel")
                case End(outcome):
                    self.ended = outcome
            most = self.sweep.max_parallel
            assert most is None or len(self.live()) <= most, "more at a time than the budget"

    def _check(self, action: object) -> None:
        assert self.ended is None
        if isinstance(action, Submit):
            assert action.number not in self.submitted, "submitted twice"
        elif isinstance(action, GoOn):
            self._check_goes_on(action)
        elif isinstance(action, End):
            assert all(trial.has_ended for trial in self.sweep.trials if trial.is_submitted)
            assert action.outcome == "cancelled" or len(self.submitted) == len(self.fates)

    def _check_goes_on(self, action: GoOn) -> None:
        trial = self.trial(action.number)
        assert action.rung == len(trial.results) == trial.rung + 1
        assert (trial.status == RunStatus.PAUSED) == action.is_paused
        value = trial.results[-1]
        assert value is not None and math.isfinite(value), "NaN goes on"
        is_last = not self.live() and len(self.submitted) == len(self.fates)
        none_trained = all(each.status != RunStatus.SUCCEEDED for each in self.sweep.trials)
        assert self._is_best(trial) or (is_last and none_trained)

    def _is_best(self, trial: TrialFacts) -> bool:
        rung = len(trial.results) - 1
        reached = [each for each in self.sweep.trials if len(each.results) > rung]
        value = trial.results[rung]
        assert value is not None and self.sweep.reduction_factor is not None
        num_better = 0
        for each in reached:
            other = each.results[rung]
            if each.is_lost or other is None or not math.isfinite(other):
                continue
            if not self.sweep.larger_is_better:
                other, mine = -other, -value
            else:
                mine = value
            num_better += (other, -each.number) > (mine, -trial.number)
        return num_better < len(reached) // self.sweep.reduction_factor

    def happen(self, number: int) -> None:
        """Let the next thing happen to a live run."""
        trial, fate = self.trial(number), self.fates[number]
        if trial.status == RunStatus.STOPPING:
            end = RunStatus.CANCELLED if trial.stop == "cancel" else RunStatus.PAUSED
            self.set(number, status=end, stop=None)
        elif trial.status == RunStatus.QUEUED:
            self.set(number, status=RunStatus.RUNNING)
        elif fate.fails_at == len(trial.results):
            self.set(number, status=RunStatus.FAILED)
        elif len(trial.results) < len(fate.values):
            if self.sweep.reduction_factor is not None and trial.is_at_rung:
                return  # it trains on; the sweep pauses it or lets it go on
            value = fate.values[len(trial.results)]
            is_finite = value is not None and math.isfinite(value)
            self.set(number, results=(*trial.results, value), has_metric=True)
            if is_finite:
                self.set(number, has_value=True)
        else:
            self.set(number, status=RunStatus.SUCCEEDED, has_metric=True)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_rungs = draw(st.integers(1, 3))
    fates = draw(
        st.lists(
            st.builds(
                Fate,
                st.tuples(*[VALUES] * num_rungs),
                st.none() | st.none() | st.integers(0, num_rungs),
            ),
            min_size=1,
            max_size=9,
        )
    )
    sweep = SweepFacts(
        trials=tuple(TrialFacts(number) for number in range(len(fates))),
        larger_is_better=draw(st.booleans()),
        max_parallel=draw(st.none() | st.integers(1, 4)),
        reduction_factor=draw(st.none() | st.integers(2, 4)),
    )
    return World(fates, sweep)


def play(world: World, chance: random.Random) -> None:
    """Until the sweep ends: something happens to a run, or the sweep acts, all or a part of it."""
    for _ in range(2000):
        live = world.live()
        if live and chance.random() < 0.5:
            world.happen(chance.choice(live).number)
            continue
        assert live or decide(world.sweep), "nothing trains, and nothing is decided"
        world.act(chance.randint(1, 20))
        if world.ended is not None:
            return
    raise AssertionError("the sweep does not end")


@given(worlds(), SEEDS)
def test_every_sweep_ends_within_its_budget_and_only_the_best_go_on(
    world: World, seed: int
) -> None:
    play(world, random.Random(seed))
    trained = [trial for trial in world.sweep.trials if trial.status == RunStatus.SUCCEEDED]
    able = [
        fate
        for fate in world.fates
        if fate.fails_at is None
        and all(value is not None and math.isfinite(value) for value in fate.values)
    ]
    if able:
        assert trained and world.ended == "succeeded", "one run at least trains to its end"
    if not trained:
        assert world.ended in ("runs_failed", "no_value")


@given(worlds(), SEEDS)
def test_a_cancelled_sweep_submits_nothing_and_leaves_nothing_running(
    world: World, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(chance.randint(0, 30)):
        if world.live() and chance.random() < 0.5:
            world.happen(chance.choice(world.live()).number)
        elif world.ended is None:
            world.act(chance.randint(1, 20))
    if world.ended is not None:
        return
    submitted = list(world.submitted)
    world.sweep = replace(world.sweep, cancelling=True)
    play(world, chance)
    assert world.submitted == submitted and world.ended == "cancelled"
    assert all(trial.has_ended for trial in world.sweep.trials if trial.is_submitted)


def at_rung(number: int, *results: float | None, **fields: object) -> TrialFacts:
    """A run that is paused at its newest rung."""
    facts = TrialFacts(number, RunStatus.PAUSED, rung=len(results) - 1, results=results)
    return replace(facts, has_metric=True, has_value=True, **fields)  # type: ignore[arg-type]


def halved(*trials: TrialFacts, **fields: object) -> SweepFacts:
    facts = SweepFacts(trials, larger_is_better=True, reduction_factor=2)
    return replace(facts, **fields)  # type: ignore[arg-type]


def test_of_equal_values_the_first_run_goes_on() -> None:
    assert decide(halved(at_rung(0, 0.5), at_rung(1, 0.5))) == (GoOn(0, 1, True),)


def test_a_run_that_is_among_the_best_is_not_paused() -> None:
    training = at_rung(1, 0.9, status=RunStatus.RUNNING)
    assert decide(halved(at_rung(0, 0.5), training)) == (GoOn(1, 1, False),)
    assert decide(halved(at_rung(0, 0.95), training)) == (Pause(1), GoOn(0, 1, True))


def test_a_failed_run_leaves_its_place_to_the_next_best() -> None:
    failed = at_rung(0, 0.9, status=RunStatus.FAILED)
    training = TrialFacts(3, RunStatus.RUNNING)
    facts = halved(failed, at_rung(1, 0.5), at_rung(2, 0.4), training)
    assert decide(facts) == (GoOn(1, 1, True),)


def test_a_run_of_a_higher_rung_goes_on_before_others_and_before_new_ones() -> None:
    higher = [at_rung(0, 0.5, 0.6), at_rung(1, 0.5, 0.5)]
    lower = [at_rung(2, 0.99), at_rung(3, 0.1)]
    waiting = TrialFacts(4)
    facts = halved(*higher, *lower, waiting, max_parallel=2)
    assert decide(facts) == (GoOn(0, 2, True), GoOn(2, 1, True))


def test_a_run_that_a_user_paused_is_left_alone_and_waited_for() -> None:
    paused = replace(TrialFacts(0), status=RunStatus.PAUSED)
    assert decide(halved(paused)) == ()
    assert decide(SweepFacts((paused,), larger_is_better=True)) == ()


@pytest.mark.parametrize("factor", [None, 2])
def test_a_metric_that_nobody_reports_ends_the_sweep_early(factor: int | None) -> None:
    trained = TrialFacts(0, RunStatus.SUCCEEDED)
    training = TrialFacts(1, RunStatus.RUNNING)
    facts = halved(trained, training, TrialFacts(2), reduction_factor=factor)
    assert decide(facts) == (Cancel(1),)
    ended = replace(training, status=RunStatus.CANCELLED)
    assert decide(replace(facts, trials=(trained, ended, TrialFacts(2)))) == (
        End("metric_missing"),
    )


def test_runs_that_were_all_cancelled_by_hand_are_a_cancelled_sweep() -> None:
    gone = TrialFacts(1, is_gone=True, has_value=True, has_metric=True, results=(0.5,))
    facts = halved(TrialFacts(0, RunStatus.CANCELLED), gone)
    assert decide(facts) == (End("cancelled"),)


def test_a_run_that_diverged_later_ends_the_sweep_as_failed() -> None:
    diverged = at_rung(0, 0.5, math.nan)
    assert decide(halved(diverged)) == (Cancel(0),)
    assert decide(halved(replace(diverged, status=RunStatus.CANCELLED))) == (End("no_value"),)


def test_values_that_are_not_finite_never_go_on() -> None:
    lost = [replace(at_rung(n, math.nan), has_value=False) for n in range(4)]
    assert decide(halved(*lost)) == tuple(Cancel(n) for n in range(4))
    cancelled = [replace(each, status=RunStatus.CANCELLED) for each in lost]
    assert decide(halved(*cancelled)) == (End("no_value"),)


def test_rungs_lie_at_the_runs_own_length_or_at_given_steps() -> None:
    by_length = AshaSpec(name="asha", reduction_factor=2)
    assert [rung_step(by_length, rung, 5) for rung in range(3)] == [2, 3, None]
    assert rung_step(by_length, 0, None) is None and rung_step(by_length, 0, 1) is None
    given_steps = AshaSpec(name="asha", reduction_factor=2, min_steps=10)
    assert [rung_step(given_steps, rung, 41) for rung in range(4)] == [10, 20, 40, None]
    assert rung_step(given_steps, 5, None) == 320
