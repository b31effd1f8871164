"""What a task's code changes of what is trained, and how fast, is refused by name; fp16 that trains
nothing is a failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import Journal, journal_of, one_rank
from tests.support.raw_specs import TASK
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.context import WorkerContext
from train_fn.loop import build, replica, training
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed
from train_fn.standalone.start import begin_run
from train_fn.state.train_state import MOST_IN_A_ROW
from train_fn.step.untrained import COPIED_BYTES

pytestmark = pytest.mark.own_process

PEAK = 0.3
STEPS_PER_EPOCH = 12
"""Of 90 samples in global batches of 8."""


@pytest.fixture
def begin(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., WorkerContext]:
    """A run of a task, of one rank, about to train."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def begin(task: Any, **train: Any) -> WorkerContext:
        monkeypatch.setattr(build, "build_task", lambda spec: task)
        train = {
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "epochs": 2,
            "loader": {"num_workers": 0},
            **train,
        }
        schedule = {"name": "cosine", "warmup_steps": 0, "final_fraction": 0.5}
        raw = {
            "name": "own",
            "task": TASK,
            "train": train,
            "schedule": schedule,
            "checkpoint": {"every_steps": None},
        }
        spec = RunSpec.model_validate(raw)
        run_dir = RunDir(open_storage(str(tmp_path / "storage")), "run_own")
        start = begin_run(run_dir, spec, "test", fresh=True)
        return one_rank(spec, run_dir, submission=start.submission)

    return begin


def refusal(ctx: WorkerContext) -> StepFailed:
    with pytest.raises(StepFailed) as raised:
        train(ctx)
    assert (raised.value.error.type, raised.value.error.kind) == ("BadTask", ErrorKind.USER)
    return raised.value


class OwnOptimizer(Regression):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=PEAK)
        return self.optimizer


class SteppedInAHook(OwnOptimizer):
    """OneCycle as in many training scripts, stepped after each step of the optimizer's."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK, total_steps=60)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer


class ScaledInAHook(OwnOptimizer):
    """A hand-made schedule, which begins at once or after some steps."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self._when, self._steps = when, 0

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        if self._when == "step":
            optimizer.register_step_post_hook(lambda *_: self._scale())
        return optimizer

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._steps += model.training
        if self._when == "loss" and self._steps == 4:
            self._scale()
        return super().loss(model, batch)

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        if self._when == "epoch":
            self._scale()

    def _scale(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


def test_a_scheduler_for_the_optimizer_is_refused_before_a_step(
    begin: Callable[..., WorkerContext],
) -> None:
    ctx = begin(SteppedInAHook())
    failed = refusal(ctx)
    assert failed.error.message.startswith("SteppedInAHook.build_optimizer (")
    assert (
        "test_own_changes.py, line" in failed.error.message
        and "use schedule: in the spec" in failed.error.message
    )
    assert journal_of(ctx).points == []


@pytest.mark.parametrize(("when", "step"), [("step", 1), ("loss", 3), ("epoch", STEPS_PER_EPOCH)])
def test_a_learning_rate_that_the_task_changes_is_refused_by_name(
    when: str, step: int, begin: Callable[..., WorkerContext]
) -> None:
    failed = refusal(begin(ScaledInAHook(when)))
    assert failed.error.step == step
    assert (
        "parameter group 0 is " in failed.error.message
        and "use schedule: in the spec" in failed.error.message
    )
    assert "ScaledInAHook.build_optimizer (" in failed.error.message


def test_the_learning_rate_that_is_told_is_the_step_s_own(
    begin: Callable[..., WorkerContext],
) -> None:
    used: list[float] = []

    class Watched(OwnOptimizer):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            optimizer = super().build_optimizer(model)
            optimizer.register_step_pre_hook(
                lambda *_: used.append(optimizer.param_groups[0]["lr"])
            )
            return optimizer

    ctx = begin(Watched(), max_steps=5)
    assert train(ctx) is None
    assert [point["values"]["lr"] for point in journal_of(ctx).points] == used and len(
        set(used)
    ) == 5


class Unfrozen(Regression):
    """A first layer that is frozen as built, and trained from the second epoch on; or the other way
    round."""

    def __init__(
        self,
        change: Callable[[nn.Module], None],
        in_loss_at: int | None = None,
        frozen: bool = True,
    ) -> None:
        super().__init__()
        self._change, self._in_loss_at, self._frozen, self._steps = change, in_loss_at, frozen, 0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].requires_grad_(not self._frozen)
        return model

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._steps += model.training
        if self._steps == self._in_loss_at:
            self._change(model)
        return super().loss(model, batch)

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        if self._in_loss_at is None:
            self._change(model)


