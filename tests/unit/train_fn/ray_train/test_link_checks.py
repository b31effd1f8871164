"""Bytes between nodes that an earlier attempt could not pass: real sockets on addresses of this
machine, as of several hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.node import network
from train_fn.ray_train.group import node_checks
from train_fn.ray_train.group.end import with_unheard
from train_fn.ray_train.group.node_checks import (
    MOST_NODES,
    LinkChecks,
    LinksBroken,
    link_reports,
)
from train_fn.recovery.evidence import RankReport, describe_error
from train_fn.recovery.links import Pair
from train_fn.recovery.settings import RecoverySettings


class Node:
    """An actor of a node. ``deaf_to`` are addresses from which no bytes arrive."""

    def __init__(self, ip: str, deaf_to: set[str], passed: list[tuple[str, str]]) -> None:
        self._ip, self._deaf_to, self._passed = ip, deaf_to, passed
        self.take_in = _remote(network.take_in)
        self.pass_time = _remote(self._pass)
        self.nodes: dict[str, Node] = {}

    def _pass(self, address: tuple[str, int], timeout_s: float) -> float | None:
        self._passed.append((self._ip, address[0]))
        if self._ip in self.nodes[address[0]]._deaf_to:
            return None
        return network.pass_time(address, timeout_s)


def _remote(function: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=lambda *arguments: function(*arguments))


class Group:
    """Nodes ``n1`` to ``nN``, each with its address."""

    def __init__(self, count: int) -> None:
        self.passed: list[tuple[str, str]] = []
        self.left_out: list[str] = []
        self.actors = [Node(f"127.0.0.{n + 1}", set(), self.passed) for n in range(count)]
        self.metas = [
            SimpleNamespace(node_id=f"n{n + 1}", node_ip=f"127.0.0.{n + 1}", pid=n)
            for n in range(count)
        ]
        for actor in self.actors:
            actor.nodes = {each._ip: each for each in self.actors}
        self.checks = LinkChecks(RecoverySettings(), self.left_out.extend)

    def deafen(self, listener: int, speaker: int) -> None:
        self.actors[listener - 1]._deaf_to.add(f"127.0.0.{speaker}")

    def run(self) -> None:
        self.checks.run(self.actors, self.metas)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(node_checks, "prepared", lambda calls, settings: list(calls))
    yield


def pair(one: int, other: int) -> Pair:
    return frozenset((f"n{one}", f"n{other}"))


def test_nothing_is_checked_that_nobody_suspects() -> None:
    group = Group(3)
    group.deafen(1, 2)
    group.run()
    assert group.passed == []


def test_a_suspect_pair_passes_bytes_in_both_directions_and_is_suspect_no_more() -> None:
    group = Group(3)
    group.checks.suspect(frozenset({pair(1, 3)}))
    group.run()
    assert sorted(group.passed) == [("127.0.0.1", "127.0.0.3"), ("127.0.0.3", "127.0.0.1")]
    group.run()
    assert len(group.passed) == 2 and group.left_out == []


@pytest.mark.parametrize(("listener", "speaker"), [(1, 3), (3, 1)])
def test_a_path_that_is_broken_in_one_direction_excludes_one_of_the_two(
    listener: int, speaker: int
) -> None:
    group = Group(3)
    group.deafen(listener, speaker)
    group.checks.suspect(frozenset({pair(1, 3)}))
    for _ in range(2):
        with pytest.raises(LinksBroken, match="nodes n1 and n3 do not hear each other") as raised:
            group.run()
    assert group.left_out == ["n3", "n3"], "it stays suspect"
    assert raised.value.unheard == {f"n{listener}": (f"n{speaker}",)}
    reports = link_reports(raised.value, group.metas)
    assert {report.node_id: report.unheard for report in reports} == {
        "n1": (f"n{speaker}",) if listener == 1 else (),
        "n2": (),
        "n3": (f"n{speaker}",) if listener == 3 else (),
    }
    assert "MTU" in str(raised.value) and "firewall" in str(raised.value)


def test_where_nobody_knows_which_pair_failed_all_are_checked_and_the_common_node_is_excluded() -> (
    None
):
    group = Group(4)
    for other in (1, 3, 4):
        group.deafen(other, 2)
    group.checks.suspect(frozenset())
    with pytest.raises(LinksBroken):
        group.run()
    assert len(group.passed) == 4 * 3 and group.left_out == ["n2"]


def test_of_a_large_group_each_node_and_the_next_are_checked() -> None:
    group = Group(MOST_NODES + 1)
    group.checks.suspect(frozenset())
    group.run()
    assert len(group.passed) == 2 * (MOST_NODES + 1)


def test_nodes_that_share_a_machine_have_no_path_between_them() -> None:
    group = Group(2)
    group.metas[1].node_ip = group.metas[0].node_ip
    group.checks.suspect(frozenset())
    group.run()
    assert group.passed == []


def test_addresses_that_a_rank_did_not_hear_become_nodes() -> None:
    error = dataclasses.replace(
        describe_error(RuntimeError("gloo"), 0), unheard=("10.0.0.2", "10.0.0.9", "10.0.0.3")
    )
    reports = (RankReport(0, "a", 1, error=error), RankReport(1, "b", 1))
    ips = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "10.0.0.3"}
    heard = with_unheard(reports, ips)
    assert [report.unheard for report in heard] == [("b",), ()], "c and d share an address"
