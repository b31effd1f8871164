"""The ladder of a start: processes of earlier ranks, then fresh ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train.group.factory import GroupFactory, StayedStarts
from train_fn.ray_train.ray_internals import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from train_fn.recovery.evidence import RankReport

SURVIVOR = SimpleNamespace(name="a survivor")
FAILED = WorkerGroupStartupFailedError("a rank's process did not start: it is gone")


class Factory:
    """A factory whose starts fail or not, and what it did."""

    def __init__(
        self,
        first: Exception | None,
        *,
        survivors: tuple[Any, ...] = (SURVIVOR,),
        reports: tuple[RankReport, ...] = (),
        is_refused: bool = False,
    ) -> None:
        self.starts: list[list[Any]] = []
        self.fell_back: list[str] = []
        self._first = first
        self.factory: Any = SimpleNamespace(
            survivors=SimpleNamespace(take=lambda: list(survivors)),
            _start=self._start,
            _starts=StayedStarts(),
            _attempt_log=SimpleNamespace(fell_back=self.fell_back.append),
            _falls_back=lambda exc: GroupFactory._falls_back(self.factory, exc),
            last=SimpleNamespace(start_reports=reports, is_refused=is_refused),
        )

    def _start(self, survivors: list[Any], **kwargs: Any) -> str:
        self.starts.append(survivors)
        if len(self.starts) == 1 and self._first is not None:
            raise self._first
        return f"group {len(self.starts)}"

    def create(self) -> Any:
        return GroupFactory.create(self.factory)


def test_survivors_serve_the_next_attempt_once() -> None:
    made = Factory(None)
    assert made.create() == "group 1"
    assert made.starts == [[SURVIVOR]] and made.fell_back == []


@pytest.mark.parametrize(
    "reports", [(), (RankReport(0, "a", 1, died=True), RankReport(1, "b", 2, unresponsive=True))]
)
def test_a_start_that_fails_there_is_made_again_in_fresh_processes(reports: Any) -> None:
    made = Factory(FAILED, reports=reports)
    assert made.create() == "group 2"
    assert made.starts == [[SURVIVOR], []]
    assert made.fell_back == [
        "ranks could not start there: a rank's process did not start: it is gone"
    ]


@pytest.mark.parametrize(
    ("first", "facts"),
    [
        (FAILED, {"reports": (RankReport(1, "b", 2, node_alive=False, died=True),)}),
        (FAILED, {"is_refused": True}),
        (WorkerGroupStartupTimeoutError(2), {}),
        (FAILED, {"survivors": ()}),
    ],
    ids=["a node is gone", "a check refused a node", "no room", "fresh processes"],
)
def test_a_start_that_fails_for_another_reason_is_judged(first: Exception, facts: Any) -> None:
    made = Factory(first, **facts)
    with pytest.raises(type(first)):
        made.create()
    assert len(made.starts) == 1 and made.fell_back == []


def test_the_limit_of_a_start_is_learned() -> None:
    starts = StayedStarts()
    assert starts.limit_s == StayedStarts.FIRST_S
    starts.note(0.2)
    assert starts.limit_s == StayedStarts.LEAST_S
    starts.note(8.0)
    assert starts.limit_s == 40.0
    for _ in range(10):
        starts.note(0.2)
    assert starts.limit_s == StayedStarts.LEAST_S, "one slow start does not count forever"
