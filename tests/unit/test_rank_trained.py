"""Until when the controller need not ask a rank often."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from train_fn import worker


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    worker._trained.clear()
    yield
    worker._trained.clear()


def waiting_for(training: threading.Thread) -> threading.Thread:
    waiting = threading.Thread(target=worker.wait_until_trained, args=(training,))
    waiting.start()
    return waiting


def test_a_rank_that_has_trained_is_asked_though_its_thread_goes_on() -> None:
    reported = threading.Event()
    training = threading.Thread(target=reported.wait)
    training.start()
    waiting = waiting_for(training)
    waiting.join(0.1)
    assert waiting.is_alive(), "it trains"
    worker._trained.set()  # as the rank does before it waits for its reports
    waiting.join(20)
    assert not waiting.is_alive() and training.is_alive()
    reported.set()
    training.join(20)


def test_a_rank_whose_thread_ends_otherwise_is_asked_too() -> None:
    training = threading.Thread(target=lambda: None)
    training.start()
    waiting = waiting_for(training)
    waiting.join(20)
    assert not waiting.is_alive()
