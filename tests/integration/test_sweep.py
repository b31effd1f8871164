"""A sweep on a real cluster: runs pause at rungs and go on without a lost step, while the service
dies in the middle."""

from __future__ import annotations

import pytest

from everstep.wire import RunStatus
from tests.support.service_process import ASK_S, ServiceProcess, wait_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]

SPEC = {
    "name": "halved",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet", "args": {"width": 8}},
        "data": {"name": "digits"},
    },
    "train": {"epochs": 20, "global_batch_size": 128, "micro_batch_size": 128},
    "scaling": {"min_workers": 1, "max_workers": 1},
}
"""240 steps; an evaluation every 12; rungs at steps 60 and 120."""
RATES = [1e-6, 3e-3, 1e-2, 3e-6]


def test_a_sweep_is_halved_over_a_death_of_the_service_and_loses_no_step(
    mended: ServiceProcess,
) -> None:
    client = mended.client()
    sweep = client.sweeps.create(
        SPEC,
        metric="val_accuracy",
        grid={"optimizer.lr": RATES},
        scheduler={"name": "asha", "reduction_factor": 2},
        max_parallel=2,
    )
    wait_for(
        lambda: sweep.refresh().progress.paused > 0, 180, "a run paused at its rung", every_s=ASK_S
    )
    mended.kill()
    mended.start()
    sweep.wait(timeout_s=240)

    shown = {run.number: run for run in sweep.runs()}
    mine = [run for run in client.runs.list() if run.sweep_id == sweep.id]
    assert sorted(run.name for run in mine) == [f"halved-00{number}" for number in range(4)]
    trained = [run for run in mine if run.status == RunStatus.SUCCEEDED]
    assert 1 <= len(trained) < 4 and {run.status for run in mine} <= {
        RunStatus.SUCCEEDED,
        RunStatus.CANCELLED,
    }
    best = sweep.best()
    assert sweep.sweep.best is not None and sweep.sweep.best.params["optimizer.lr"] > 1e-4
    assert shown[sweep.sweep.best.number].value == sweep.sweep.best.value
    for run in trained:
        losses = run.metrics("loss")["loss"]
        assert [step for step, _, _ in losses] == list(range(1, 241)), "every step once"
        assert run.steps_lost == 0
        epochs = run.samples().epochs
        assert all(epoch.duplicates == epoch.missing == 0 for epoch in epochs) and len(epochs) == 20
    for run in mine:
        if run.status == RunStatus.CANCELLED:
            assert run.reason is not None and run.reason.code == "cancelled_by_sweep"
            assert run.step < 240 and shown[int(run.name[-1])].results
    assert best.id in {run.run_id for run in shown.values()}
