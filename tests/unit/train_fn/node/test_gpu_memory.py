"""A rank's wait for the memory of those that died on its GPU before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from train_fn.node import memory
from train_fn.node.memory import wait_for_free_memory

CUDA = torch.device("cuda", 0)
TOTAL = 80 << 30


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(memory, "time", clock)
    return clock


def waited(clock: Clock, free: Callable[[float], float]) -> float:
    """Seconds until the rank goes on; ``free`` gives the share of the memory after some seconds."""
    began = clock.now
    wait_for_free_memory(CUDA, lambda device: (int(free(clock.now - began) * TOTAL), TOTAL))
    return clock.now - began


def test_an_empty_gpu_is_not_waited_for(clock: Clock) -> None:
    assert waited(clock, lambda seconds: 0.99) == 0


def test_memory_that_is_being_freed_is_waited_for(clock: Clock) -> None:
    assert waited(clock, lambda seconds: 0.2 + 0.1 * seconds) == pytest.approx(7.5, abs=0.3)


def test_memory_that_somebody_keeps_is_not(clock: Clock) -> None:
    assert waited(clock, lambda seconds: 0.5) == pytest.approx(2, abs=0.3)
    assert waited(clock, lambda seconds: min(0.2 + 0.1 * seconds, 0.5)) == pytest.approx(5, abs=0.3)


def test_the_wait_has_an_end(clock: Clock) -> None:
    assert waited(clock, lambda seconds: 0.1 + 0.001 * seconds) == pytest.approx(30, abs=0.3)


def test_on_a_cpu_nothing_is_waited_for() -> None:
    def refuse(device: torch.device) -> tuple[int, int]:
        raise AssertionError("looked at a GPU")

    wait_for_free_memory(torch.device("cpu"), refuse)
