"""The best checkpoint holds the weights that were evaluated, and is there whatever died around
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.reader import best_of
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import journal_of, one_rank, small_task_alone
from tests.support.raw_specs import TASK
from tests.support.storage_places import quick_directory
from train_fn.checkpoints.saver import Saver
from train_fn.context import WorkerContext
from train_fn.loop import build, epoch_end
from train_fn.loop.attempt import train
from train_fn.loop.replica import Replica
from train_fn.recovery.evidence import StepFailed

pytestmark = pytest.mark.own_process

EPOCH = 9
"""Steps: of 90 samples in global batches of 10."""
SPEC = RunSpec.model_validate(
    {
        "name": "best",
        "task": TASK,
        "train": {
            "epochs": 4,
            "global_batch_size": 10,
            "micro_batch_size": 5,
            "loader": {"num_workers": 0},
        },
        "checkpoint": {"every_steps": 4, "keep_latest": 1, "best_metric": "score"},
    }
)


class PeerGone(Exception):
    pass


class Hooked(Regression):
    """Its hook notes the epochs that it is told of."""

    ended: list[int]

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        self.ended.append(epoch)


class Saves:
    """Every save is made before the next step, but for what dies."""

    def __init__(self) -> None:
        self.break_at: set[int] = set()
        """Steps after which the attempt ends, once, before anything is saved."""
        self.never_written: set[int] = set()
        """Steps whose save is begun, and not finished."""

    def offer(self, saver: Saver, due: bool, is_best: bool) -> None:
        step = saver._state.step
        if step in self.break_at:
            self.break_at.discard(step)
            raise PeerGone
        if (due or is_best) and step not in self.never_written:
            saver.save_now(is_best=is_best)


@pytest.fixture
def saves() -> Saves:
    return Saves()


@pytest.fixture
def task() -> Hooked:
    task = Hooked()
    task.ended = []
    return task


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, saves: Saves, task: Hooked) -> Iterator[None]:
    def offer(saver: Saver, *, due: bool, is_best: bool) -> None:
        saves.offer(saver, due, is_best)

    with small_task_alone(tmp_path, offer), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_task", lambda spec: task)
        yield


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    with quick_directory() as directory:
        yield RunDir(open_storage(directory), "run_best")


class Evaluations:
    """Scores by step; an evaluation in ``broken`` ends the attempt the first time."""

    def __init__(self, scores: dict[int, float], broken: set[int]) -> None:
        self.scores, self.broken = scores, broken

    def __call__(self, ctx: WorkerContext, replica: Replica) -> dict[str, float]:
        step = replica.state.step
        if step in self.broken:
            self.broken.discard(step)
            raise PeerGone
        return {"val_score": self.scores[step]}


def run(
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    scores: list[float],
    broken: set[int] | None = None,
) -> int:
    """Train to the end, over as many attempts as it takes; how many."""
    by_step = {EPOCH * number: score for number, score in enumerate(scores, start=1)}
    monkeypatch.setattr(epoch_end, "evaluate", Evaluations(by_step, broken or set()))
    for attempt in range(1, 9):
        try:
            assert train(one_rank(SPEC, run_dir, attempt=attempt)) is None
        except StepFailed as exc:
            assert exc.error.type == "PeerGone", exc
        else:
            return attempt
    raise AssertionError("the run does not end")


def kept(run_dir: RunDir) -> dict[int, dict[str, float]]:
    return {manifest.step: manifest.metrics for manifest in CheckpointStore(run_dir).list()}


def best_step(run_dir: RunDir) -> int | None:
    best = best_of(CheckpointStore(run_dir).list(), "score", "max")
    return best.step if best else None


def test_a_checkpoint_between_two_evaluations_has_the_metrics_of_neither(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the newest one after the best would pass for it."""
    assert run(run_dir, monkeypatch, [0.5, 0.9, 0.3, 0.9]) == 1
    assert kept(run_dir) == {18: {"val_score": 0.9}, 36: {"val_score": 0.9}}
    assert best_step(run_dir) == 18, "a later one as good is no better"


