"""What a rank trains, whoever its peers are: task, data, model, optimizer and state. It may outlive
an attempt that broke, if its process does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from storage.run_names import Origin
from train_fn.context import WorkerContext
from train_fn.loop.built_model import require_fit_for, warnings_of
from train_fn.loop.built_optimizer import built_optimizer, built_scheduler
from train_fn.loop.lazy_model import lazy_names, shape_lazy_tensors
from train_fn.loop.training_data import training_data
from train_fn.samples.loader import TrainingData, to_device
from train_fn.samples.randomness import seed_building
from train_fn.samples.sampler import MicroBatch, Sampler
from train_fn.samples.stream_set import StreamSet
from train_fn.state.contents import Contents, Sketch, sketch_weights
from train_fn.state.ema import Ema
from train_fn.state.frozen_part import FrozenPart
from train_fn.state.numerics import Numerics
from train_fn.state.steppers import steppers_held, steppers_of
from train_fn.state.task_state import TaskState
from train_fn.state.train_state import TrainState
from train_fn.step.modes import set_modes_for_training
from train_fn.step.plain_attributes import PlainAttributes
from train_fn.step.precision import build_scaler
from train_fn.tasks.checks import checked_datasets, checked_model, is_iterable, where
from train_fn.tasks.own_step import require_fits
from train_fn.tasks.protocol import Task

_MODEL, _DATASETS, _OPTIMIZER, _LAZY = 6, 9, 10, 11
"""Purposes of the draws while each is built (``seed_building``)."""


@dataclass
class Inventory:
    """Everything that outlives an attempt in this process, and that may differ from a fresh one, by
    name (``outliving``)."""

    values: dict[str, object] | None
    """None for more than can be compared."""
    environment: dict[str, str]
    directory: str
    signals: dict[str, int]
    settings: dict[str, object]
    functions: dict[str, int]


@dataclass
class Parts:
    """What is trained on one rank, without anything that depends on its peers but the order of
    samples, which ``begin_attempt`` renews."""

    task: Task
    datasets: dict[str, Any]
    train_set: TrainingData
    sampler: Sampler
    state: TrainState
    total_steps: int
    """Steps of the whole run, by which schedules go."""
    warnings: list[str]
    """Warnings about the model as it was built."""
    built: PlainAttributes
    """The attributes of task, modules, optimizers and scheduler as they were built, of which states
    hold few."""
    built_weights: dict[str, Sketch]
    """Sketches of the weights as they were built that the model's ``state_dict`` leaves out."""
    origin: Origin | None = None
    """Submission and attempt that trained the state; None if this attempt built it."""
    numerics: Numerics | None = None
    """The fingerprint of this rank's kernels, which only weights as they were built give."""
    moving: set[str] = field(default_factory=set)
    """Names of the tensors that forward passes are known to change."""
    owners: dict[str, object] = field(default_factory=dict)
    """Objects whose plain attributes are ``built``, by name."""
    inventory: Inventory | None = None
    """What the process held once it had built these; None before the first pass."""
    ignored: set[str] = field(default_factory=set)
    """Names of those that depend on the batch alone."""
    flops_per_sample: float | None = None
    """As counted; None if it was not."""

    @property
    def is_kept(self) -> bool:
        """Return whether an earlier attempt of this process has trained the state."""
        return self.origin is not None

    def begin_attempt(self, ctx: WorkerContext) -> None:
        """Prepare these parts for the next attempt, which may have another number of ranks. An
        earlier attempt trained them, or they were built ahead.

        A step that broke may have changed what a forward pass changes beside tensors, and read
        iterable data. So these are as built, as in a new process, and the task has its state of
        the last step.
        """
        state = self.state
        if self.is_kept:
            if any(map(is_iterable, filter(None, self.datasets.values()))):
                self.datasets = build_datasets(ctx, self.task)
            with steppers_held(state):
                self.built.put_back()
            TaskState(self.task).load(state.task)
        self.train_set, self.sampler = training_data(ctx, self.task, self.datasets["train"])
        state.sampler = self.sampler
        if isinstance(self.train_set, StreamSet):
            assert state.bookmarks is not None
            state.bookmarks.forget_passed()
            self.train_set.bookmarks = state.bookmarks


def build_parts(ctx: WorkerContext, task: Task) -> Parts:
    """Build everything from the task, the same on every rank."""
    spec, train = ctx.spec, ctx.spec.train
    datasets = build_datasets(ctx, task)
    contents = Contents(datasets)
    seed_building(train.seed, _MODEL)
    model = checked_model(task, task.build_model()).to(ctx.device)
    in_eval = set_modes_for_training(model)
    require_fit_for(ctx.device, model)
    require_fits(spec, task, model, datasets["train"])
    train_set, sampler = training_data(ctx, task, datasets["train"])
    if lazy_names(model):
        first = sampler.global_batch(0, 0)[: sampler.micro_batch_size]
        loaded = train_set.first(MicroBatch(0, 0, first))
        seed_building(train.seed, _LAZY)  # reading samples has seeded the generators, too
        shape_lazy_tensors(task, model, to_device(loaded.batch, ctx.device))
    all_steps = train.epochs * sampler.steps_per_epoch
    total_steps = min(all_steps, train.max_steps or all_steps)
    seed_building(train.seed, _OPTIMIZER)
    optimizer = built_optimizer(spec, task, model)
    scheduler = built_scheduler(spec, task, optimizer, total_steps)
    state = TrainState(
        model,
        optimizer,
        build_scaler(train.precision, ctx.device),
        Ema(model, train.ema_decay) if train.ema_decay is not None else None,
        steps_per_epoch=sampler.steps_per_epoch,
        fingerprint=train_set.fingerprint,
        scheduler=scheduler,
        frozen=FrozenPart(model) if spec.checkpoint.parameters == "trainable" else None,
        model_source=where(task, "build_model"),
        contents=contents,
        sampler=sampler,
        bookmarks=train_set.bookmarks if isinstance(train_set, StreamSet) else None,
        data_source=where(task, "build_datasets") if spec.code is not None else None,
    )
    owners = {**owners_of(task, model), **steppers_of(state), **_data_of(datasets)}
    return Parts(
        task,
        datasets,
        train_set,
        sampler,
        state,
        total_steps,
        warnings=list(warnings_of(model, in_eval)),
        built=PlainAttributes(owners),
        owners=owners,
        built_weights=sketch_weights(model, all_of_it=False),
    )


def build_datasets(ctx: WorkerContext, task: Task) -> dict[str, Any]:
    """Build the task's data sets, the same on every rank."""
    seed_building(ctx.spec.train.seed, _DATASETS)
    return checked_datasets(task, task.build_datasets())


def _data_of(datasets: dict[str, Any]) -> dict[str, object]:
    """Return the data sets that stay as they were built, by the name to use for them. Iterable ones
    are built anew for each attempt."""
    return {
        f"{name} data": data
        for name, data in datasets.items()
        if data is not None and not is_iterable(data) and hasattr(data, "__dict__")
    }


def owners_of(task: Task, model: nn.Module) -> dict[str, object]:
    """Return the objects whose plain attributes a forward pass may change: the model's modules and
    the task."""
    return {**dict(model.named_modules()), type(task).__name__: task}
