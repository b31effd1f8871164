"""When a dead node is started again."""

from __future__ import annotations

from service.embedded.supervisor import FORGET_S, LONGEST_S, RETRY_S, NodeReturns


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(return_s: float = 15.0) -> tuple[NodeReturns, Clock]:
    clock = Clock()
    return NodeReturns(return_s, clock, lambda: clock.now + 1e9), clock


def test_a_node_that_keeps_dying_waits_longer_each_time() -> None:
    returns, clock = made()
    waits = []
    for _ in range(7):
        wait_s = returns.died(1)
        assert wait_s is not None
        waits.append(wait_s)
        clock.now += 1
        returns.tried(1, is_up=True)
    assert waits == [15, 30, 60, 120, 240, LONGEST_S, LONGEST_S]
    assert returns.died(2) == 15, "another node has its own count"
    clock.now += FORGET_S
    assert returns.died(1) == 15


def test_it_is_due_when_its_time_has_come_and_tried_again_if_it_does_not_start() -> None:
    returns, clock = made()
    returns.died(2)
    clock.now += 5
    returns.died(1)
    assert returns.due() == [] and returns.next_in_s() == 10
    assert returns.at() == (1e9 + 1015, 1e9 + 1020)
    clock.now += 10
    assert returns.due() == [2] and returns.next_in_s() == 0
    returns.tried(2, is_up=False)
    assert returns.due() == []
    clock.now += RETRY_S
    assert returns.due() == [1, 2]
    for slot in (1, 2):
        returns.tried(slot, is_up=True)
    assert (returns.due(), returns.at(), returns.next_in_s()) == ([], (), float("inf"))
