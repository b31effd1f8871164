"""What a rank trains, whoever its peers are: task, data, model, optimizer and state."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import ConstantScheduleSpec
from storage.run_dir import RunDir
from train_fn.checks.fits import require_fit_for, require_fits, warnings_of
from train_fn.checks.returns import (
    checked_datasets,
    checked_model,
    checked_optimizer,
    checked_scheduler,
    epoch_length,
)
from train_fn.checks.trained import TrainedParameters, check_no_scheduler
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, few
from train_fn.loop.sharded import (
    as_if_full,
    require_elementwise,
    shard_model,
    shard_optimizer,
)
from train_fn.node.usage import set_threads
from train_fn.samples.loader import KeyedDataset, TrainingData, collate_of, to_device
from train_fn.samples.sampler import Sampler, WholeShares, seed_building
from train_fn.samples.streams import StreamSampler, StreamSet, num_streams_of
from train_fn.samples.token_batches import token_sampler
from train_fn.state.contents import Contents, FrozenPart, Sketch, sketch_weights
from train_fn.state.optim import Ema, Optimizers, build_optimizer
from train_fn.state.sound_state import Numerics
from train_fn.state.train_state import TaskState, TrainState
from train_fn.step.precision import build_scaler, set_determinism, set_modes_for_training
from train_fn.step.trial import TrialPass
from train_fn.tasks.builtin import build_task
from train_fn.tasks.protocol import Task, is_iterable, loss_arguments, makes_own_steps, where
from train_fn.user_code.modules import add_to_path
from train_fn.user_code.packages import add_packages

_MODEL, _TASK, _DATASETS, _OPTIMIZER, _LAZY = 6, 8, 9, 10, 11
"""Purposes of the draws while each is built (``seed_building``)."""

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """What is trained on one rank, without anything that depends on its peers but the order of
    samples."""

    task: Task
    datasets: dict[str, Any]
    train_set: TrainingData
    sampler: Sampler
    state: TrainState
    trained: TrainedParameters
    task_state: TaskState
    total_steps: int
    """Steps of the whole run, by which schedules go."""
    last_step: int
    """Steps after which this run ends: those of the whole run, or fewer of a replay."""
    built_weights: dict[str, Sketch]
    """Sketches of the weights as they were built that the model's ``state_dict`` leaves out."""
    every_weight: dict[str, Sketch] | None = None
    """Sketches of all weights as they were built, if a rank keeps some of their rows only."""
    numerics: Numerics | None = None
    """The fingerprint of this rank's kernels, which only weights as they were built give."""
    flops_per_sample: float | None = None
    """As counted; None if it was not."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about the task, for the run's user."""

    @property
    def val_set(self) -> Any:
        """Return the validation set; None if the task has none."""
        return self.datasets.get("val")

    def warn(self, text: str) -> None:
        """Warn the user: in the log, and in the attempt's ``training_started`` event."""
        logger.warning("%s", text)
        self.warnings.append(text)


@dataclass
class Built:
    """What the task has built, before anything is done with it."""

    task: Task
    datasets: dict[str, Any]
    model: nn.Module


_built: Built | None = None
"""What this process had before it became a rank; None if it builds as one."""


def was_built() -> bool:
    """Return whether this process has what was built before it became a rank."""
    return _built is not None


def build_once(spec: RunSpec, run_dir: RunDir, device: torch.device) -> None:
    """Build what the ranks of a run train, in a process from which they are forked."""
    global _built
    if spec.runtime_env is not None:
        add_packages(spec.runtime_env.pip)
    set_determinism(spec.train.wants_determinism, device)
    _built = _new(spec, run_dir)


def _new(spec: RunSpec, run_dir: RunDir) -> Built:
    if spec.code is not None:
        add_to_path(run_dir.storage, spec.code.archive)
    seed = spec.train.seed
    seed_building(seed, _TASK)
    task = build_task(spec)
    seed_building(seed, _DATASETS)
    datasets = checked_datasets(task, task.build_datasets())
    seed_building(seed, _MODEL)
    return Built(task, datasets, checked_model(task, task.build_model()))


