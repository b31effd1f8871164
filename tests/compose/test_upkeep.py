"""What an operator does with a deployment on Docker in the course of a year, while runs train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.conftest import WORKERS
from tests.compose.deployment import Deployment
from tests.compose.steps import (
    DAILY,
    EPOCHS,
    assert_never_interrupted,
    follow,
    go_on,
    polled,
)
from tests.hosts.trial import Trial
from tests.support.service_process import ASK_S, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]


def test_fewer_workers_and_more(deployment: Deployment) -> None:
    trial = Trial.begun(deployment, "scaled", 2 * EPOCHS)
    follow(deployment, DAILY, "worker=2")
    wait_for(lambda: trial.run.refresh().world_size == 2, 300, "two ranks", every_s=ASK_S)
    go_on(trial)
    follow(deployment, DAILY, "worker=4")
    wait_for(trial.is_at_full_size, 300, "full size", every_s=ASK_S)
    wait_for(lambda: len(deployment.live_nodes()) == 4, 300, "four workers", every_s=ASK_S)
    record = trial.finish()
    assert record["steps_lost"] == 0
    assert {failure["verdict"] for failure in record["failures"]} <= {"preemption"}


@pytest.mark.parametrize("part", ["database", "object-store"])
def test_a_part_that_holds_data_is_restarted(deployment: Deployment, part: str) -> None:
    trial = Trial.begun(deployment, f"{part}-restarted", EPOCHS)
    follow(deployment, DAILY, "restart", PART=part)
    wait_for(deployment.is_ready, 120, "the service", every_s=ASK_S)
    go_on(trial)
    assert_never_interrupted(trial)


@pytest.mark.parametrize("what", ["service", "workers"])
def test_an_upgrade_while_people_ask(deployment: Deployment, what: str) -> None:
    trial = Trial.begun(deployment, f"upgraded-{what}", 4 * EPOCHS)
    with polled(deployment, trial.run.id) as problems:
        follow(deployment, "Upgrades", f"rolling-upgrade.sh {what}")
    assert problems == []
    record = trial.finish(timeout_s=900)
    assert record["steps_lost"] == 0
    assert {failure["verdict"] for failure in record["failures"]} <= {"preemption"}


def test_an_upgrade_of_everything(deployment: Deployment) -> None:
    trial = Trial.begun(deployment, "upgraded-all", 2 * EPOCHS)
    follow(deployment, "Upgrades", "rolling-upgrade.sh all")
    assert trial.finish(timeout_s=900)["steps_lost"] == 0


def test_everything_is_taken_down_and_brought_up_again(deployment: Deployment) -> None:
    trial = Trial.begun(deployment, "down-and-up", EPOCHS)
    follow(deployment, DAILY, "compose down")
    deployment.up(WORKERS)
    assert trial.finish()["steps_lost"] == 0


def test_a_backup_is_restored_into_a_new_deployment(deployment: Deployment, tmp_path: Path) -> None:
    trial = Trial.begun(deployment, "restored", 2 * EPOCHS)
    wait_for(lambda: trial.run.checkpoints(), 120, "a checkpoint", every_s=ASK_S)
    submission = trial.run.refresh().submission
    copy = str(tmp_path / "backup")
    follow(deployment, DAILY, "backup.sh", DIRECTORY=copy)
    go_on(trial)
    deployment.forget()
    follow(deployment, DAILY, "restore.sh", DIRECTORY=copy)
    deployment.up(WORKERS)
    trial.run = deployment.client().runs.get(trial.run.id)  # the administrator's token is new
    trial.finish()
    later = [
        event.data
        for event in trial.run.events()
        if event.kind == "restored" and event.submission > submission
    ]
    assert later[0]["source"] == "checkpoint" and later[0]["step"] > 0
