"""Which missed polls are a lost rank, and which a network that fails for a while."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from train_fn.ray_train.group import patience
from train_fn.ray_train.group.patience import PollPatience
from train_fn.ray_train.group.worker_group import EverstepWorkerGroup
from train_fn.ray_train.ray_internals import (
    WorkerGroup,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
    WorkerStatus,
)
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView

HEAD = NodeView("head", "10.0.0.1", 1, {}, {}, is_head=True)
UP = NodeView("up", "10.0.0.2", 1, {"CPU": 1.0}, {"CPU": 1.0})
SILENT = dataclasses.replace(UP, reachable=False, silent=True)
REFUSING = dataclasses.replace(UP, reachable=False)


def on(node: NodeView, node_id: str) -> NodeView:
    return dataclasses.replace(node, node_id=node_id)


def unavailable() -> Any:
    failure = ActorUnavailableError("the connection broke", b"0" * 16)
    return WorkerStatus(
        running=False, error=WorkerHealthCheckFailedError("missed", failure=failure)
    )


def overdue() -> Any:
    return WorkerStatus(running=True, error=WorkerHealthCheckTimeoutError("hangs"))


class Polls:
    """A group of ranks on nodes ``a``, ``b``, … whose polls answer what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.statuses: list[Any] = []
        self.nodes: tuple[NodeView, ...] = ()
        self.group: Any = EverstepWorkerGroup.__new__(EverstepWorkerGroup)
        self.group._patience = PollPatience(
            lambda: (HEAD, *self.nodes), RecoverySettings().health_timeout_s
        )
        self.group._world_rank_to_ongoing_poll = {}
        self.group.get_workers = lambda: [
            SimpleNamespace(metadata=SimpleNamespace(node_id=n, pid=ord(n)))
            for n in "ab"[: len(self.statuses)]
        ]
        monkeypatch.setattr(
            WorkerGroup,
            "_poll_workers_and_collect_errors",
            lambda _group, _timeout: list(self.statuses),
        )
        monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: self.now))

    def errors(self) -> list[bool]:
        return [
            status.error is not None for status in self.group._poll_workers_and_collect_errors(0.2)
        ]


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    return Polls(monkeypatch)


def test_a_rank_that_cannot_be_called_is_called_again_while_its_node_answers(polls: Polls) -> None:
    polls.nodes, polls.statuses = (
        (on(UP, "a"), on(UP, "b")),
        [unavailable(), WorkerStatus(running=True)],
    )
    assert polls.errors() == [False, False]
    polls.now = 59.0
    assert polls.errors() == [False, False]
    polls.now = 60.0
    assert polls.errors() == [True, False]


def test_an_answer_begins_its_time_anew(polls: Polls) -> None:
    polls.nodes = (on(UP, "a"),)
    for polls.now, status in (
        (0.0, unavailable()),
        (50.0, WorkerStatus(running=True)),
        (70.0, unavailable()),
        (100.0, unavailable()),
    ):
        polls.statuses = [status]
        assert polls.errors() == [False]


def test_a_node_that_refuses_has_lost_its_rank_at_once(polls: Polls) -> None:
    polls.nodes, polls.statuses = (on(REFUSING, "a"),), [unavailable()]
    assert polls.errors() == [True]


def test_a_rank_that_hangs_on_a_node_that_answers_is_not_waited_for(polls: Polls) -> None:
    polls.nodes, polls.statuses = (
        (on(UP, "a"), on(UP, "b")),
        [overdue(), WorkerStatus(running=True)],
    )
    polls.group._world_rank_to_ongoing_poll = {0: SimpleNamespace(start_time=0.0)}
    assert polls.errors() == [True, False]


def test_who_hears_no_host_at_all_leaves_the_ranks_alone_however_long(polls: Polls) -> None:
    polls.nodes, polls.statuses = (on(SILENT, "a"), on(SILENT, "b")), [overdue(), unavailable()]
    for polls.now in (0.0, 100.0, 1000.0):
        polls.group._world_rank_to_ongoing_poll = {0: SimpleNamespace(start_time=0.0)}
        assert polls.errors() == [False, False]
        assert polls.group._world_rank_to_ongoing_poll == {}, (
            "the next poll is a new one, with its own time"
        )


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        ((on(SILENT, "a"), on(SILENT, "b"), on(UP, "c")), "another host is heard"),
        ((on(SILENT, "a"), on(REFUSING, "b")), "a host refuses, which is a word as well"),
        ((on(SILENT, "a"),), "the cluster has declared the other node dead"),
        ((), "the cluster has declared both dead"),
    ],
)
def test_hosts_that_are_lost_while_others_are_heard_are_lost(
    nodes: tuple[NodeView, ...], what: str, polls: Polls
) -> None:
    polls.nodes, polls.statuses = nodes, [overdue(), overdue()]
    polls.group._world_rank_to_ongoing_poll = {
        0: SimpleNamespace(start_time=0.0),
        1: SimpleNamespace(start_time=0.0),
    }
    assert polls.errors() == [True, True], what
