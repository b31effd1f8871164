"""A group is asked once to exit, and then either exits, is forced to, or stays."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train.group import newcomers as newcomers_module
from train_fn.ray_train.group.newcomers import YieldRequest
from train_fn.recovery.settings import RecoverySettings


class Group:
    """Counts the requests, and notes the nodes that it was told to abandon."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.abandoned: list[Collection[str]] = []
        self.hands_over = False
        self.node_ids = ["a", "b"]

    def ask_to_yield(self, *, hands_over: bool) -> None:
        self.num_asked += 1
        self.hands_over = hands_over

    def ranks_outside(self, node_ids: Collection[str]) -> list[int]:
        return [rank for rank, node_id in enumerate(self.node_ids) if node_id not in node_ids]

    def abandon(self, node_ids: Collection[str]) -> list[int]:
        self.abandoned.append(node_ids)
        return [1]


class Turns:
    """Turns of the control loop at times that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, newcomers: Any = None) -> None:
        self.now = 100.0
        self.leave_by: float | None = None
        self.is_leaving = False
        self.sizes: Any = SimpleNamespace(
            wanted=None,
            draining=frozenset({"b"}),
            must_have_left=lambda now: self.leave_by is not None and self.leave_by <= now,
        )
        self.sizes.scaling_config = None
        attempt_log: Any = SimpleNamespace(world_size=2, attempt=4)
        self.group = Group()
        self.request = YieldRequest(
            RecoverySettings(yield_timeout_s=60.0),
            self.sizes,
            attempt_log,
            lambda: self.is_leaving,
            newcomers,
        )
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 1000.0 + self.now)
        monkeypatch.setattr(newcomers_module, "time", clock)

    def turn(self, now: float) -> None:
        self.now = now
        group: Any = self.group
        self.request.check(group)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(monkeypatch)


def test_a_group_is_asked_once_and_stays_if_it_does_not_exit_in_time(turns: Turns) -> None:
    turns.sizes.wanted = 3
    for now in (100.0, 130.0, 160.0):
        turns.turn(now)
        assert turns.group.num_asked == 1 and turns.sizes.wanted == 3
    turns.turn(160.1)
    assert turns.sizes.wanted is None and turns.group.abandoned == []
    assert (turns.request.asked, turns.request.asked_at) == (True, 1100.0), (
        "it may still exit because of that request"
    )
    turns.request.reset()
    assert not turns.request.asked
    turns.sizes.wanted = 3
    turns.turn(200.0)
    assert turns.group.num_asked == 2, "the next group is asked anew"


def test_ranks_of_a_run_that_goes_on_elsewhere_are_waited_for(turns: Turns) -> None:
    """The driver's watch ends the process in time."""
    turns.is_leaving = True
    turns.turn(100.0)
    turns.turn(10_000.0)
    turns.is_leaving, turns.sizes.wanted = False, 3
    assert turns.group.num_asked == 1
    turns.turn(10_001.0)
    assert turns.sizes.wanted is None, "the request was still pending"


def test_ranks_that_would_be_taken_away_with_their_node_are_killed_once(turns: Turns) -> None:
    turns.sizes.wanted, turns.leave_by = 1, 1120.0
    turns.turn(100.0)
    turns.turn(111.9)
    assert turns.group.abandoned == []
    for now in (112.0, 113.0):
        turns.turn(now)
        assert turns.group.abandoned == [frozenset({"b"})]


class Joining:
    """Is ready when the test says so."""

    def __init__(self) -> None:
        self.ready, self.asked_for = False, list[tuple[int, int]]()
        self.ended = self.dismissed = 0

    def are_ready(self, num_workers: int, scaling: object, attempt: int) -> bool:
        self.asked_for.append((num_workers, attempt))
        return self.ready

    def end(self) -> None:
        self.ended += 1

    def dismiss(self) -> None:
        self.dismissed += 1


@pytest.mark.parametrize(("draining", "wanted"), [("", 2), ("", 1), ("b", 1)])
def test_ranks_that_make_room_do_not_wait_for_those_that_were_to_join(
    draining: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomers = Joining()
    turns = Turns(monkeypatch, newcomers)
    turns.sizes.wanted, turns.sizes.draining = 3, frozenset()
    turns.turn(100.0)
    turns.sizes.wanted, turns.sizes.draining = wanted, frozenset(draining)
    turns.turn(101.0)
    assert (turns.group.num_asked, newcomers.dismissed) == (1, 1)


def test_ranks_of_a_node_that_goes_soon_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, Joining())
    turns.sizes.wanted, turns.leave_by = 2, 1120.0
    turns.turn(103.0)
    assert turns.group.num_asked == 0
    turns.turn(104.0)
    assert turns.group.num_asked == 1 and turns.group.hands_over


def test_ranks_save_if_all_their_nodes_are_drained_after_they_were_asked_to_hand_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newcomers = Joining()
    newcomers.ready = True
    turns = Turns(monkeypatch, newcomers)
    turns.sizes.wanted, asked = 3, []
    for draining in ("", "a", "ab", "ab"):
        turns.sizes.draining = frozenset(draining)
        turns.turn(100.0)
        asked.append((turns.group.num_asked, turns.group.hands_over))
    assert asked == [(1, True), (1, True), (2, False), (2, False)]


@pytest.mark.parametrize("case", ["the driver is gone", "all nodes go", "new processes"])
def test_ranks_save_where_no_process_of_theirs_goes_on(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomers = None if case == "new processes" else Joining()
    turns = Turns(monkeypatch, newcomers)
    if newcomers is not None:
        newcomers.ready = True
    turns.sizes.wanted, turns.is_leaving = 1, case == "the driver is gone"
    if case == "all nodes go":
        turns.sizes.draining = frozenset({"a", "b"})
    turns.turn(100.0)
    assert turns.group.num_asked == 1 and not turns.group.hands_over