def test_the_periodic_save_behind_the_best_is_not_the_best(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_the_first_epoch(ctx: WorkerContext, parts: build.Parts) -> bool:
        return parts.state.step == EPOCH and parts.state.evaluated_step == 0

    monkeypatch.setattr(epoch_end, "evaluation_is_due", after_the_first_epoch)
    assert run(run_dir, monkeypatch, [0.9]) == 1
    assert kept(run_dir) == {9: {"val_score": 0.9}, 36: {}} and best_step(run_dir) == 9


@pytest.mark.parametrize(("name", "kept_steps"), [(None, [18, 36]), ("none", [36])])
def test_without_a_name_the_best_is_the_one_with_the_smallest_validation_loss(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, name: str | None, kept_steps: list[int]
) -> None:
    unnamed = SPEC.checkpoint.model_copy(update={"best_metric": name})
    spec = SPEC.model_copy(update={"checkpoint": unnamed})
    losses = {9: 0.5, 18: 0.2, 27: 0.4, 36: 0.3}
    monkeypatch.setattr(
        epoch_end, "evaluate", lambda _, replica: {"val_loss": losses[replica.state.step]}
    )
    assert train(one_rank(spec, run_dir, attempt=1)) is None
    assert [manifest.step for manifest in CheckpointStore(run_dir).list()] == kept_steps


def test_the_best_found_at_an_attempt_s_beginning_is_saved(
    run_dir: RunDir, task: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(run_dir, monkeypatch, [0.5, 0.9, 0.3, 0.2], broken={18}) == 2
    assert kept(run_dir) == {18: {"val_score": 0.9}, 36: {"val_score": 0.2}}
    assert task.ended == [0, 1, 2, 3], "of an epoch whose evaluation was broken off, too, and once"


def test_a_restore_reports_the_best_evaluation_of_its_state(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the evaluations 0.5 at step 9 and 0.9 at step 18, before the one that breaks off."""
    scores = {9: 0.5, 18: 0.9, 27: 0.3, 36: 0.2}
    monkeypatch.setattr(epoch_end, "evaluate", Evaluations(scores, {27}))
    first, second = (one_rank(SPEC, run_dir, attempt=attempt) for attempt in (1, 2))
    with pytest.raises(StepFailed):
        train(first)
    assert train(second) is None
    best = [
        data["best"]
        for ctx in (first, second)
        for data in journal_of(ctx).of_kind(EventKind.RESTORED)
    ]
    assert best == [None, {"metric": "val_score", "value": 0.9, "step": 18}]


def test_a_best_state_whose_save_died_with_its_rank_is_saved_by_the_next_attempt(
    run_dir: RunDir, saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves.break_at = {18}
    assert run(run_dir, monkeypatch, [0.5, 0.9, 0.3, 0.2]) == 2
    assert kept(run_dir) == {18: {"val_score": 0.9}, 36: {"val_score": 0.2}}


def test_where_the_best_state_is_lost_the_best_that_is_there_counts(
    run_dir: RunDir, saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is that one deleted, nor does one that is better than it go unsaved."""
    saves.never_written, saves.break_at = {18}, {20}
    assert run(run_dir, monkeypatch, [0.5, 0.9, 0.7, 0.6]) == 2
    assert kept(run_dir) == {27: {"val_score": 0.7}, 36: {"val_score": 0.6}}


def test_until_a_better_one_is_there_the_best_that_is_kept_stays(
    run_dir: RunDir, saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves.never_written = {18}
    assert run(run_dir, monkeypatch, [0.5, 0.9, 0.3, 0.2]) == 1
    assert kept(run_dir) == {9: {"val_score": 0.5}, 36: {"val_score": 0.2}}


def test_a_run_that_is_begun_anew_goes_on_from_nothing_that_one_of_its_name_has_left(
    run_dir: RunDir, saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is gone; what an attempt left in its node's memory is not."""
    monkeypatch.setattr(
        epoch_end, "evaluate", Evaluations(dict.fromkeys((9, 18, 27, 36), 0.5), set())
    )
    saves.break_at = {20}
    with pytest.raises(StepFailed):
        train(one_rank(SPEC, run_dir, attempt=1))
    run_dir.files.delete_dir("runs/run_best")
    ctx = one_rank(SPEC, run_dir, attempt=1)
    assert train(ctx) is None
    [restored] = journal_of(ctx).of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("fresh", 0)
