"""When ranks are taken for hung, and which of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import train_fn
from everstep.wire.events import EventKind
from train_fn.recovery import hang as progress_module
from train_fn.recovery.hang import (
    ABORTING_SILENT_S,
    WAITING_FILES,
    AttemptProgress,
    HangWatch,
    Phase,
    ProgressTracker,
    find_silent,
    find_stuck,
    may_still_leave,
    waits_for_others,
)
from train_fn.recovery.settings import RecoverySettings


def points(*steps: int, step_s: float = 0.1) -> dict[str, Any]:
    return {"points": [{"step": step, "at": 1.0, "values": {"step_s": step_s}} for step in steps]}


def test_the_phase_follows_the_events_of_the_newest_attempt() -> None:
    tracker = ProgressTracker()
    story: list[tuple[EventKind, int, dict[str, Any], Phase]] = [
        (EventKind.ATTEMPT_STARTED, 1, {}, Phase.START),
        (EventKind.RESTORED, 1, {"step": 4}, Phase.START),
        # reported again, before anything is trained
        (EventKind.EPOCH_COMPLETED, 1, {"epoch": 0}, Phase.START),
        (EventKind.TRAINING_STARTED, 1, {"total_steps": 7}, Phase.FIRST_STEP),
        (EventKind.METRICS, 1, points(5), Phase.STEP),
        (EventKind.EPOCH_COMPLETED, 1, {"epoch": 1}, Phase.EVALUATION),
        (EventKind.EVALUATED, 1, {"step": 5, "metrics": {}}, Phase.STEP),
        # an evaluation with a hook after it
        (EventKind.EPOCH_COMPLETED, 1, {"epoch": 1, "rests": True}, Phase.EVALUATION),
        (EventKind.EVALUATED, 1, {"step": 5, "rests": True}, Phase.EVALUATION),
        (EventKind.EPOCH_HOOK_DONE, 1, {"epoch": 1}, Phase.STEP),
        (EventKind.METRICS, 1, points(6), Phase.STEP),
        # the next step follows at once
        (EventKind.EPOCH_COMPLETED, 1, {"epoch": 2, "rests": False}, Phase.STEP),
        (EventKind.ATTEMPT_STARTED, 2, {}, Phase.START),
        (EventKind.METRICS, 1, points(6), Phase.START),  # late, of the attempt before
        (EventKind.TRAINING_STARTED, 2, {"total_steps": 7}, Phase.FIRST_STEP),
        (EventKind.METRICS, 2, points(7), Phase.FINISH),
    ]
    for kind, attempt, data, phase in story:
        tracker.note(kind, attempt, data)
        assert tracker.progress().phase is phase, (kind, attempt)
    assert tracker.progress().last_step == 7


def test_an_attempt_may_begin_with_what_takes_long() -> None:
    """With the evaluation that broke the one before it, or with the last save; its first step then
    still comes."""
    tracker = ProgressTracker()
    story: list[tuple[EventKind, int, dict[str, Any], Phase]] = [
        (EventKind.ATTEMPT_STARTED, 2, {}, Phase.START),
        (EventKind.RESTORED, 2, {"step": 4}, Phase.START),
        (EventKind.TRAINING_STARTED, 2, {"total_steps": 7, "rests": True}, Phase.EVALUATION),
        (EventKind.EVALUATED, 2, {"step": 4, "metrics": {}}, Phase.FIRST_STEP),
        (EventKind.METRICS, 2, points(5, 6, 7), Phase.FINISH),
        (EventKind.ATTEMPT_STARTED, 3, {}, Phase.START),
        (EventKind.RESTORED, 3, {"step": 7}, Phase.START),
        (EventKind.TRAINING_STARTED, 3, {"total_steps": 7}, Phase.FINISH),
        (EventKind.ATTEMPT_STARTED, 4, {}, Phase.START),
        # back to a checkpoint: it is not as far as the ones before it
        (EventKind.RESTORED, 4, {"step": 2}, Phase.START),
        (EventKind.TRAINING_STARTED, 4, {"total_steps": 7}, Phase.FIRST_STEP),
        (EventKind.METRICS, 4, points(3), Phase.STEP),
    ]
    for kind, attempt, data, phase in story:
        tracker.note(kind, attempt, data)
        assert tracker.progress().phase is phase, (kind, attempt)


def test_the_limit_learns_from_steps() -> None:
    tracker = ProgressTracker()
    tracker.note(EventKind.ATTEMPT_STARTED, 1, {})
    tracker.note(EventKind.METRICS, 1, points(*range(1, 11), step_s=30.0))
    watch = HangWatch(RecoverySettings(), None)
    assert tracker.progress().step_p99_s is None
    assert watch.limit_s(tracker.progress()) == 60.0
    tracker.note(EventKind.METRICS, 1, points(*range(11, 21), step_s=30.0))
    assert watch.limit_s(tracker.progress()) == 300.0
    assert HangWatch(RecoverySettings(), 5.0).limit_s(tracker.progress()) == 5.0


def test_standing_still_is_overdue_and_a_silent_journal_is_not() -> None:
    watch = HangWatch(RecoverySettings(), 10.0)
    still = AttemptProgress(attempt=1, phase=Phase.STEP, num_signs=7)
    assert [
        watch.overdue_s(still, now)
        for now in (100.0, 101.5, 103.0, 104.5, 106.0, 107.5, 109.0, 110.0)
    ] == [None] * 8
    assert watch.overdue_s(still, 110.5) == 10.5
    assert watch.overdue_s(AttemptProgress(attempt=1, phase=Phase.STEP, num_signs=8), 111.0) is None
    assert (
        watch.overdue_s(AttemptProgress(attempt=1, phase=Phase.STEP, num_signs=8), 140.0) is None
    ), "no reply for 29 s: nothing was seen"


def test_no_time_counts_while_what_ranks_tell_cannot_be_written() -> None:
    watch = HangWatch(RecoverySettings(), 10.0)
    told = AttemptProgress(attempt=1, phase=Phase.STEP, num_signs=7)
    unwritten = AttemptProgress(
        attempt=1, phase=Phase.STEP, num_signs=7, quiet_s=90.0, is_written=False
    )
    assert watch.overdue_s(told, 100.0) is None
    assert [watch.overdue_s(unwritten, 101.0 + now) for now in range(100)] == [None] * 100
    overdue = [watch.overdue_s(told, 200.0 + now) is not None for now in range(1, 15)]
    assert overdue == [now > 10 for now in range(1, 15)], "and it counts again from then on"


def test_only_signs_of_progress_that_are_not_written_stop_the_watch() -> None:
    tracker = ProgressTracker()
    tracker.note(EventKind.ATTEMPT_STARTED, 2, {})
    tracker.note_unwritten("rank-1.a002", [(EventKind.GPU_USE, 2)])
    tracker.note_unwritten("rank-0.a001", [(EventKind.METRICS, 1)])
    assert tracker.progress().is_written
    tracker.note_unwritten("rank-0.a002", [(EventKind.GPU_USE, 2), (EventKind.METRICS, 2)])
    tracker.note_written("controller")
    assert not tracker.progress().is_written
    tracker.note_written("rank-0.a002")
    assert tracker.progress().is_written
    tracker.note_unwritten("rank-0.a002", [(EventKind.METRICS, 2)])
    tracker.note(EventKind.ATTEMPT_STARTED, 3, {})
    assert tracker.progress().is_written, "that rank is gone"


def test_time_runs_from_the_last_sign_and_not_from_when_it_was_seen() -> None:
    watch = HangWatch(RecoverySettings(), 10.0)
    assert watch.overdue_s(AttemptProgress(attempt=1, phase=Phase.STEP, num_signs=6), 99.0) is None
    assert watch.due_at == 109.0
    last = AttemptProgress(attempt=1, phase=Phase.STEP, num_signs=7, quiet_s=0.8)
    assert watch.overdue_s(last, 100.0) is None
    assert watch.due_at == 109.2
    assert [
        watch.overdue_s(last, now) is None for now in (102.0, 104.0, 106.0, 108.0, 109.1, 109.3)
    ] == [True] * 5 + [False]


def test_the_tracker_tells_for_how_long_nothing_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    tracker = ProgressTracker()
    tracker.note(EventKind.ATTEMPT_STARTED, 1, {})
    tracker.note(EventKind.METRICS, 1, points(1))
    now = 53.0
    tracker.note(EventKind.GPU_USE, 1, {})
    assert tracker.progress().quiet_s == 3.0, "what threads tell beside training is no sign of life"
    tracker.note(EventKind.METRICS, 1, points(2))
    assert tracker.progress().quiet_s == 0.0


@pytest.mark.parametrize("quiet_poll_s", [0.2, 1.0, 2.0, 7.0])
def test_however_seldom_ranks_are_asked_a_hang_is_seen(quiet_poll_s: float) -> None:
    watch = HangWatch(RecoverySettings(quiet_poll_s=quiet_poll_s), 10.0)
    still = AttemptProgress(attempt=1, phase=Phase.STEP, num_signs=7)
    # a poll itself takes some time
    looks = [100.0 + 1.5 * quiet_poll_s * number for number in range(100)]
    overdue = [watch.overdue_s(still, now) is not None for now in looks]
    assert overdue == [now > 110.0 for now in looks]


HOUSE = Path(train_fn.__path__[0])
WAITS = re.compile(r"\b(work|store)\.wait\(|async_op=True")
"""Code of ours that waits for other ranks in C++, so that it is a stack's innermost frame."""


