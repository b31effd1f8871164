"""No state is kept or gone on from that is not one of whole steps and finite weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import journal_of, one_rank
from tests.support.raw_specs import TASK
from train_fn.checkpoints.commit import load_checkpoint, manifest_facts, write_files
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed
from train_fn.samples.ledger import Count, Ledger
from train_fn.samples.sampler import Sampler
from train_fn.samples.streams import StreamSampler
from train_fn.snapshots import store as snapshot
from train_fn.standalone.start import begin_run
from train_fn.state.sound_state import ledger_fault, not_finite

pytestmark = pytest.mark.own_process

NUM_SAMPLES = 90
SAMPLERS = [
    Sampler(37, 8, 4, 0),
    Sampler(32, 8, 4, 0),
    Sampler(5, 8, 8, 0),
    StreamSampler(37, 8, 4, 0, num_streams=3),
]


def states(
    sampler: Sampler, num_epochs: int = 3, skipped: int = -1, doubled: int = -1
) -> Iterator[dict[str, Any]]:
    """Every state of a run, before and after an epoch is closed; the ledger lacks one step, or has
    it twice."""
    ledger, closed = Ledger(), 0
    for step in range(num_epochs * sampler.steps_per_epoch + 1):
        epoch, k = divmod(step, sampler.steps_per_epoch)
        yield {
            "step": step,
            "epoch": epoch,
            "k": k,
            "closed_epochs": closed,
            "ledger": ledger.state_dict(),
        }
        if closed < epoch:
            ledger.close_epoch()
            closed += 1
            yield {
                "step": step,
                "epoch": epoch,
                "k": k,
                "closed_epochs": closed,
                "ledger": ledger.state_dict(),
            }
        size = len(sampler.global_batch(epoch, k))
        for _ in range(0 if step == skipped else 2 if step == doubled else 1):
            # the loader gave others, and one too many
            ledger.commit(step, Count(size + 1, 2, 1))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_ledger_of_whole_steps_adds_up_in_every_state(sampler: Sampler) -> None:
    assert {ledger_fault(state, sampler) for state in states(sampler)} == {None}


@given(st.sampled_from(SAMPLERS), st.booleans(), st.data())
def test_a_step_that_the_ledger_lacks_or_has_twice_shows_until_its_epoch_is_closed(
    sampler: Sampler, twice: bool, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, 3 * sampler.steps_per_epoch - 1))
    found = list(states(sampler, **{"doubled" if twice else "skipped": step}))
    epoch = step // sampler.steps_per_epoch
    faulty = [state for state in found if ledger_fault(state, sampler) is not None]
    assert faulty == [
        state for state in found if state["step"] > step and state["closed_epochs"] == epoch
    ]


def test_what_is_not_finite_is_named() -> None:
    large = torch.full((4,), 3e38)  # whose sum is not a float32
    assert not_finite({"a": large, "b": torch.ones(2), "n": torch.tensor([1])}) == []
    assert not_finite(
        {"a": large, "b": torch.tensor([1.0, float("nan")]), "c": torch.tensor([float("-inf")])}
    ) == ["b", "c"]
    assert not_finite(
        {"up": torch.tensor([float("inf")]), "down": torch.tensor([float("-inf")])}
    ) == ["up", "down"]


class RootOfZero(Regression):
    """A loss that is finite, and whose gradient is not, from the fourth step on."""

    steps = 0

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, weight = super().loss(model, batch)
        self.steps += model.training
        if self.steps > 3:
            loss_sum = loss_sum + (0.0 * model[3](torch.zeros(1, 16))).abs().sqrt().sum()
        return loss_sum, weight


@pytest.fixture
def run_dir(shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return RunDir(open_storage(str(tmp_path / "storage")), "run_sound")


def make_spec(max_steps: int, every_steps: int | None) -> RunSpec:
    raw = {
        "name": "sound",
        "task": TASK,
    }
    train = {
        "max_steps": max_steps,
        "global_batch_size": 8,
        "micro_batch_size": 8,
        "epochs": 1,
        "loader": {"num_workers": 0},
    }
    return RunSpec.model_validate(
        {**raw, "train": train, "checkpoint": {"every_steps": every_steps}}
    )


@pytest.mark.parametrize(("max_steps", "every_steps"), [(4, None), (9, 1), (9, None)])
def test_weights_that_are_not_finite_are_in_no_state_that_is_kept(
    max_steps: int, every_steps: int | None, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_task", lambda spec: RootOfZero())
    spec = make_spec(max_steps, every_steps)
    start = begin_run(run_dir, spec, "test", fresh=True)
    ctx = one_rank(spec, run_dir, submission=start.submission)
    with pytest.raises(StepFailed) as raised:
        train(ctx)
    failed = raised.value
    assert (
        failed.error.type in ("NonFiniteWeights", "NonFiniteLoss")
        and failed.error.kind is ErrorKind.USER
    )
    assert max_steps > 4 or failed.error.type == "NonFiniteWeights", (
        "the last step has no step after it"
    )
    assert "3.weight, 3.bias" in failed.error.message and "grad_clip_norm" in failed.error.message
    assert (
        failed.error.step == 4
        and failed.error.snapshot_step is None
        and "not finite" in str(failed.snapshot_problem)
    )
    for manifest in CheckpointStore(run_dir).list():
        assert manifest.step < 4
        assert not_finite(load_checkpoint(run_dir, manifest)["model"]) == []
    labels = snapshot.snapshot_store(ctx).labels()
    for label in labels:
        assert label.problem or (
            label.step < 4 and not_finite(snapshot.snapshot_store(ctx).read(label)["model"]) == []
        )


@pytest.mark.parametrize("fault", ["ledger", "weights"])
def test_a_checkpoint_that_is_not_sound_is_rejected_and_the_one_before_is_taken(
    fault: str, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_task", lambda spec: Regression())
    spec = make_spec(4, None)
    first = begin_run(run_dir, spec, "test", fresh=True)
    assert train(one_rank(spec, run_dir, submission=first.submission)) is None
    [whole] = CheckpointStore(run_dir).list()
    state = load_checkpoint(run_dir, whole)
    state |= {"step": 5, "k": 5}
    if fault == "weights":
        state["ledger"] |= {name: 40 for name in ("samples", "used_once")}
        state["model"]["0.bias"][3] = float("nan")
    with CheckpointStore(run_dir).begin(5, first.submission, 1) as writer:
        write_files(writer, state, safetensors=False)
        writer.commit(world_size=1, **manifest_facts(state))

    again = make_spec(6, None)
    ctx = one_rank(again, run_dir, submission=first.submission + 1)
    assert train(ctx) is None
    [restored] = journal_of(ctx).of_kind(EventKind.RESTORED)
    assert (restored["step"], restored["checkpoint"]) == (4, whole.name)
    [rejected] = restored["rejected"]
    problems = {
        "ledger": "accounts for 32 samples of this epoch, where 5 steps have 40",
        "weights": "0.bias",
    }
    assert problems[fault] in rejected["problem"]
    assert journal_of(ctx).points[-1]["step"] == 6
