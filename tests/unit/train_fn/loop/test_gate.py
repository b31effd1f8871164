"""The gate between a step's backward and its commit: only totals of a whole step pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import one_rank, small_task_alone
from tests.support.raw_specs import TASK
from train_fn.errors import StepNotWhole
from train_fn.loop import attempt
from train_fn.loop.leave import leave
from train_fn.loop.training import RankProgress, Training
from train_fn.recovery.evidence import StepFailed, describe_error
from train_fn.samples.ledger import Count
from train_fn.standalone.start import begin_run
from train_fn.step.peers import Peers
from train_fn.step.report import StepTotals
from train_fn.step.report_sums import ReportSums

pytestmark = pytest.mark.own_process

CPU = torch.device("cpu")


def added_up(steps: list[int | None], num_samples: int = 4) -> StepTotals:
    """The totals of ranks that speak of these steps, each of so many samples; None for a rank whose
    numbers did not arrive."""
    reports = [ReportSums(Peers(rank, len(steps), CPU)) for rank in range(len(steps))]
    sums = np.zeros(len(reports[0].numbers), np.float32)
    for report, step in zip(reports, steps, strict=True):
        if step is not None:
            report.begin(step)
            report.add(torch.tensor(1.0), num_samples, Count(num_samples))
            sums += report.gradient().numpy() * np.float32(1 / len(steps))  # as DDP divides
    return reports[0].totals_of(sums.tobytes())


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("step", [0, 11, 4095, 4096, 10**9])
def test_totals_of_all_ranks_and_samples_pass(world_size: int, step: int) -> None:
    assert added_up([step] * world_size).fault(step, 4 * world_size) is None


@pytest.mark.parametrize(
    ("steps", "num_samples", "problem"),
    [
        ([11, None, 11], 8, "2 of 3 ranks took part in it; rank 1 sent nothing"),
        ([11, 10, 11], 12, "2 of 3 ranks took part in it; rank 1 sent 11, not 12"),
        ([10, 10, 10], 12, "0 of 3 ranks took part in it; rank 0 sent 11, not 12"),
        ([11, 11, 11], 16, "the ranks accounted for 12 samples, but the global batch has 16"),
    ],
)
def test_partial_and_stale_totals_are_told_apart_from_whole_ones(
    steps: list[int | None], num_samples: int, problem: str
) -> None:
    assert added_up(steps).fault(11, num_samples) == problem


def test_totals_that_are_no_numbers_are_refused() -> None:
    report = ReportSums(Peers(0, 2, CPU))
    numbers = np.full(len(report.numbers), np.nan, np.float32)
    assert "0 of 2 ranks" in str(report.totals_of(numbers.tobytes()).fault(3, 8))


def test_data_that_is_not_what_was_expected_is_the_ledger_s_to_tell() -> None:
    """One sample twice and one missing: all of the batch is accounted for."""
    report = ReportSums(Peers(0, 1, CPU))
    report.begin(2)
    report.add(torch.tensor(1.0), 8, Count(8, 1, 1) + Count(-1, 0, 1))
    totals = report.totals_of(report.gradient().numpy().tobytes())
    assert totals.fault(2, 8) is None and totals.facts.num_missing == 2


@pytest.mark.parametrize("broken", ["stale", "partial"])
def test_a_step_that_is_not_whole_is_not_taken(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    raw = {
        "name": "gate",
        "task": TASK,
    }
    train = {"max_steps": 6, "global_batch_size": 8, "micro_batch_size": 8}
    spec = RunSpec.model_validate({**raw, "train": train, "checkpoint": {"every_steps": None}})
    run_dir = RunDir(open_storage(str(tmp_path / "storage")), "run_gate")
    start = begin_run(run_dir, spec, "test", fresh=True)
    run_passes, before = attempt.run_passes, list[StepTotals]()

    def break_the_fourth(training: Training) -> StepTotals:
        totals = run_passes(training)
        before.append(totals)
        if training.replica.state.step < 3:
            return totals
        return (
            before[-2]
            if broken == "stale"
            else totals._replace(facts=totals.facts._replace(num_samples=6))
        )

    monkeypatch.setattr(attempt, "run_passes", break_the_fourth)
    progress = RankProgress()
    with small_task_alone(tmp_path / "shm", lambda self, **due: None):
        (tmp_path / "shm").mkdir()
        ctx = one_rank(spec, run_dir, submission=start.submission, attempt=start.attempt)
        with pytest.raises(StepNotWhole) as raised:
            attempt.train_openly(ctx, progress)
        replica = progress.replica
        assert replica is not None
        parameters = replica.parts.trained.parameters
        weights = [parameter.detach().clone() for parameter in parameters]
        failed = leave(ctx, progress, raised.value)
    assert isinstance(failed, StepFailed) and failed.error.snapshot_step == 3
    error = describe_error(failed, 0)
    assert (error.kind, error.step, error.collateral) == (ErrorKind.EXCHANGE, 3, False), (
        "no mistake of the user's"
    )
    assert error.message.startswith("step 4 is not whole and was not taken: ")
    assert all(
        torch.equal(parameter, weight)
        for parameter, weight in zip(parameters, weights, strict=True)
    )
    assert replica.state.step == 3