def test_every_file_of_ours_that_waits_for_other_ranks_is_known() -> None:
    waiting = [path for path in HOUSE.rglob("*.py") if WAITS.search(path.read_text())]
    assert len(waiting) >= 4, "what the loop waits by has another name now"
    for path in waiting:
        assert waits_for_others(f'  File "{path}", line 7, in f\n'), path
    ours = [part for part in WAITING_FILES if part.startswith("/train_fn/")]
    assert len(ours) == 12
    for part in ours:
        assert (HOUSE.parent / part[1:]).exists(), f"{part} was moved"


LOOP = '  File "/app/train_fn/loop.py", line 99, in run\n'
REDUCE = LOOP + '  File "/venv/torch/distributed/distributed_c10d.py", line 2900, in all_reduce\n'
BACKWARD = LOOP + '  File "/venv/torch/autograd/graph.py", line 800, in _engine_run_backward\n'
USER = LOOP + '  File "/home/me/task.py", line 7, in loss\n'


@pytest.mark.parametrize(
    ("phase", "hang_timeout_s", "said"),
    [
        (
            Phase.STEP,
            10.0,
            r"in phase step; the limit is 10 s \(.*hang_timeout_s is 10\)\. If a step",
        ),
        (
            Phase.STEP,
            None,
            r"the limit is 60 s \(recovery\.hang_timeout_s is not set\)\. If a step",
        ),
        (
            Phase.EVALUATION,
            10.0,
            r"limit is 3600 s \(.* is 10\)\. If an evaluation, or on_epoch_end,",
        ),
        (Phase.EVALUATION, 5000.0, r"the limit is 5000 s \(recovery\.hang_timeout_s is 5000\)"),
        (Phase.START, None, r"the limit is 600 s .* If the set-up of an attempt really"),
    ],
)
def test_a_hang_names_its_limit_and_the_setting_that_allows_more(
    phase: Phase, hang_timeout_s: float | None, said: str
) -> None:
    watch = HangWatch(RecoverySettings(), hang_timeout_s)
    reason = watch.reason(AttemptProgress(attempt=1, phase=phase), 12.84)
    assert reason.startswith("no sign of life for 12.8 s")
    assert re.search(said, reason), reason
    assert reason.endswith("really takes this long, set recovery.hang_timeout_s to more")


