"""A rank that dies in the task's ``on_epoch_end``: what the hook changes enters the state once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from everstep.wire.events import EventKind
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness_changed_in_place import Task
from tests.integration.test_exactness_small_batches import small_spec
from tests.support.two_groups import only_in_chaos
from train_fn.loop.epoch_end import TORN
from train_fn.recovery.evidence import StepFailed

HERE = "tests.integration.test_exactness_epoch_hook"


class Shrinks(Task):
    """Its hook changes the weights in two halves."""

    def first_half(self, epoch: int) -> None:
        pass

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        model.weight[:, :2].mul_(0.9)
        self.first_half(epoch)
        model.weight[:, 2:].mul_(0.9)


class DiesBetween(Shrinks):
    def first_half(self, epoch: int) -> None:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class FailsBetween(Shrinks):
    def first_half(self, epoch: int) -> None:
        raise ValueError("between two halves")


class Reports(Task):
    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        pass


class DiesReporting(Reports):
    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def job_of(name: str, setup: str, tmp_path: Path, attempt: int = 1) -> Job:
    spec = small_spec(16, 4, epochs=2)
    return Job(make_run_dir(tmp_path, name), spec, 2, attempt=attempt, setup=f"{HERE}:{setup}")


@pytest.mark.parametrize(
    ("breaks", "goes_on"),
    [
        ("DiesBetween", "Shrinks"),
        ("DiesReporting", "Reports"),
        *only_in_chaos(("FailsBetween", "Shrinks")),
    ],
)
def test_a_hook_that_did_not_end_runs_in_the_next_attempt(
    breaks: str, goes_on: str, tmp_path: Path
) -> None:
    twin = train_to_end(job_of("twin", goes_on, tmp_path), tmp_path)
    broken = run_ranks(job_of("broken", breaks, tmp_path), tmp_path)
    assert list(broken[0].losses) == [1, 2]
    assert broken[0].of_kind(EventKind.EPOCH_HOOK_DONE) == []

    again = train_to_end(job_of("broken", goes_on, tmp_path, attempt=2), tmp_path)
    [restored] = again.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 2), "no step is lost"
    assert [done["epoch"] for done in again.of_kind(EventKind.EPOCH_HOOK_DONE)] == [0, 1]
    assert again.losses == twin.losses, "to the last bit"


def test_a_rank_leaves_its_state_where_the_hook_has_changed_nothing(tmp_path: Path) -> None:
    survivor, _ = run_ranks(job_of("told", "DiesReporting", tmp_path), tmp_path)
    assert isinstance(survivor.error, StepFailed)
    assert survivor.error.error.snapshot_step == 2


def test_a_rank_in_whose_state_the_hook_may_be_half_done_leaves_none(tmp_path: Path) -> None:
    survivor, _ = run_ranks(job_of("torn", "DiesBetween", tmp_path), tmp_path)
    assert isinstance(survivor.error, StepFailed)
    assert survivor.error.error.snapshot_step is None
    assert survivor.error.snapshot_problem == TORN


def test_a_hook_that_is_due_is_left_out_where_the_next_task_has_none(tmp_path: Path) -> None:
    run_ranks(job_of("other", "DiesReporting", tmp_path), tmp_path)
    again = train_to_end(job_of("other", "Task", tmp_path, attempt=2), tmp_path)
    assert sorted(again.losses) == [1, 2, 3, 4]
    assert again.of_kind(EventKind.EPOCH_HOOK_DONE) == []
