"""``train.exactness: elastic``: the same bits at any world size, and over failures and changes of
it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.elastic_setups import KILLED_RANK, KILLED_STEP, Texts
from tests.integration.moving_buffers import SPEC as MOVING_SPEC
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import assert_same, make_spec, merged_losses
from tests.integration.test_exactness_alone import make_text_spec
from tests.integration.test_exactness_failures import errors_of
from tests.integration.test_exactness_precision import TRAINEES, own_task_spec
from tests.integration.test_silent_collectives import AHEAD, BLOCKING
from tests.support.silent_backend import SilentOptions
from tests.support.two_groups import only_in_chaos
from train_fn.samples.token_batches import token_sampler

SETUPS = "tests.integration.elastic_setups"
MAX_WORKERS = 5


def elastic(spec: RunSpec, **train: Any) -> RunSpec:
    raw = spec.model_dump(mode="json")
    scaling = raw["scaling"] | {"max_workers": MAX_WORKERS}
    train = raw["train"] | {"exactness": "elastic"} | train
    return RunSpec.model_validate(raw | {"train": train, "scaling": scaling})


class Bits:
    """Everything that must be equal: state, losses, gradient norms and evaluations."""

    def __init__(self, run_dir: RunDir, *outcomes: Outcome) -> None:
        store = CheckpointStore(run_dir)
        newest = store.list()[-1]
        self.files = {
            name: torch.load(io.BytesIO(store.read_file(newest.name, name)))
            for name in newest.files
        }
        for name in ("parent", "tail", "bookmarks"):
            del self.files["train_state.pt"][name]
        (self.files["train_state.pt"]["best"] or {}).pop("checkpoint", None)  # tells the attempt
        self.losses = merged_losses(*outcomes)
        self.evaluations = {
            data["step"]: data["metrics"]
            for outcome in outcomes
            for data in outcome.of_kind(EventKind.EVALUATED)
        }

    def require_same(self, other: Bits) -> None:
        assert self.losses == other.losses
        assert self.evaluations == other.evaluations and self.evaluations
        assert_same(self.files, other.files)


def at_world_size(world_size: int, spec: RunSpec, setup: str | None, tmp_path: Path) -> Bits:
    run_dir = make_run_dir(tmp_path, f"run_{world_size}")
    return Bits(run_dir, train_to_end(Job(run_dir, spec, world_size, setup=setup), tmp_path))


def over_changes(spec: RunSpec, setup: str | None, tmp_path: Path) -> Bits:
    """Three ranks, of which one dies; five, two of which have little to do; one; two."""
    run_dir, killed_at = make_run_dir(tmp_path, "run_changing"), 2
    first = run_ranks(Job(run_dir, spec, 3, killed=(2, killed_at), setup=setup), tmp_path)[0]
    second = train_to_end(
        Job(run_dir, spec, 5, attempt=2, stopped=("pause", 3), setup=setup), tmp_path
    )
    [restored] = second.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", killed_at)
    third = train_to_end(
        Job(run_dir, spec, 1, submission=2, stopped=("pause", 4), setup=setup), tmp_path
    )
    last = train_to_end(Job(run_dir, spec, 2, submission=3, setup=setup), tmp_path)
    return Bits(run_dir, first, second, third, last)


def test_a_rank_that_dies_in_the_exchange_and_another_world_size_change_no_bit(
    tmp_path: Path,
) -> None:
    """Weights, running statistics, moments and averages of a convolutional net."""
    spec = elastic(make_spec("batch"), max_steps=7, epochs=1)
    alone = at_world_size(1, spec, f"{SETUPS}:by_slices", tmp_path)
    run_dir = make_run_dir(tmp_path, "run_broken")
    outcomes = run_ranks(Job(run_dir, spec, 3, setup=f"{SETUPS}:killed_between_slices"), tmp_path)
    assert outcomes[KILLED_RANK].exit_code == -9
    for error in errors_of([outcomes[0], outcomes[2]]):
        assert (error.kind, error.snapshot_step) == (ErrorKind.COLLECTIVE, KILLED_STEP)
    resumed = train_to_end(Job(run_dir, spec, 2, attempt=2), tmp_path)
    Bits(run_dir, outcomes[0], resumed).require_same(alone)


@pytest.mark.parametrize(
    ("setup", "silent"),
    [
        (f"{SETUPS}:by_slices", BLOCKING),
        (None, AHEAD),
        *only_in_chaos((f"{SETUPS}:by_slices", AHEAD), (None, BLOCKING)),
    ],
)
def test_collectives_that_fail_as_nccls_do_change_no_bit(
    silent: SilentOptions, setup: str | None, tmp_path: Path
) -> None:
    """A peer that dies leaves the others hanging. Who is let go finds garbage in the slices."""
    spec, killed_at = elastic(make_spec("batch"), max_steps=7, epochs=1), 3
    alone = at_world_size(1, spec, setup, tmp_path)
    run_dir = make_run_dir(tmp_path, "run_broken")
    job = Job(run_dir, spec, 3, killed=(2, killed_at), setup=setup, silent=silent)
    outcomes = run_ranks(job, tmp_path)
    for error in errors_of(outcomes[:2]):
        assert (error.type, error.snapshot_step) == ("PeersGone", killed_at), error.traceback
    resumed = train_to_end(Job(run_dir, spec, 2, attempt=2, setup=setup, silent=silent), tmp_path)
    [started] = resumed.of_kind(EventKind.TRAINING_STARTED)
    assert started["backend"] == "silent"
    Bits(run_dir, outcomes[0], resumed).require_same(alone)


def test_a_users_state_and_metrics_are_the_same_bits(tmp_path: Path) -> None:
    spec, setup = elastic(MOVING_SPEC), f"{SETUPS}:measured_task"
    alone = at_world_size(1, spec, setup, tmp_path)
    at_world_size(3, spec, setup, tmp_path).require_same(alone)


def test_batches_by_tokens_are_the_same_over_a_death_and_at_any_world_size(tmp_path: Path) -> None:
    tokens = {"batch_by": "tokens", "global_batch_size": 300, "micro_batch_size": 80}
    spec, setup = elastic(MOVING_SPEC, **tokens, max_steps=12), f"{SETUPS}:PaddedTexts"
    run_dir = make_run_dir(tmp_path, "run_1")
    outcome = train_to_end(Job(run_dir, spec, 1, setup=setup), tmp_path)
    over_changes(spec, setup, tmp_path).require_same(alone := Bits(run_dir, outcome))
    assert len(alone.losses) == 12
    lengths = Texts(160).lengths
    sampler = token_sampler(spec.train, 80, Texts(160), None, "train")
    points = [each for data in outcome.of_kind(EventKind.METRICS) for each in data["points"]]
    for step, point in enumerate(points):
        values, batch = (
            point["values"],
            sampler.global_batch(*divmod(step, sampler.steps_per_epoch)),
        )
        assert values["tokens_per_s"] * values["step_s"] == pytest.approx(lengths[batch].sum())
        assert "tflops_per_s" not in values, "the first batch says nothing of the others"


def test_the_same_ranks_differ_in_their_last_bits_without_it(tmp_path: Path) -> None:
    """What these tests compare can differ."""
    alone, three = (
        at_world_size(world_size, MOVING_SPEC, f"{SETUPS}:measured_task", tmp_path)
        for world_size in (1, 3)
    )
    assert alone.losses != three.losses and alone.evaluations != three.evaluations


def test_a_model_whose_passes_depend_on_the_ranks_is_refused(tmp_path: Path) -> None:
    job = Job(make_run_dir(tmp_path), elastic(MOVING_SPEC), 1, setup=f"{SETUPS}:exchanging_model")
    [error] = errors_of(run_ranks(job, tmp_path))
    assert error.type == "BadTask" and "exchanges in its forward pass" in error.message
    assert "set train.exactness to world_size" in error.message


def test_other_kernels_are_reported_and_refused_by_an_elastic_run(tmp_path: Path) -> None:
    spec, setup = own_task_spec(0), f"{SETUPS}:other_kernels_on_second_rank"
    plain = train_to_end(Job(make_run_dir(tmp_path, "run_plain"), spec, 2, setup=setup), tmp_path)
    [data] = plain.of_kind(EventKind.NUMERICS_CHANGED)
    [rank] = data["ranks"]
    assert (data["reference"], rank["rank"], rank["node_id"]) == ("rank 0", 1, "node1")
    assert (rank["differs"], rank["kernels"]) == (["the gradients"], ["100 threads"])

    run_dir = make_run_dir(tmp_path, "run_elastic")
    outcomes = run_ranks(Job(run_dir, elastic(spec), 2, setup=setup), tmp_path)
    assert len(outcomes[0].of_kind(EventKind.NUMERICS_CHANGED)) == 1
    first, second = errors_of(outcomes)
    assert (first.kind, second.kind) == (ErrorKind.COLLECTIVE, ErrorKind.DEVICE)
    assert "node node1 computes other bits than rank 0" in second.message
    assert "(100 threads)" in second.message


def test_a_restart_on_other_kernels_is_refused(tmp_path: Path) -> None:
    run_dir, spec = make_run_dir(tmp_path), elastic(own_task_spec(0))
    setup = f"{TRAINEES}:regression"
    train_to_end(Job(run_dir, spec, 1, stopped=("pause", 2), setup=setup), tmp_path)
    moved = Job(run_dir, spec, 1, submission=2, setup=f"{SETUPS}:other_kernels")
    [error] = errors_of(run_ranks(moved, tmp_path))
    assert "computes other bits than the state: the loss of the first micro-batch" in error.message
    train_to_end(Job(run_dir, spec, 2, submission=3, setup=setup), tmp_path)


Case = tuple[Callable[[Path], RunSpec], str | None]
CASES: dict[str, Case] = {
    "batch_norm": (lambda path: elastic(make_spec("batch"), max_steps=8), f"{SETUPS}:by_slices"),
    "small": (lambda path: elastic(make_spec("batch"), max_steps=8), None),
    "collectives": (
        lambda path: elastic(make_spec("batch"), max_steps=8),
        f"{SETUPS}:by_collectives",
    ),
    "gpt": (lambda path: elastic(make_text_spec(path), max_steps=12), f"{SETUPS}:by_slices"),
    "bf16": (lambda path: elastic(make_spec("batch", precision="bf16"), max_steps=8), None),
    "fp16": (
        lambda path: elastic(make_spec("batch", precision="fp16"), max_steps=8),
        f"{TRAINEES}:overflowing_scaler",
    ),
    "iterable": (lambda path: elastic(own_task_spec(0)), f"{TRAINEES}:StreamedRegression"),
    "own_task": (lambda path: elastic(MOVING_SPEC), f"{SETUPS}:measured_task"),
}


@pytest.mark.chaos
@pytest.mark.parametrize("case", CASES)
def test_no_world_size_and_no_change_of_it_changes_a_bit(case: str, tmp_path: Path) -> None:
    make, setup = CASES[case]
    spec = make(tmp_path)
    alone = at_world_size(1, spec, setup, tmp_path)
    for world_size in (2, 3, 5):
        at_world_size(world_size, spec, setup, tmp_path).require_same(alone)
    over_changes(spec, setup, tmp_path).require_same(alone)