def test_who_waits_for_nobody_is_stuck() -> None:
    assert find_stuck({0: REDUCE, 1: USER, 2: BACKWARD}) == [1]
    assert find_stuck({0: REDUCE, 1: None, 2: USER}) == [1], "who does not answer comes first"


def test_where_all_wait_for_each_other_the_last_is_given_up() -> None:
    assert find_stuck({0: REDUCE, 1: BACKWARD, 2: REDUCE}) == [2]


IN_A_COLLECTIVE = (
    'File "/x/train_fn/loop.py", line 9\nFile "/x/torch/distributed/distributed_c10d.py", line 3025'
)
WRITING = 'File "/x/train_fn/loop.py", line 9\nFile "/x/train_fn/snapshot.py", line 77'


def test_a_silent_rank_is_killed_where_another_waits_for_it_in_a_collective() -> None:
    asked_at = {0: 10.0, 1: 11.5, 2: 11.5}
    stacks: dict[int, str | None] = {1: IN_A_COLLECTIVE, 2: WRITING}
    assert find_silent(asked_at, stacks, [0, 1, 2], 12.0) == [0]
    assert find_silent(asked_at, stacks, [0, 2], 12.0) == [], (
        "rank 2 is on its way out, and waits for nobody"
    )
    assert find_silent(asked_at, stacks, [0], 12.0) == [], "nobody would be freed"
    assert find_silent(asked_at, stacks, [0, 1, 2], 11.4) == [], "it may yet answer"
    assert find_silent(asked_at, stacks, [0, 1, 2], 12.0, ABORTING_SILENT_S) == [], "it aborts"
    assert find_silent(asked_at, stacks, [0, 1, 2], 21.0, ABORTING_SILENT_S) == [0]
    closing: dict[int, str | None] = {
        1: 'File "/x/train_fn/loop.py", line 9, in leave\n    gc.collect()\n'
    }
    assert find_silent(asked_at, closing, [0, 1], 12.0) == [0]
    assert find_silent(asked_at | {1: 10.0}, stacks, [0, 1, 2], 12.0) == [], (
        "no rank that answers is held up"
    )


