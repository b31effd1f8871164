"""Drills on a live run, one after another: each is told, recovered from, and leaves the run's loss
and ledger as they would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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


@pytest.mark.chaos
def test_the_command_drills_and_tells(drilled: ServiceProcess) -> None:
    run = drilled.client().runs.create(digits("drilled by hand", **LONG))
    wait_for_step(run, 25)
    command = [
        str(Path(sys.executable).parent / "everstep"),
        "drill",
        run.id,
        "kill_worker",
        "--rank",
        "1",
        "--json",
    ]
    env = {**os.environ, "EVERSTEP_HOME": str(drilled.home)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"]["verdict"] == "worker_lost"
    run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", 120, "the cancel")


@pytest.mark.chaos
def test_an_audit_finds_one_wrong_bit_and_the_run_ends_as_its_twin(
    drilled: ServiceProcess,
) -> None:
    """At two ranks, and then at whatever is left: an elastic run has the same bits at both."""
    epochs = 25

    def audited(name: str, fraction: float) -> RunHandle:
        spec = digits(name, epochs=epochs, workers=(1, 2))
        spec["train"] |= {
            "exactness": "elastic",
            "audit_fraction": fraction,
            "eval_every_epochs": epochs,
        }
        return drilled.client().runs.create(spec)

    run = audited("audited", 1.0)
    wait_for_step(run, 20)
    drill = run.drill("corrupt_gradient", rank=1).wait(240)
    assert (drill.state, drill.problem) == ("recovered", None)
    assert drill.report is not None
    assert (drill.report.verdict, drill.report.steps_lost) == ("silent_corruption", 0)
    struck = run.attempts()[0].workers[1]
    assert run.wait(240).status == "SUCCEEDED"
    [failure] = run.failures()
    assert (failure.first_rank, failure.node_id) == (1, struck.node_id)
    assert "rank 1 computed wrongly: its gradient of micro-batch" in str(failure.exception)
    assert run.steps_lost == 0 and run.audit_fraction == 1.0

    twin = audited("twin", 0.0)
    assert twin.wait(240).chain == run.chain is not None
