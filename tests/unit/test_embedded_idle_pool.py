"""When the embedded cluster starts idle workers, and when it leaves the CPU to others."""

from __future__ import annotations

from service.embedded.idle_pool import ASK_AGAIN_S, CALM_S, SETTLE_S, IdlePool, Workers
from service.embedded.note import NodeNote

HEAD = NodeNote("head", is_head=True, slot=0, raylet_pid=1, raylet_started_at=0.0, port=1, pids=(1,))
NODE = NodeNote("n1", is_head=False, slot=1, raylet_pid=2, raylet_started_at=0.0, port=2, pids=(2,))


class Nodes:
    def __init__(self) -> None:
        self.idle = {1: 0, 2: 1}
        self.training = False
        self.pool = IdlePool(lambda node: 2 if node.is_head else 1, lambda _: Workers(self.idle, self.training))

    def wanted(self, now: float) -> list[tuple[str, int]]:
        return [(node.node_id, count) for node, count in self.pool.wanted([HEAD, NODE], now)]


def test_a_new_node_gets_its_idle_workers_at_once() -> None:
    nodes = Nodes()
    assert nodes.wanted(0.0) == [("head", 2)]
    assert nodes.wanted(1.0) == [], "they are importing"
    assert nodes.wanted(ASK_AGAIN_S) == [("head", 2)], "they never came"


def test_what_is_taken_is_replaced_after_a_while() -> None:
    nodes = Nodes()
    nodes.idle = {1: 2, 2: 1}
    assert nodes.wanted(0.0) == []
    nodes.idle = {1: 2, 2: 0}
    assert nodes.wanted(10.0) == []
    nodes.idle = {1: 2, 2: 1}
    assert nodes.wanted(12.0) == []
    nodes.idle = {1: 2, 2: 0}
    assert nodes.wanted(14.0) == [], "it came back meanwhile: the time counts anew"
    assert nodes.wanted(14.0 + SETTLE_S) == [("n1", 1)]


def test_enough_is_enough() -> None:
    nodes = Nodes()
    nodes.idle = {1: 5, 2: 3}
    assert nodes.wanted(0.0) == nodes.wanted(100.0) == []


def test_while_ranks_train_only_the_head_gets_one_at_first() -> None:
    nodes = Nodes()
    nodes.idle = {1: 2, 2: 1}
    assert nodes.wanted(0.0) == []
    nodes.idle, nodes.training = {1: 0, 2: 0}, True
    assert nodes.wanted(1.0) == []
    assert nodes.wanted(1.0 + SETTLE_S) == [("head", 1)]
    nodes.idle = {1: 1, 2: 0}
    assert nodes.wanted(2.0 + ASK_AGAIN_S + SETTLE_S) == []
    assert nodes.wanted(1.0 + CALM_S) == [("head", 1), ("n1", 1)]


def test_once_no_rank_trains_the_head_gets_all() -> None:
    nodes = Nodes()
    nodes.idle = {1: 2, 2: 1}
    assert nodes.wanted(0.0) == []
    nodes.idle, nodes.training = {1: 1, 2: 1}, True
    assert nodes.wanted(1.0) == nodes.wanted(20.0) == []
    nodes.training = False
    assert nodes.wanted(21.0) == [("head", 1)]
