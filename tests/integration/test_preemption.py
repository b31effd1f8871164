"""Runs that must let go, on a real cluster: for one of a higher priority, with no step lost; and
where their driver is stuck."""

from __future__ import annotations

import psutil
import pytest

from service.reconciler.decide import STOP_GRACE_S
from tests.support.digits_run import (
    STEPS_PER_EPOCH,
    assert_every_sample_counted_once,
    digits,
    wait_for_step,
)
from tests.support.service_process import ServiceProcess, has_ended, wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.chaos]

PATIENCE_S = 180.0
"""Longest wait for any one fact, on however slow a machine."""


def test_a_lower_run_shrinks_then_pauses_and_comes_back_by_itself() -> None:
    with ServiceProcess(nodes=3) as service, service.client() as client:
        low = client.runs.create(digits("low", epochs=10_000, workers=(1, 3)))
        wait_for_step(low, 5, PATIENCE_S)
        wait_for(lambda: low.refresh().world_size == 3, PATIENCE_S, "three ranks")

        urgent = client.runs.create(digits("urgent", epochs=30, workers=(2, 2), priority=1))
        wait_for(lambda: low.refresh().world_size == 1, PATIENCE_S, "its shrinking")
        urgent.wait(timeout_s=PATIENCE_S)
        assert (low.refresh().submission, low.status) == (1, "RUNNING"), "it was not paused"
        wait_for(lambda: low.refresh().world_size == 3, PATIENCE_S, "its growth")

        wide = client.runs.create(digits("wide", epochs=30, workers=(3, 3), priority=1))
        wait_for(lambda: low.refresh().status == "QUEUED", PATIENCE_S, "its pause")
        paused = [passed.reason for passed in low.run.transitions if passed.to_status == "PAUSED"]
        assert [reason and reason.code for reason in paused] == ["preempted_by_priority"]
        wide.wait(timeout_s=PATIENCE_S)
        paused_at = low.refresh().step
        wait_for_step(low, paused_at + 2 * STEPS_PER_EPOCH, PATIENCE_S)
        low.cancel()
        wait_for(lambda: low.refresh().status == "CANCELLED", PATIENCE_S, "the cancel")

        assert (low.steps_lost, low.submission) == (0, 2)
        ended = len(low.samples().epochs)
        assert ended > paused_at // STEPS_PER_EPOCH, "it went on after its pause"
        assert_every_sample_counted_once(low, epochs=ended)
        limits = [
            (event.data["limit"], event.data["by"])
            for event in low.events()
            if event.kind == "workers_limited"
        ]
        assert limits == [(1, urgent.id), (None, None)]


def test_a_run_whose_driver_does_not_answer_is_cancelled_all_the_same() -> None:
    with ServiceProcess(nodes=2) as service, service.client() as client:
        run = client.runs.create(digits("stuck", epochs=10_000))
        wait_for_step(run, 5, PATIENCE_S)
        [begun] = [event for event in run.events() if event.kind == "submission_started"]
        driver = psutil.Process(begun.data["driver_pid"])
        driver.suspend()
        run.cancel()
        wait_for(
            lambda: run.refresh().status == "CANCELLED",
            STOP_GRACE_S["cancel"] + PATIENCE_S,
            "the cancel",
        )
        assert has_ended(driver)
        again = client.runs.create(digits("after it", epochs=1))
        again.wait(timeout_s=PATIENCE_S)
