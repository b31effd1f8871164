"""The start of a group is given up when it takes too long or a rank is stopped, and not before."""

from __future__ import annotations

import threading

import pytest

from train_fn.ray_train.group import patience
from train_fn.ray_train.group.patience import watched_start
from train_fn.recovery.evidence import RankReport

WAITING = RankReport(0, "a", 100, still_running=True)
STOPPED = RankReport(1, "b", 101, unresponsive=True)


class Watched:
    """A start that lasts until it is given up, 10 s at most, and the reports that ended it."""

    def __init__(self, limit_s: float, *found: RankReport) -> None:
        self.reports: tuple[RankReport, ...] | None = None
        self.num_looks = 0
        self._found = found
        given_up = threading.Event()

        def give_up(reports: tuple[RankReport, ...]) -> None:
            self.reports = reports
            given_up.set()

        with watched_start(limit_s, self._look, give_up):
            self.was_given_up = given_up.wait(10)

    def _look(self) -> tuple[RankReport, ...]:
        self.num_looks += 1
        return self._found


def test_a_start_that_takes_too_long_is_given_up() -> None:
    watched = Watched(0.1, WAITING)
    assert watched.was_given_up and watched.reports == (WAITING,)


def test_a_stopped_rank_ends_the_start_before_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_LOOK_S", 0.05)
    watched = Watched(600.0, WAITING, STOPPED)
    assert watched.was_given_up and watched.reports == (WAITING, STOPPED)
    assert watched.num_looks == 1


def test_a_rank_that_is_gone_ends_the_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_LOOK_S", 0.05)
    assert Watched(600.0, WAITING, RankReport(1, "b", 101, died=True)).was_given_up


def test_a_start_that_has_ended_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a check that was under way when it ended."""
    monkeypatch.setattr(patience, "_LOOK_S", 0.05)
    looking, ended = threading.Event(), threading.Event()
    given_up: list[tuple[RankReport, ...]] = []

    def look() -> tuple[RankReport, ...]:
        looking.set()
        ended.wait(10)
        return (STOPPED,)

    with watched_start(600.0, look, given_up.append):
        [watch] = [thread for thread in threading.enumerate() if thread.name == "start-watch"]
        assert looking.wait(10)
    ended.set()
    watch.join(10)
    assert not watch.is_alive() and given_up == []