def build_parts(ctx: WorkerContext) -> Parts:
    """Build everything from the spec's task, the same on every rank."""
    spec, train = ctx.spec, ctx.spec.train
    built = _built if _built is not None else _new(spec, ctx.run_dir)
    set_threads(spec)
    task, datasets, model = built.task, built.datasets, built.model
    contents = Contents(datasets)
    is_gathered = train.sharding in ("full", "hybrid")
    if not is_gathered:  # else module after module goes to the device, and this rank's rows stay
        model = model.to(ctx.device)
    in_eval = set_modes_for_training(model)
    require_fit_for(ctx.device, model)
    require_fits(spec, task, model, datasets["train"])
    train_set, sampler = training_data(ctx, task, datasets["train"])
    if lazy_names(model):
        loaded = train_set.first(sampler.first_micro_batch())
        seed_building(train.seed, _LAZY)  # reading samples has seeded the generators, too
        shape_lazy_tensors(task, model.to(ctx.device), to_device(loaded.batch, ctx.device))
    built_weights = sketch_weights(model, all_of_it=False)
    every_weight = sketch_weights(model, all_of_it=True) if is_gathered else None
    shards = shard_model(ctx, task, model, datasets.get("val")) if is_gathered else None
    warnings = list(warnings_of(model, in_eval))
    total_steps = train.max_steps or train.epochs * sampler.steps_per_epoch
    seed_building(train.seed, _OPTIMIZER)
    with nullcontext() if shards is None else shards.under_own_classes():
        optimizer = built_optimizer(spec, task, model)
    if shards is not None:
        require_elementwise(optimizer, optimizer_source(task))
        warnings += as_if_full(ctx, shards)
    elif train.sharding == "optimizer":
        shards = shard_optimizer(ctx, task, model, optimizer, optimizer_source(task))
    scheduler = built_scheduler(spec, task, optimizer, total_steps)
    state = TrainState(
        model,
        optimizer,
        build_scaler(train.precision, ctx.device),
        Ema(model, train.ema_decay) if train.ema_decay is not None else None,
        steps_per_epoch=sampler.steps_per_epoch,
        fingerprint=train_set.fingerprint + sampler.fingerprint,
        scheduler=scheduler,
        frozen=FrozenPart(model) if spec.checkpoint.parameters == "trainable" else None,
        model_source=where(task, "build_model"),
        contents=contents,
        sampler=sampler,
        bookmarks=train_set.bookmarks if isinstance(train_set, StreamSet) else None,
        data_source=where(task, "build_datasets") if spec.code is not None else None,
        shards=shards,
    )
    parts = Parts(
        task,
        datasets,
        train_set,
        sampler,
        state,
        TrainedParameters(model, optimizer),
        TaskState(task),
        total_steps,
        last_step=min(total_steps, spec.replay.to_step if spec.replay else total_steps),
        built_weights=built_weights,
        every_weight=every_weight,
    )
    for warning in warnings:
        parts.warn(warning)
    return parts


def build_datasets(ctx: WorkerContext, task: Task) -> dict[str, Any]:
    """Build the task's data sets, the same on every rank."""
    seed_building(ctx.spec.train.seed, _DATASETS)
    return checked_datasets(task, task.build_datasets())


# ---------------------------------------------------------------- training data

# The training set of a rank, and the order in which the run goes through it.


