"""A run of the digits workload, whose samples and steps are known: its spec, waiting for it, and
what must hold of it."""

from __future__ import annotations

from typing import Any

from everstep.client.runs import RunHandle
from tests.support.raw_specs import TASK
from tests.support.service_process import wait_for

SAMPLES = 1437
STEPS_PER_EPOCH = 12
"""In global batches of 128."""


def digits(
    name: str, *, epochs: int = 4, workers: tuple[int, int] = (2, 2), **overrides: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "task": {**TASK},
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "train": {"epochs": epochs, "global_batch_size": 128, "micro_batch_size": 32},
        "scaling": {"min_workers": workers[0], "max_workers": workers[1]},
        "checkpoint": {"every_steps": 10, "best_metric": "val_accuracy"},
        **overrides,
    }


def wait_for_step(run: RunHandle, step: int, timeout_s: float = 90) -> None:
    wait_for(
        lambda: run.refresh().step >= step, timeout_s, f"step {step} of {run.id} ({run.status})"
    )


def assert_every_sample_counted_once(run: RunHandle, epochs: int, samples: int = SAMPLES) -> None:
    counted = [
        (e.epoch, e.samples, e.used_once, e.duplicates, e.missing) for e in run.samples().epochs
    ]
    assert counted == [(epoch, samples, samples, 0, 0) for epoch in range(epochs)]


def assert_every_step_is_there_once(run: RunHandle, epochs: int) -> None:
    steps = [step for step, _, _ in run.metrics("loss", max_points=10_000)["loss"]]
    expected = range(1, epochs * STEPS_PER_EPOCH + 1)
    missing = sorted(set(expected) - set(steps))
    restored = [(e.attempt, e.data["step"]) for e in run.events() if e.kind == "restored"]
    assert steps == list(expected), (
        f"{len(missing)} of {len(expected)} steps are missing, from {missing[:1]} to "
        f"{missing[-1:]}; attempts began at {restored}"
    )
