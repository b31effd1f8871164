"""What a rank tells the controller by itself, so that it need not be asked often."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from train_fn.ray_train import rank_process


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    for event in (rank_process._news, rank_process._trained):
        event.clear()
    yield
    for event in (rank_process._news, rank_process._trained):
        event.clear()


class Waiting:
    """A call of ``wait_for_news``, and what it returned."""

    def __init__(self) -> None:
        self.has_trained: bool | None = None
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        self.has_trained = rank_process.wait_for_news()

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def test_every_report_is_told_once_and_the_rank_trains_on() -> None:
    for _ in range(3):
        waiting = Waiting()
        assert not waiting.ends_within(0.1), "nothing to take"
        rank_process.note_report()  # as with every report
        assert waiting.ends_within(20) and waiting.has_trained is False


def test_a_report_that_comes_while_nobody_waits_is_told_to_who_waits_next() -> None:
    rank_process.note_report()
    waiting = Waiting()
    assert waiting.ends_within(20) and waiting.has_trained is False


def test_a_rank_that_has_trained_is_asked_though_its_thread_goes_on() -> None:
    reported = threading.Event()
    training = threading.Thread(target=reported.wait)
    training.start()
    rank_process.report_end_of(training)
    waiting = Waiting()
    assert not waiting.ends_within(0.1), "it trains"
    rank_process.note_trained()  # as the rank does before it waits for its reports
    assert waiting.ends_within(20) and waiting.has_trained and training.is_alive()
    reported.set()
    training.join(20)


def test_a_rank_whose_thread_ends_otherwise_is_asked_too() -> None:
    training = threading.Thread(target=lambda: None)
    training.start()
    rank_process.report_end_of(training)
    waiting = Waiting()
    assert waiting.ends_within(20) and waiting.has_trained


def test_a_rank_that_lets_go_answers_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort may take long; its rank must not be taken for stopped."""
    begun, ended = threading.Event(), threading.Event()

    def abort() -> None:
        begun.set()
        ended.wait(30)

    monkeypatch.setattr(rank_process, "abort_collectives", abort)
    rank_process.abandon()
    assert begun.wait(10), "in a thread of its own"
    ended.set()
