"""How long a group that failed is waited for."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train.group import end as group_end
from train_fn.ray_train.group.end import GroupShutdown, hold_for
from train_fn.ray_train.worker_actor import RankEnd
from train_fn.recovery.evidence import RankReport, StepFailed, describe_error
from train_fn.recovery.sizing import NodeView

BUSY = 'File "/home/me/task.py", line 3, in loss\n    slow()\n'
IN_A_COLLECTIVE = 'File "/site/torch/distributed/distributed_c10d.py", line 9, in wait\n'


def test_ranks_are_waited_for_by_the_size_of_what_they_leave() -> None:
    assert hold_for(20.0, 0) == 20.0
    assert hold_for(20.0, 4 << 20) == pytest.approx(20.0, abs=0.1)
    # 24 GB take an estimated 30 to 50 s: two copies, two digests and a file
    assert hold_for(20.0, 24_000_000_000) == pytest.approx(100.0)


class Answer:
    """A new object for each call, like Ray's references. A rank without an end never answers."""

    def __init__(self, group: Group, end: Any) -> None:
        self._group, self._end = group, end
        self.answers = end is not None

    def __call__(self) -> RankEnd:
        end: RankEnd = self._end(self._group.now)
        return end


class Group:
    """Ranks that answer at once, with what the test says, while a clock goes on by 0.1 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Any) -> None:
        self.now = 0.0
        self._ends = ends
        fake = SimpleNamespace(kill=lambda actor: None, wait=self._wait, get=lambda ref: ref())
        monkeypatch.setattr(group_end, "ray", fake)
        monkeypatch.setattr(group_end, "wake_stopped", lambda places: set())
        monkeypatch.setattr(group_end, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], Any]:
        self.now += 0.1
        return [ref for ref in refs if ref.answers], []

    def reports(self, **patience: Any) -> tuple[RankReport, ...]:
        workers: Any = [
            SimpleNamespace(
                actor=SimpleNamespace(
                    abandon=SimpleNamespace(remote=lambda: None),
                    wait_for_end=SimpleNamespace(remote=lambda _, end=end: Answer(self, end)),
                ),
                metadata=SimpleNamespace(node_id="a", pid=rank),
            )
            for rank, end in enumerate(self._ends)
        ]
        nodes = (NodeView("a", "10.0.0.1", 1, {}, {}),)
        made = GroupShutdown(workers, lambda: nodes, {}, end=lambda actor: None)
        return made.reports_within(20.0, **patience)


def leaves_at(end: float, left: int | None = 7, stack: str = BUSY) -> Any:
    found = describe_error(ConnectionError("gloo closed"), 0)
    error = StepFailed(dataclasses.replace(found, snapshot_step=left))

    def look(now: float) -> RankEnd:
        if now < end:
            return RankEnd(False, None, stack)
        return RankEnd(True, error)

    return look


def test_the_last_state_is_waited_for_while_its_rank_may_still_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [report] = Group(monkeypatch, leaves_at(100.0)).reports(patience_s=lambda: 600.0)
    assert report.left_step == 7


@pytest.mark.parametrize(
    ("ends", "patience_s", "until"),
    [
        ([leaves_at(100.0)], 0.0, 20.0),  # it is overdue, or the run is to stop
        ([leaves_at(100.0, stack=IN_A_COLLECTIVE)], 600.0, 20.0),  # it cannot leave
        ([leaves_at(100.0), leaves_at(1.0)], 600.0, 4.0),  # another one has left a state
        ([leaves_at(100.0), leaves_at(1.0, left=None)], 600.0, 100.0),  # which was torn
    ],
)
def test_otherwise_nobody_waits_for_long(
    ends: list[Any], patience_s: float, until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(monkeypatch, *ends)
    reports = group.reports(patience_s=lambda: patience_s)
    assert group.now == pytest.approx(until, abs=1.5)
    assert reports[0].still_running == (until < 100.0)


def test_a_rank_that_does_not_answer_is_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, other = Group(monkeypatch, leaves_at(1.0), None).reports()
    assert left.left_step == 7
    assert other.still_running and not other.died