def test_an_attempt_moves_when_its_steps_were_done_not_when_they_are_told() -> None:
    def done(step: int, at: float) -> dict[str, Any]:
        return {"points": [{"step": step, "at": at, "values": {}}]}

    tracker = ProgressTracker()
    assert tracker.progress().moved_at is None
    story: list[tuple[EventKind, int, dict[str, Any], float, float]] = [
        (EventKind.ATTEMPT_STARTED, 1, {}, 10.0, 10.0),
        (EventKind.TRAINING_STARTED, 1, {"total_steps": 70}, 11.0, 11.0),
        (EventKind.METRICS, 1, done(5, 20.0), 25.0, 20.0),
        (EventKind.GPU_USE, 1, {}, 60.0, 20.0),
        (EventKind.CHECKPOINT_COMMITTED, 1, {"step": 5}, 61.0, 20.0),
        (EventKind.EVALUATED, 1, {"step": 5}, 62.0, 62.0),
        (EventKind.METRICS, 1, done(4, 19.0), 63.0, 62.0),
        (EventKind.ATTEMPT_STARTED, 2, {}, 80.0, 80.0),
        (EventKind.METRICS, 1, done(6, 90.0), 91.0, 80.0),
    ]
    for kind, attempt, data, at, moved_at in story:
        tracker.note(kind, attempt, data, at)
        assert tracker.progress().moved_at == moved_at, kind


@pytest.mark.parametrize(
    ("waiting", "may_leave"),
    [
        ([0], True),
        ([1], False),
        ([0, 1], True),
        ([2], False),
        ([3], False),
        ([], False),
    ],
)
def test_a_rank_may_still_leave_while_it_answers_and_waits_for_nobody(
    waiting: list[int], may_leave: bool
) -> None:
    stacks = {0: USER, 1: IN_A_COLLECTIVE, 2: None}
    assert may_still_leave(stacks, waiting) is may_leave