def training_data(ctx: WorkerContext, task: Task, dataset: Any) -> tuple[TrainingData, Sampler]:
    """Return the training set, read by index or as streams, and the order of its samples."""
    spec, train = ctx.spec, ctx.spec.train
    source = where(task, "build_datasets")
    if train.batch_by == "tokens":
        if is_iterable(dataset):
            raise BadTask(
                f"train.batch_by is tokens, but the train set of {source} is iterable, so nobody "
                "knows a sample's length before it is read. Give it __len__ and __getitem__, or "
                "leave batch_by out and yield what fits together"
            )
        name, size = f"{source}: train", spec.micro_batch_size
        by_tokens = token_sampler(train, size, dataset, ctx.most_samples, name)
        return KeyedDataset(dataset, train.seed, collate_of(task), training=True), by_tokens
    if not is_iterable(dataset):
        kind, size = Sampler, spec.micro_batch_size
        if makes_own_steps(task):
            kind, size = WholeShares, -(-train.global_batch_size // ctx.world_size)
        sampler = kind(ctx.limited(len(dataset)), train.global_batch_size, size, train.seed)
        return KeyedDataset(dataset, train.seed, collate_of(task), training=True), sampler
    if spec.scaling.shares == "by_speed":
        raise BadTask(
            f"scaling.shares is by_speed, but the train set of {source} is iterable, whose streams "
            "cannot move to another rank within an attempt. Give it __len__ and __getitem__, or "
            "set scaling.shares to equal"
        )
    streams = StreamSampler(
        epoch_length(source, dataset, train),
        train.global_batch_size,
        spec.micro_batch_size,
        train.seed,
        num_streams_of(spec),
    )
    return StreamSet(
        dataset, streams, spec, ctx.local_world_size, collate_of(task), source
    ), streams


# ---------------------------------------------------------------- lazy model

# Parameters without a shape, as of ``nn.LazyLinear``: they take it from the run's first
# micro-batch, before the optimizer and the exchange between ranks are built.


def lazy_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that have no shape yet."""
    return [name for name, value in _tensors(model) if is_lazy(value)]


def shape_lazy_tensors(task: Task, model: nn.Module, batch: Any) -> None:
    """Give every lazy parameter and buffer its shape and first values by a pass over ``batch``, and
    put back what else the pass changes. What it draws is up to the caller's seed.

    Raises BadTask if some have no shape after it.
    """
    lazy = [module for module in model.modules() if any(map(is_lazy, _own_tensors(module)))]
    present = [value for value in model.parameters() if not is_lazy(value)]
    trial = TrialPass(task, model, present, is_fresh=True)
    with torch.no_grad():
        task.loss(model, batch, **dict.fromkeys(loss_arguments(task), 0))
    trial.put_back()
    for module in lazy:
        if hasattr(module, "reset_running_stats"):  # of a LazyBatchNorm, which the pass has updated
            module.reset_running_stats()  # type: ignore[operator]
    if left := lazy_names(model):
        raise BadTask(
            f"{where(task, 'build_model')} returned parameters without a shape, and the first "
            f"micro-batch gives them none: {few(left)}. Call the model once in build_model, on an "
            "input that uses all of it"
        )


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    values = [*module._parameters.values(), *module._buffers.values()]
    return (value for value in values if value is not None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def exchanges_in_forward(model: nn.Module) -> bool:
    """Return whether a module exchanges values between ranks in every forward pass, so that all
    ranks must run the same number of them: one that normalises over all ranks, or a user's with an
    attribute ``exchanges_in_forward = True``."""
    return any(
        isinstance(module, nn.SyncBatchNorm) or getattr(module, "exchanges_in_forward", False)
        for module in model.modules()
    )


# ---------------------------------------------------------------- built optimizer

# The optimizer and the scheduler of a replica: the task's own, or those of the spec.


def built_optimizer(
    spec: RunSpec, task: Task, model: nn.Module
) -> torch.optim.Optimizer | Optimizers:
    """Return the optimizer that the task builds, else that of the spec; several in the form of one.
    Raises BadTask."""
    build_own = getattr(task, "build_optimizer", None)
    if build_own is None:
        skips_unused = spec.train.unused_parameters == "allow"
        return build_optimizer(spec.optimizer, model, skips_unused=skips_unused)
    built, source = build_own(model), where(task, "build_optimizer")
    if isinstance(built, Mapping | list | tuple):
        optimizer: torch.optim.Optimizer | Optimizers = _several(task, model, built)
    else:
        optimizer = checked_optimizer(task, model, built)
    check_no_scheduler(optimizer, source)
    return optimizer


def optimizer_source(task: Task) -> str:
    """Return who builds the optimizer, for errors."""
    if hasattr(task, "build_optimizer"):
        return where(task, "build_optimizer")
    return "the spec's optimizer"


def _several(task: Task, model: nn.Module, built: Any) -> Optimizers:
    source = where(task, "build_optimizer")
    if not makes_own_steps(task):
        raise BadTask(
            f"{source} returned several optimizers, but one loss has one step. Give the task the "
            "method training_step(model, batch, step, optimizers), or return one optimizer with "
            "several parameter groups"
        )
    if not isinstance(built, Mapping) or not all(
        isinstance(name, str) and name.isidentifier() for name in built
    ):
        raise BadTask(
            f"{source} must return several optimizers as a dict of names, not "
            f"{list(built)!r:.200}: checkpoints hold their states by name"
        )
    if not built:
        raise BadTask(f"{source} returned an empty dict; return at least one optimizer")
    return Optimizers(
        {name: checked_optimizer(task, model, each, name) for name, each in built.items()}
    )


def built_scheduler(
    spec: RunSpec, task: Task, optimizer: torch.optim.Optimizer | Optimizers, total_steps: int
) -> Any | None:
    """Return the scheduler that the task builds; None if it leaves that to the spec's schedule.
    Raises BadTask, also if the spec sets a schedule as well."""
    build_own = getattr(task, "build_scheduler", None)
    if build_own is None:
        return None
    if spec.schedule != ConstantScheduleSpec():
        raise BadTask(
            f"the spec sets schedule ({spec.schedule.name}), and {where(task, 'build_scheduler')} "
            "builds a scheduler: only one of them can set the learning rates. Remove schedule "
            "from the spec, or build_scheduler from the task"
        )
    if isinstance(optimizer, Optimizers):
        raise BadTask(
            f"{where(task, 'build_scheduler')} builds one scheduler, and build_optimizer several "
            "optimizers. Use schedule: in the spec, which scales the rates of all"
        )
    return checked_scheduler(task, optimizer, build_own(optimizer, total_steps))