def thaw(model: Any) -> None:
    model[0].requires_grad_(True)


def freeze(model: Any) -> None:
    model[3].requires_grad_(False)


def replace(model: Any) -> None:
    model[3] = nn.Linear(16, 1)


def tie(model: Any) -> None:
    model[3].bias = model[0].bias


@pytest.mark.parametrize(
    ("change", "in_loss_at", "step", "said"),
    [
        (thaw, None, STEPS_PER_EPOCH, "Unfrozen.on_epoch_end (test_own_changes.py"),
        (thaw, None, STEPS_PER_EPOCH, "requires_grad of 0.weight, 0.bias became True"),
        (freeze, None, STEPS_PER_EPOCH, "requires_grad of 3.weight, 3.bias became False"),
        (thaw, 5, 4, "requires_grad of 0.weight, 0.bias became True"),
        (
            replace,
            None,
            STEPS_PER_EPOCH,
            "in place of those that were built, or took some away: 3.weight, 3.bias",
        ),
        (tie, None, STEPS_PER_EPOCH, "took some away: 3.bias"),
    ],
)
def test_what_is_trained_cannot_change_within_a_run(
    change: Callable[[nn.Module], None],
    in_loss_at: int | None,
    step: int,
    said: str,
    begin: Callable[..., WorkerContext],
) -> None:
    failed = refusal(begin(Unfrozen(change, in_loss_at)))
    assert failed.error.step == step
    assert said.replace("(test", "(") in failed.error.message.replace(
        str(Path(__file__).parent) + "/", ""
    ).replace("(test", "(")
    assert "start a new run with resume_from" in failed.error.message


def test_a_group_that_is_added_to_the_optimizer_is_refused(
    begin: Callable[..., WorkerContext],
) -> None:
    class Added(OwnOptimizer):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(model[3].parameters(), lr=PEAK)
            return self.optimizer

        def on_epoch_end(self, model: Any, epoch: int, metrics: dict[str, float]) -> None:
            self.optimizer.add_param_group({"params": list(model[0].parameters())})

    failed = refusal(begin(Added()))
    assert (
        "changed which parameters the optimizer holds: it had 2 in 1 groups" in failed.error.message
    )


# ---------------------------------------------------------------- fp16


class Overflowing(Regression):
    """In fp16 the first layer's gradients are infinite in some steps, at any loss scale."""

    def __init__(self, overflows: Callable[[int], bool]) -> None:
        super().__init__()
        self._overflows, self._step = overflows, 0

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, weight = super().loss(model, batch)
        if model.training:
            self._step += 1
            factor = float("inf") if self._overflows(self._step) else 0.0
            loss_sum = loss_sum + _Gradient.apply(model[0].bias, factor)
        return loss_sum, weight


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor, ctx.shape = factor, parameter.shape
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.full(ctx.shape, ctx.factor), None


def skipped_of(journal: Journal) -> list[int]:
    return [point["values"]["skipped_steps"] for point in journal.points]


@pytest.mark.parametrize(("max_steps", "steps"), [(200, MOST_IN_A_ROW), (5, 5)])
def test_fp16_that_trains_nothing_is_a_failure_that_names_the_parameters(
    max_steps: int, steps: int, begin: Callable[..., WorkerContext]
) -> None:
    ctx = begin(Overflowing(lambda step: True), precision="fp16", epochs=20, max_steps=max_steps)
    with pytest.raises(StepFailed) as raised:
        train(ctx)
    failed = raised.value
    assert (failed.error.type, failed.error.kind, failed.error.step) == (
        "NothingTrained",
        ErrorKind.USER,
        steps,
    )
    assert failed.error.message.startswith(
        f"{steps} steps in a row, {steps} of {steps} in all, were left out"
    )
    assert "The gradients of 0.bias are not finite" in failed.error.message


def test_fp16_whose_scale_collapses_is_a_failure_though_a_few_steps_are_taken(
    begin: Callable[..., WorkerContext],
) -> None:
    """Two of three steps are left out: the scale falls from 2**16 to below 2**-14 with the 31st of
    them."""
    ctx = begin(Overflowing(lambda step: step % 3 != 0), precision="fp16", epochs=20, max_steps=200)
    with pytest.raises(StepFailed) as raised:
        train(ctx)
    assert (raised.value.error.type, raised.value.error.step) == ("NothingTrained", 46)
    assert (
        "31 of 46 in all" in raised.value.error.message
        and "down to 3.05176e-05" in raised.value.error.message
    )


