"""A rank that fails leaves its state on its node, whole, and the next attempt continues from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import Journal, journal_of, one_rank, small_task_alone
from tests.support.raw_specs import TASK
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.checkpoints.saver import Saver
from train_fn.loop import build, training
from train_fn.loop.attempt import train
from train_fn.node import device as broken_device
from train_fn.recovery.evidence import StepFailed
from train_fn.samples.ledger import Ledger
from train_fn.samples.loader import Loader
from train_fn.session.report import Reporter
from train_fn.snapshots import whole
from train_fn.snapshots.store import Label, snapshot_store
from train_fn.snapshots.whole import WholeKeeper
from train_fn.state.tensor_tree import digest

pytestmark = [pytest.mark.own_process, pytest.mark.slow]

SPEC = RunSpec.model_validate(
    {
        "name": "left",
        "task": TASK,
        "train": {"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 6},
        "checkpoint": {"every_steps": None},
    }
)


class Broken(Exception):
    """Raised by these tests alone."""


@pytest.fixture(autouse=True)
def small_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "shm").mkdir()
    with small_task_alone(tmp_path / "shm", lambda self, **due: None):
        # Only a rank that fails leaves a state here, unless a test publishes one.
        monkeypatch.setattr(WholeKeeper, "after_step", lambda self, due: None)
        monkeypatch.setattr(WholeKeeper, "publish_now", lambda self: None)
        yield


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(open_storage(str(tmp_path / "storage")), "run_left")


def fail(run_dir: RunDir, attempt: int) -> StepFailed:
    with pytest.raises(StepFailed) as raised:
        train(one_rank(SPEC, run_dir, attempt=attempt))
    return raised.value


def labels(run_dir: RunDir) -> list[Label]:
    return snapshot_store(one_rank(SPEC, run_dir)).labels()


def restored(run_dir: RunDir, attempt: int) -> dict[str, Any]:
    """Train ``attempt`` to the end. Return the event of where it began."""
    ctx = one_rank(SPEC, run_dir, attempt=attempt)
    assert train(ctx) is None
    [data] = journal_of(ctx).of_kind(EventKind.RESTORED)
    return data


def final_digest(run_dir: RunDir) -> str:
    ctx = one_rank(SPEC, run_dir)
    [manifest] = ctx.checkpoints.list()
    assert manifest.step == 6
    return digest(load_checkpoint(run_dir, manifest))


def break_after_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    step_done = Reporter.step_done

    def raise_after_step_3(self: Reporter, *arguments: Any) -> float:
        if self._state.step == 3:
            raise Broken("after step 3")
        return step_done(self, *arguments)

    monkeypatch.setattr(Reporter, "step_done", raise_after_step_3)


def raising(*_: Any, **__: Any) -> Any:
    raise Broken("between the restored state and the first step")


BEFORE_THE_FIRST_STEP: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "saver": lambda patch: patch.setattr(Saver, "__init__", raising),
    "reports": lambda patch: patch.setattr(Reporter, "report_again", raising),
    "loader": lambda patch: patch.setattr(Loader, "__init__", raising),
    "claim": lambda patch: patch.setattr(Journal, "flush", lambda self, timeout_s: False),
}


@pytest.mark.parametrize("place", BEFORE_THE_FIRST_STEP)
def test_a_failure_between_the_restored_state_and_the_first_step_leaves_that_state(
    place: str, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RunDir(open_storage(str(tmp_path / "storage")), "run_whole")
    assert restored(whole, 1)["source"] == "fresh"

    with monkeypatch.context() as patch:
        break_after_step_3(patch)
        assert fail(run_dir, 1).error.snapshot_step == 3
    [first] = labels(run_dir)

    with monkeypatch.context() as patch:
        BEFORE_THE_FIRST_STEP[place](patch)
        failed = fail(run_dir, 2)
    assert (failed.error.step, failed.error.phase) == (3, "restore")
    assert (failed.error.snapshot_step, failed.snapshot_problem) == (3, None)
    [second] = labels(run_dir)
    assert (second.attempt, second.step, second.digest) == (2, 3, first.digest)

    data = restored(run_dir, 3)
    assert (data["source"], data["step"], data["rejected"]) == ("snapshot", 3, [])
    assert final_digest(run_dir) == final_digest(whole)


class BrokenOnce(Regression):
    """Fails in the first evaluation: the one that is tried before the first step."""

    tried = False

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        if not BrokenOnce.tried:
            BrokenOnce.tried = True
            raise Broken("in the evaluation")
        return {}


def test_a_failure_of_the_trial_evaluation_leaves_the_state_that_the_run_begins_with(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_task", lambda spec: BrokenOnce())
    failed = fail(run_dir, 1)
    assert (failed.error.step, failed.error.phase, failed.error.snapshot_step) == (
        0,
        "evaluation",
        0,
    )
    [label] = labels(run_dir)
    assert (label.attempt, label.step, label.problem) == (1, 0, None)
    data = restored(run_dir, 2)
    assert (data["source"], data["step"]) == ("snapshot", 0)


def test_a_failure_before_the_state_is_restored_leaves_none(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(training, "join", raising)
        failed = fail(run_dir, 1)
    assert (failed.error.step, failed.error.phase, failed.error.snapshot_step) == (
        None,
        "first_pass",
        None,
    )
    assert failed.snapshot_problem == "the rank was between two states"
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_task", raising)
        failed = fail(run_dir, 2)
    assert (failed.error.step, failed.error.phase, failed.error.snapshot_step) == (
        None,
        "start",
        None,
    )
    assert failed.snapshot_problem == "the rank had no state yet"
    assert labels(run_dir) == []


def test_a_failure_within_a_commit_leaves_no_state_and_says_at_which_step(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Ledger.commit

    def raise_at_step_3(self: Ledger, step: int, *arguments: Any) -> None:
        if step == 3:
            raise Broken("the weights have moved, the counters have not")
        commit(self, step, *arguments)

    monkeypatch.setattr(Ledger, "commit", raise_at_step_3)
    failed = fail(run_dir, 1)
    assert (failed.error.step, failed.error.phase, failed.error.snapshot_step) == (3, "step", None)
    assert failed.snapshot_problem == "the rank was between two states"
    assert labels(run_dir) == []


def break_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(tree: Any, *_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(whole, "leave_snapshot", read)
    break_after_step_3(monkeypatch)


def test_a_device_that_cannot_be_read_hides_neither_the_cause_nor_itself(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_the_device(monkeypatch)
    failed = fail(run_dir, 1)
    assert (failed.error.type, failed.error.message) == ("Broken", "after step 3")
    assert (failed.error.step, failed.error.snapshot_step) == (3, None)
    assert failed.snapshot_problem is not None
    assert failed.snapshot_problem.startswith("the state cannot be read from cpu: CUDA error: an")
    assert labels(run_dir) == []


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_of_a_broken_device_is_freed(
    broken: bool, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch ends a process that frees memory of it, before the process can report the error."""
    ends: list[weakref.ref[Any]] = []

    def break_here(self: Reporter, *_: Any) -> float:
        batch = torch.zeros(1)
        ends.append(weakref.ref(batch))
        raise Broken("with a tensor in a frame")

    monkeypatch.setattr(broken_device, "is_broken", lambda device: broken)
    monkeypatch.setattr(Reporter, "step_done", break_here)
    fail(run_dir, 1)
    assert (ends[0]() is not None) is broken
