"""A group without progress loses the ranks that hold it up, unless this host is what is cut off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train import controller
from train_fn.ray_train.controller import HangBreaker
from train_fn.recovery.hang import AttemptProgress, Phase
from train_fn.recovery.settings import RecoverySettings


class Stuck:
    """Attempt 2, whose journal answers every poll with the same progress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.attempt = 2
        self.cut_off = False
        self.reasons: list[str] = []
        attempt_log: Any = SimpleNamespace(
            attempt=2, journal=SimpleNamespace(take_progress=self._progress)
        )
        self.breaker = HangBreaker(RecoverySettings(quiet_poll_s=1.0), 30.0, attempt_log)
        monkeypatch.setattr(controller, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _progress(self) -> AttemptProgress:
        return AttemptProgress(
            attempt=self.attempt, num_signs=1, quiet_s=0.0, phase=Phase.STEP, step_p99_s=0.1
        )

    def _break_hang(self, reason: str) -> list[int]:
        self.reasons.append(reason)
        return [1]

    def turns_until(self, end: float) -> None:
        group: Any = SimpleNamespace(is_cut_off=lambda: self.cut_off, break_hang=self._break_hang)
        while self.now < end:
            self.now += 1.0
            self.breaker.check(group)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Stuck:
    return Stuck(monkeypatch)


def test_a_hang_is_broken_after_its_limit_and_then_watched_anew(stuck: Stuck) -> None:
    stuck.turns_until(31.0)
    assert stuck.reasons == [] and stuck.breaker.due_at == 31.0
    stuck.turns_until(32.0)
    [reason] = stuck.reasons
    assert "no sign of life for 31.0 s in phase step" in reason
    stuck.turns_until(63.0)
    assert len(stuck.reasons) == 1
    stuck.turns_until(64.0)
    assert len(stuck.reasons) == 2


def test_a_host_that_is_cut_off_breaks_nothing_and_gives_the_ranks_their_time_again(
    stuck: Stuck,
) -> None:
    stuck.cut_off = True
    stuck.turns_until(40.0)
    stuck.cut_off = False
    stuck.turns_until(63.0)
    assert stuck.reasons == [], "the limit counts from when this host was found to be cut off"
    stuck.turns_until(64.0)
    assert len(stuck.reasons) == 1


def test_progress_of_an_older_attempt_is_no_hang_of_this_one(stuck: Stuck) -> None:
    stuck.attempt = 1
    stuck.turns_until(100.0)
    assert stuck.reasons == [] and stuck.breaker.due_at == float("inf")