def test_skipped_steps_are_counted_over_restarts_and_leave_the_average_alone(
    begin: Callable[..., WorkerContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and the third step are left out: weights and average stay, while the schedule and
    the data go on."""
    first: dict[str, torch.Tensor] = {}

    class Kept(Overflowing):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            first.update((name, value.clone()) for name, value in model.state_dict().items())
            return model

    monkeypatch.setattr(
        build,
        "build_scaler",
        lambda precision, device: torch.amp.GradScaler("cpu", init_scale=64.0),
    )
    ctx = begin(Kept(lambda step: step in (2, 3)), precision="fp16", max_steps=3, ema_decay=0.9)
    assert train(ctx) is None
    journal = journal_of(ctx)
    assert skipped_of(journal) == [0, 1, 2]
    assert len({point["values"]["lr"] for point in journal.points}) == 3, (
        "the schedule counts global batches"
    )
    [manifest] = ctx.checkpoints.list()
    state = load_checkpoint(ctx.run_dir, manifest)
    assert state["skipped"] == {"total": 2, "in_a_row": 2} and state["ledger"]["used_once"] == 3 * 8
    decay = (1 + 1) / (10 + 1)
    for name, value in state["model"].items():
        torch.testing.assert_close(state["ema"][name], decay * first[name] + (1 - decay) * value)

    raw = ctx.spec.model_dump()
    again = one_rank(
        RunSpec.model_validate(raw | {"train": raw["train"] | {"max_steps": 5}}),
        ctx.run_dir,
        submission=2,
    )
    assert train(again) is None
    counted = {
        point["step"]: point["values"]["skipped_steps"] for point in journal_of(again).points
    }
    assert (counted[4], counted[5]) == (2, 2)


class CountedInValidation(nn.Module):
    """Adds to a buffer in eval mode."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(num_elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.seen += 1
        out: torch.Tensor = self.layer(x)
        return out


class RegressionCountedInValidation(Regression):
    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self._num_elements = num_elements

    def build_model(self) -> nn.Module:
        return CountedInValidation(self._num_elements)


@pytest.mark.parametrize("is_large", [False, True])
def test_what_the_first_validation_batch_changes_is_put_back_or_refused(
    is_large: bool, begin: Callable[..., WorkerContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank tries another batch, so that their buffers would differ."""
    after: list[float] = []
    tried = training.try_evaluation

    def try_and_look(ctx: WorkerContext, built: replica.Replica) -> None:
        tried(ctx, built)
        after.append(float(built.state.model.seen.sum()))

    monkeypatch.setattr(training, "try_evaluation", try_and_look)
    num_elements = COPIED_BYTES // 4 + is_large
    ctx = begin(RegressionCountedInValidation(num_elements), max_steps=1)
    if is_large:
        message = refusal(ctx).error.message
        assert message.startswith("the first validation batch changed seen, of which no copy is")
        return
    assert train(ctx) is None
    assert after == [0.0]


class Epochs(torch.utils.data.Dataset[Any]):
    """Says in its samples for which epoch it was made."""

    epoch = 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.epoch)]), torch.tensor(0.0)


class ToldOfEpochs(Epochs):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ByEpoch:
    """A task whose data change with the epoch."""

    def __init__(self, kind: type[Epochs], *, in_hook: bool) -> None:
        self.kind, self.in_hook, self.seen = kind, in_hook, list[float]()

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def build_datasets(self) -> dict[str, Any]:
        self.rows = self.kind()
        return {"train": self.rows, "val": None}

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.seen += batch[0].unique().tolist()
        return (model(batch[0]).squeeze(1) - batch[1]).square().sum(), len(batch[0])

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        if self.in_hook:
            self.rows.epoch = epoch + 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_training_data_is_told_of_each_epoch_where_it_is_read(
    begin: Callable[..., WorkerContext], num_workers: int
) -> None:
    task = ByEpoch(ToldOfEpochs, in_hook=False)
    assert train(begin(task, loader={"num_workers": num_workers}, epochs=3)) is None
    # Of 32 samples in global batches of 8; the first passes are tried.
    assert task.seen[-12:] == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


def test_an_epoch_s_end_that_changes_the_training_data_is_refused(
    begin: Callable[..., WorkerContext],
) -> None:
    error = refusal(begin(ByEpoch(Epochs, in_hook=True))).error
    assert "ByEpoch.on_epoch_end" in error.summary
    assert "changes Epochs.epoch of the training data" in error.summary
