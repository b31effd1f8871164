"""A state that stays in its process between two attempts."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from train_fn.snapshots import store


class State:
    def __init__(self, step: int, problem: str | None = None, *, is_large: bool = False) -> None:
        self.step, self.is_large = step, is_large
        self.num_written = 0
        self._problem = problem

    def leave(self, superseded: threading.Event | None = None) -> str | None:
        self.num_written += 1
        return self._problem


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    store.drop()
    yield
    store.drop()


def test_a_state_is_taken_once() -> None:
    state = State(7)
    store.keep(state)
    assert store.kept_step() == 7
    assert store.take() is state
    assert store.take() is None and store.kept_step() is None
    assert store.leave_kept_state() is None and state.num_written == 0


def test_a_state_that_is_insured_stays_and_one_that_is_left_does_not() -> None:
    state = State(7, "no room")
    store.keep(state)
    assert store.insure() == "no room" and store.kept_step() == 7
    assert store.leave_kept_state() == "no room" and store.kept_step() is None
    assert state.num_written == 2 and store.insure() is None


def test_whoever_takes_a_state_waits_until_it_is_written() -> None:
    """Training changes it, and the snapshot would be of two steps."""
    writing, may_end, order = threading.Event(), threading.Event(), []

    class Slow(State):
        def leave(self, superseded: threading.Event | None = None) -> str | None:
            writing.set()
            assert may_end.wait(20)
            order.append("written")
            return None

    store.keep(Slow(7))
    insuring = threading.Thread(target=store.insure)
    insuring.start()
    assert writing.wait(20)
    taking = threading.Thread(target=lambda: (store.take(), order.append("taken")))
    taking.start()
    taking.join(0.1)
    assert taking.is_alive() and store.kept_step() == 7, "who only asks does not wait"
    may_end.set()
    taking.join(20)
    insuring.join(20)
    assert order == ["written", "taken"]


def test_a_large_state_is_written_at_a_bounded_rate_once_the_next_attempt_has_it() -> None:
    assert store.pause_s(0.5, is_taken=False) == 0
    spent_s = 0.5
    paused_s = store.pause_s(spent_s, is_taken=True)
    assert spent_s / (spent_s + paused_s) == pytest.approx(store.BESIDE_SHARE)


def test_whoever_takes_a_large_state_at_once_ends_its_insurance_before_it_changes() -> None:
    writing, ended = threading.Event(), []

    class Large(State):
        def leave(self, superseded: threading.Event | None = None) -> str | None:
            writing.set()
            assert superseded is not None and superseded.wait(20)
            ended.append("written")
            return None

    state = Large(7, is_large=True)
    store.keep(state)
    insuring = threading.Thread(target=store.insure)
    insuring.start()
    assert writing.wait(20)
    assert store.take(waits=False) is state and not ended, "the next attempt does not wait"
    store.supersede()
    assert ended == ["written"], "nobody reads the state any more"
    insuring.join(20)
    store.keep(again := State(8))
    assert store.insure() is None and again.num_written == 1, "the next one is insured again"
