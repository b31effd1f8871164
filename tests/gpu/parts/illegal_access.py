"""A kernel writes where it must not: the error's label, the verdict, the seconds, and what is left
to go on from once the device cannot be read any more."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

from everstep.wire import ErrorKind, Verdict
from everstep.wire.events import EventKind
from tests.chaos.deadly_loop import break_device
from tests.gpu.alone import begin, context_of, run_dir_in
from tests.gpu.verdict import Shown
from tests.integration.trainees import Regression
from train_fn.loop import attempt, build
from train_fn.node.device import with_device_evidence
from train_fn.recovery.evidence import Evidence, RankReport, StepFailed
from train_fn.recovery.verdict import judge

BREAKS_IN_PASS = 8


class Breaking(Regression):
    """Breaks the device in one of its passes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._passes = device, 0
        self.broke_at = 0.0

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._passes += model.training
        if self._passes == BREAKS_IN_PASS:
            self.broke_at = time.monotonic()
            break_device(self._device)
        return super().loss(model, batch)


def run(device: torch.device, directory: Path) -> Shown:
    task = Breaking(device)
    build.build_task = lambda spec: task
    begin(device)
    try:
        attempt.train(context_of(run_dir_in(directory), device))
        raise AssertionError("the error of the device was noticed nowhere")
    except StepFailed as exc:
        failed, noticed_s = exc, time.monotonic() - task.broke_at
    error = with_device_evidence(failed.error, device)
    assert error.kind is ErrorKind.DEVICE, f"{error.summary} is taken for {error.kind}"
    verdict = judge(Evidence(1, 0.0, (RankReport(0, "node", 1, error=error),))).verdict
    assert verdict is Verdict.HARDWARE, f"the verdict is {verdict}"
    assert error.device is not None and error.device["faults"] == [], error.device
    resumed = _go_on(device, directory)
    kept = failed.snapshot_problem or f"kept step {error.snapshot_step}"
    return Shown(
        f"{error.type} is {error.kind} and {verdict}, noticed after {noticed_s:.2f} s at step "
        f"{error.step}; the rank: {kept}; the next attempt went on from step {resumed}",
        "" if device.type == "cuda" else "a context that is poisoned, Xids of a real GPU",
    )


def _go_on(device: torch.device, directory: Path) -> int:
    """Train the next attempt in a process whose device is sound. Return the step it began at."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_next_attempt, args=(str(device), str(directory), sender))
    process.start()
    sender.close()
    try:
        step = int(receiver.recv())
    except EOFError:
        raise AssertionError("the next attempt did not go on") from None
    process.join()
    assert process.exitcode == 0 and step > 0, f"the next attempt began at step {step}"
    return step


def _next_attempt(device_name: str, directory: str, sender: Any) -> None:
    device = torch.device(device_name)
    build.build_task = lambda spec: Regression()
    begin(device)
    ctx = context_of(run_dir_in(Path(directory)), device, attempt=2)
    assert attempt.train(ctx) is None
    [restored] = ctx.journal.of_kind(EventKind.RESTORED)  # type: ignore[attr-defined]
    sender.send(restored["step"])
