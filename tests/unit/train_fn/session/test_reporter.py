"""Steps' metrics: all of them reach the journal in order, gathered only while steps are short, and
again after a recovery."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import Journal, journal_of, one_rank
from tests.support.raw_specs import TASK
from tests.support.restore_rounds import make_state
from train_fn.ranks.rank import RankJournal
from train_fn.recovery.launch import RankLaunch, RecoveryNote
from train_fn.session import report as reporter_module
from train_fn.session.report import HAND_OVER_S, Reporter
from train_fn.state.run_state import MOST_OTHERS, MOST_POINTS, NUM_OTHERS, NUM_POINTS, RecentEvents
from train_fn.state.train_state import TrainState

SPEC = RunSpec.model_validate(
    {
        "name": "small",
        "task": TASK,
    }
)
NOWHERE = RunDir(open_storage("/nowhere"), "run_none")


class Clock:
    """In place of the module's ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def begin(rank: int = 0) -> tuple[Reporter, TrainState, Journal]:
    ctx, state = one_rank(SPEC, NOWHERE, rank=rank), make_state()
    return Reporter(ctx, state), state, journal_of(ctx)


def end_step(reporter: Reporter, state: TrainState) -> None:
    state.step += 1
    reporter.step_done({"loss": 0.5}, 10)


def reported_steps(journal: Journal) -> list[int]:
    return [point["step"] for point in journal.points]


def test_what_came_before_a_restore_waits_for_its_gate_as_well() -> None:
    """A state may be restored that has passed no gate. Nothing of its step is reported before, also
    not when the rank leaves."""
    first, state, _ = begin()
    end_step(first, state)
    end_step(first, state)
    first.emit(EventKind.EPOCH_COMPLETED, {"epoch": 0})
    for passes_gate in (False, True):
        ctx = replace(one_rank(SPEC, NOWHERE), journaled_step=lambda: 0)
        reporter, journal = Reporter(ctx, state), journal_of(ctx)
        reporter.report_up_to(1)
        reporter.report_again()
        assert journal.events == []
        if passes_gate:
            reporter.report_up_to(2)
        reporter.close()
        assert reported_steps(journal) == ([1, 2] if passes_gate else [1])
        assert len(journal.of_kind(EventKind.EPOCH_COMPLETED)) == passes_gate


@given(st.lists(st.floats(1e-4, 0.3), min_size=1, max_size=60))
def test_points_are_told_in_order_and_none_waits_longer_than_a_moment(seconds: list[float]) -> None:
    clock = Clock()
    with patch.object(reporter_module, "time", clock):
        reporter, state, journal = begin()
        ended: dict[int, float] = {}
        for each in seconds:
            clock.now += each
            end_step(reporter, state)
            ended[state.step] = clock.now
            waiting = [step for step in ended if step not in reported_steps(journal)]
            assert all(clock.now - ended[step] < HAND_OVER_S for step in waiting)
            assert reported_steps(journal) == list(range(1, state.step - len(waiting) + 1))
        assert len(journal.events) <= 2 + sum(seconds) / HAND_OVER_S
        reporter.close()
    assert reported_steps(journal) == list(range(1, len(seconds) + 1))


def test_what_happens_between_steps_is_told_after_the_steps_before_it() -> None:
    reporter, state, journal = begin()
    for _ in range(3):
        end_step(reporter, state)
    reporter.emit(EventKind.EPOCH_COMPLETED, {"epoch": 0})
    kinds = [kind for kind, _ in journal.events]
    assert reported_steps(journal) == [1, 2, 3] and kinds[-1] is EventKind.EPOCH_COMPLETED
    assert [entry["kind"] for entry in state.recent] == ["metrics"] * 3 + ["epoch_completed"]


def test_other_ranks_tell_nothing_and_keep_the_same_tail() -> None:
    reporter, state, journal = begin(rank=1)
    end_step(reporter, state)
    reporter.close()
    assert not journal.events and [entry["data"]["step"] for entry in state.recent] == [1]


def test_survivors_report_again_what_rank_0_could_not_tell() -> None:
    """Rank 0 was cut off from the journal after step 100. What it says later is refused."""
    other = replace(one_rank(SPEC, NOWHERE, rank=1), journaled_step=lambda: min(state.step, 100))
    state = make_state()
    survivor = Reporter(other, state)
    for step in range(1, 101):
        end_step(survivor, state)
        survivor.emit(EventKind.EVALUATED, {"step": step})
        assert len(state.recent.others) == min(step, NUM_OTHERS)
        assert [entry["data"]["step"] for entry in state.recent.points] == list(
            range(max(1, step - NUM_POINTS + 1), step + 1)
        )
    ended: list[int] = []
    for _ in range(500):
        end_step(survivor, state)
        if state.step % 10 == 0:
            ended.append(state.step)
            survivor.emit(EventKind.EPOCH_COMPLETED, {"epoch": state.step})
    left = make_state()
    left.recent = RecentEvents(json.loads(state.recent.dump()))  # as it travels with the state
    left.step = state.step
    ctx = one_rank(SPEC, NOWHERE, attempt=2)
    again = Reporter(ctx, left)
    again.report_again()
    end_step(again, left)
    again.close()
    assert sorted(reported_steps(journal_of(ctx))) == list(range(101, 602))
    assert [data["epoch"] for data in journal_of(ctx).of_kind(EventKind.EPOCH_COMPLETED)] == ended
    for _ in range(MOST_POINTS):
        end_step(survivor, state)
        survivor.emit(EventKind.EPOCH_COMPLETED, {"epoch": state.step})
    assert len(state.recent.others) == MOST_OTHERS
    assert len(state.recent.points) == MOST_POINTS
    assert state.recent.points[0]["data"]["step"] == state.step - MOST_POINTS + 1


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_after_a_recovery_late_steps_travel_with_the_first_one(num_steps: int) -> None:
    """Also where the attempt has no step left to make. The journal that has the first one has them
    all."""
    old, state, _ = begin()
    for _ in range(2):
        end_step(old, state)
    ctx = one_rank(SPEC, NOWHERE)
    reporter, journal = Reporter(ctx, state), journal_of(ctx)
    reporter.report_again()
    for _ in range(num_steps):
        end_step(reporter, state)
    reporter.close()
    assert sorted(reported_steps(journal)) == list(range(1, 3 + num_steps))
    first = journal.of_kind(EventKind.METRICS)[0]["points"]
    assert [point["step"] for point in first] == list(range(1, 3 + min(num_steps, 1)))


