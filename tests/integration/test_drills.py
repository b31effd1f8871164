"""Drills on a live run, one after another: each is told, recovered from, and leaves the run's loss
and ledger as they would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from everstep import DrillHandle
from everstep.client.runs import RunHandle
from tests.support import wandb_file
from tests.support.digits_run import STEPS_PER_EPOCH, digits, wait_for_step
from tests.support.service_process import ServiceProcess, wait_for

LONG = {"epochs": 500, "checkpoint": {"every_steps": 10, "best_metric": None, "keep_latest": 3}}


@pytest.fixture(scope="module")
def drilled() -> Iterator[ServiceProcess]:
    with ServiceProcess(nodes=2, args=("--drills",)) as process:
        yield process


def wait_for_new_checkpoints(run: RunHandle, num: int) -> None:
    """Until so many checkpoints stand beyond the step that the run is at now."""
    begun_at = run.refresh().step

    def committed() -> bool:
        return (
            sum(each.state == "committed" and each.step > begun_at for each in run.checkpoints())
            >= num
        )

    wait_for(committed, 120, f"{num} checkpoints after step {begun_at}")


def assert_passed(drill: DrillHandle) -> Any:
    """The run trained again, its steps and losses go on as they would have; the report."""
    assert drill.state == "recovered", (drill.state, drill.problem)
    report = drill.report
    assert report is not None and report.parity is not None
    assert report.parity.in_parity is True, report.parity
    assert report.parity.num_steps_after == 10
    assert report.total_s is not None and report.total_s > 0
    assert {"leave", "decide", "start", "restore", "first_step"} <= set(report.phases)
    assert (report.world_size_before, report.world_size_after) == (2, 2)
    return report


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_run_is_drilled_three_times_and_carries_on(drilled: ServiceProcess) -> None:
    run = drilled.client().runs.create(digits("drilled", **LONG, wandb={}))
    wait_for_step(run, 25)

    killed = run.drill("kill_worker", rank=1).wait(240)
    report = assert_passed(killed)
    assert (report.verdict, report.steps_lost, report.restored_from) == (
        "worker_lost",
        0,
        "snapshot",
    )
    assert run.refresh().submission == 1

    wait_for_new_checkpoints(run, 1)
    report = assert_passed(run.drill("kill_driver").wait(240))
    assert (report.verdict, report.steps_lost) == (
        "control_plane",
        0,
    ) and report.restored_from.startswith("step-")
    assert run.refresh().submission == 2

    wait_for_new_checkpoints(run, 2)
    report = assert_passed(run.drill("corrupt_checkpoint").wait(240))
    assert report.rejected == (report.checkpoint,), (
        "the damaged one was read, found out and passed over"
    )
    assert report.restored_from not in (report.checkpoint, "snapshot", "fresh")
    assert report.steps_lost > 0 and "skipped" in report.note

    drills = run.drills()
    assert [drill.kind for drill in drills] == ["kill_worker", "kill_driver", "corrupt_checkpoint"]
    kinds = [event.kind for event in run.events()]
    assert (
        kinds.count("drill_requested") == kinds.count("drill_started") == 3
        and "drill_failed" not in kinds
    )
    _assert_every_ended_epoch_is_whole(run)
    run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", 120, "the cancel")
    wait_for(lambda: _recorded_steps(drilled, run), 120, "the end of the record for W&B")
    assert _recorded_steps(drilled, run) == list(range(1, run.step + 1))


def _recorded_steps(service: ServiceProcess, run: RunHandle) -> list[int]:
    """The steps with a loss in the one record for W&B that is there; none while it is written."""
    records = list((service.home / "storage" / "runs" / run.id / "wandb").glob("offline-*/*.wandb"))
    if len(records) != 1 or not any(each.HasField("exit") for each in wandb_file.records(*records)):
        return []
    return [row["step"] for row in wandb_file.history(*records) if "loss" in row]


def _assert_every_ended_epoch_is_whole(run: RunHandle) -> None:
    """Up to the end of the epoch that the last drill fell into."""
    last = run.drills()[-1].refresh().report
    assert last is not None and last.restored_step is not None
    wait_for_step(run, (last.restored_step // STEPS_PER_EPOCH + 2) * STEPS_PER_EPOCH)
    wait_for(lambda: _once(run) is not None, 120, "the sample ledger of the epoch")
    assert _once(run) is True
    epochs = run.samples().epochs
    assert [each.epoch for each in epochs] == list(range(len(epochs)))
    assert all(
        (each.used_once, each.duplicates, each.missing) == (each.samples, 0, 0) for each in epochs
    )


def _once(run: RunHandle) -> bool | None:
    report = run.drills()[-1].report
    return (
        report.parity.samples_used_once
        if report is not None and report.parity is not None
        else None
    )
