"""Runs that must let go, on a real cluster: for one of a higher priority, with no step lost; and where their driver is stuck."""

from __future__ import annotations

import psutil
import pytest

from service.reconciler.decide import STOP_GRACE_S
from tests.digits_run import assert_every_sample_counted_once, digits, wait_for_step
from tests.service_process import ServiceProcess, wait_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]


def test_a_lower_run_shrinks_then_pauses_and_comes_back_by_itself() -> None:
    epochs = 300
    with ServiceProcess(nodes=3) as service, service.client() as client:
        low = client.runs.create(digits("low", epochs=epochs, workers=(1, 3)))
        wait_for_step(low, 5)
        wait_for(lambda: low.refresh().world_size == 3, 120, "three ranks")

        urgent = client.runs.create(digits("urgent", epochs=30, workers=(2, 2), priority=1))
        wait_for(lambda: low.refresh().world_size == 1, 120, "its shrinking")
        urgent.wait(timeout_s=240)
        assert (low.refresh().submission, low.status) == (1, "RUNNING"), "it was not paused"
        wait_for(lambda: low.refresh().world_size == 3, 120, "its growth")

        wide = client.runs.create(digits("wide", epochs=30, workers=(3, 3), priority=1))
        wait_for(lambda: low.refresh().status == "QUEUED", 120, "its pause")
        paused = [passed.reason for passed in low.run.transitions if passed.to_status == "PAUSED"]
        assert [reason and reason.code for reason in paused] == ["preempted_by_priority"]
        wide.wait(timeout_s=240)
        low.wait(timeout_s=240)

        assert (low.status, low.step, low.steps_lost, low.submission) == ("SUCCEEDED", epochs * 12, 0, 2)
        assert_every_sample_counted_once(low, epochs=epochs)
        told = [(event.data["limit"], event.data["by"]) for event in low.events() if event.kind == "workers_limited"]
        assert told == [(1, urgent.id), (None, None)]


def test_a_run_whose_driver_does_not_answer_is_cancelled_all_the_same() -> None:
    with ServiceProcess(nodes=2) as service, service.client() as client:
        run = client.runs.create(digits("stuck", epochs=500))
        wait_for_step(run, 5)
        [begun] = [event for event in run.events() if event.kind == "submission_started"]
        driver = psutil.Process(begun.data["driver_pid"])
        driver.suspend()
        run.cancel()
        wait_for(lambda: run.refresh().status == "CANCELLED", STOP_GRACE_S["cancel"] + 45, "the cancel")
        assert not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE
        again = client.runs.create(digits("after it", epochs=1))
        again.wait(timeout_s=240)