@pytest.mark.parametrize("journaled", [22, 40])
def test_slow_steps_that_the_journal_missed_are_reported_again(journaled: int) -> None:
    """The head was away for minutes, in which few steps were made: no more than are always kept."""
    clock = Clock()
    with patch.object(reporter_module.head_clock, "now", lambda: clock.now):
        old, state, _ = begin(rank=1)
        for step in range(1, 61):
            clock.now += 30
            end_step(old, state)
            if step % 20 == 0:
                old.emit(EventKind.EPOCH_COMPLETED, {"epoch": step // 20 - 1})
        ctx = replace(one_rank(SPEC, NOWHERE, attempt=2), journaled_step=lambda: journaled)
        again = Reporter(ctx, state)
        again.report_again()
        end_step(again, state)
    assert reported_steps(journal_of(ctx)) == list(range(journaled + 1, 62))
    told = [data["epoch"] for data in journal_of(ctx).of_kind(EventKind.EPOCH_COMPLETED)]
    assert told == [1, 2], "that of step 40 follows its metrics, so the journal may lack it"


def recovered(at: float, *rejected: str, source: str = "snapshot") -> dict[str, Any]:
    """What is told of a recovery whose attempt's first points were made at a time."""
    journal, now = Journal(), time.time()
    note = RecoveryNote(
        noticed_at=now - 2, detect_s=0.1, last_step=7, world_size_before=3, left_at=now - 1.5
    )
    launch = RankLaunch(2, now - 1, recovery=note)
    rank = RankJournal(journal, launch, world_rank=0, world_size=2)  # type: ignore[arg-type]
    rejections = [{"name": name, "problem": "it is damaged"} for name in rejected]
    rank.emit(EventKind.RESTORED, {"step": 7, "source": source, "rejected": rejections})
    for _ in range(2):
        rank.emit(EventKind.METRICS, {"points": [{"step": 8, "at": at, "values": {}}]})
    assert [kind for kind, _ in journal.events].count(EventKind.RECOVERED) == 1
    return journal.of_kind(EventKind.RECOVERED)[0]


@pytest.mark.parametrize(
    ("source", "rung"),
    [("snapshot", "snapshot"), ("checkpoint", "checkpoint"), ("fresh", None)],
)
def test_a_recovery_names_its_rung(source: str, rung: str | None) -> None:
    assert recovered(time.time(), source=source)["rung"] == rung


def test_a_recovery_ends_with_its_first_step() -> None:
    found = recovered(time.time() + 1)
    assert found["steps_lost"] == 0 and found["world_size_after"] == 2
    assert found["recovery_s"] == pytest.approx(3, abs=0.5) and found["phases"][
        "first_step"
    ] == pytest.approx(1, abs=0.5)


def test_steps_behind_a_damaged_checkpoint_are_lost_though_nobody_reported_them() -> None:
    """Ranks that are killed right after a save may not have reported its step."""
    damaged, of_another_attempt = "step-000000017.s001.a001", "step-000000030.s001.a009"
    assert recovered(time.time(), damaged)["steps_lost"] == 10
    assert recovered(time.time(), of_another_attempt, "snapshot of rank 1")["steps_lost"] == 0


def test_a_recovery_with_no_step_left_ends_with_its_restore() -> None:
    """What is told then is of steps before the failure."""
    found = recovered(time.time() - 60)
    assert found["recovery_s"] == pytest.approx(2, abs=0.5) and found["phases"]["first_step"] == 0


def test_the_end_of_an_epoch_is_told_again_however_many_steps_came_after_it() -> None:
    """Its report waits half a second or longer, in which short steps are many."""
    old, state, _ = begin()
    old.emit(EventKind.EPOCH_COMPLETED, {"epoch": 0})
    for _ in range(200):
        end_step(old, state)
    ctx = one_rank(SPEC, NOWHERE)
    Reporter(ctx, state).report_again()
    assert journal_of(ctx).of_kind(EventKind.EPOCH_COMPLETED) == [{"epoch": 0}]
