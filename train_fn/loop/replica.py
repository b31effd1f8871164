"""One rank's replica of what is trained: task, model, data, optimizer and state, and the wrapper
that ties it to its peers."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_fn.context import WorkerContext
from train_fn.elastic.exchange import Exchange
from train_fn.errors import BadTask
from train_fn.loop.after_step import AfterStep
from train_fn.loop.built_model import exchanges_in_forward, require_fit_for, warnings_of
from train_fn.loop.built_optimizer import built_optimizer, built_scheduler, optimizer_source
from train_fn.loop.elastic_rules import elastic_exchange
from train_fn.loop.first_pass import owners_of, run_first_pass, try_smallest
from train_fn.loop.lazy_model import lazy_names, shape_lazy_tensors
from train_fn.loop.own_updates import OwnUpdates, own_updates
from train_fn.loop.step_module import StepModule, empty_like, wrap
from train_fn.loop.training_data import training_data
from train_fn.node.debug_level import lowered_level
from train_fn.node.kernels import kernels
from train_fn.samples.loader import Loaded, TrainingData, to_device
from train_fn.samples.randomness import seed_building, seed_micro_batch
from train_fn.samples.sampler import MicroBatch, Sampler
from train_fn.samples.stream_set import StreamSet
from train_fn.state.contents import Contents, sketch
from train_fn.state.ema import Ema
from train_fn.state.frozen_part import FrozenPart
from train_fn.state.numerics import Numerics
from train_fn.state.task_state import TaskState
from train_fn.state.train_state import TrainState
from train_fn.state.trained_parameters import LearningRates, TrainedParameters
from train_fn.step.buffers import VolatileBuffers
from train_fn.step.carrier import Carrier
from train_fn.step.determinism import set_determinism
from train_fn.step.fingerprints import Fingerprints
from train_fn.step.modes import set_modes_for_training
from train_fn.step.peers import Peers
from train_fn.step.precision import build_scaler
from train_fn.step.step_plans import StepPlans
from train_fn.step.used_parameters import UsedParameters
from train_fn.step.whole_exchange import fill_gradients, finish_exchange
from train_fn.tasks.build import build_task
from train_fn.tasks.checks import checked_datasets, checked_model, where
from train_fn.tasks.own_step import require_fits
from train_fn.tasks.protocol import Sum, Task
from train_fn.user_code.modules import add_to_path
from train_fn.user_code.packages import bring_packages

logger = logging.getLogger(__name__)

_MODEL, _TASK, _DATASETS, _OPTIMIZER, _LAZY = 6, 8, 9, 10, 11
"""Purposes of the draws while each is built (``seed_building``)."""


@dataclass
class Replica:
    """What is trained on one rank. ``wrapped`` is None until the replica has joined its peers."""

    peers: Peers
    task: Task
    state: TrainState
    sampler: Sampler
    train_set: TrainingData
    val_set: Any | None
    step_module: StepModule
    carrier: Carrier
    """Sends the step's totals along with its gradients."""
    total_steps: int
    """Steps of the whole run, by which schedules go."""
    last_step: int
    """Steps after which this run ends: those of the whole run, or fewer of a replay."""
    wrapped: DistributedDataParallel | StepModule | None = None
    weight_per_sample: float = 1.0
    """A sample's weight in the first pass: 1, or for example the tokens of a sequence. Losses are
    divided by it before backward. Gradients are corrected afterwards, where samples weigh
    differently."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about the task, for the run's user."""
    allows_unused: bool = False
    """Whether parameters that no micro-batch of a step used have no gradient, instead of zero."""
    draws_from_torch_alone: bool = False
    """True for Everstep's own models: their forward passes draw from torch's generator only, and
    either all of them draw or none."""

    own_updates: OwnUpdates | None = None
    """None unless the task makes its own steps."""
    numerics: Numerics | None = None
    """The fingerprint of this rank's kernels; None before the first pass, and without one."""
    exchange: Exchange | None = None
    """None unless ``train.exactness`` is elastic. Then it stands in for DDP and ``carrier``."""

    def __post_init__(self) -> None:
        self.exchanges_in_forward = exchanges_in_forward(self.state.model)
        held = {
            id(parameter)
            for group in self.state.optimizer.param_groups
            for parameter in group["params"]
        }
        trained = [
            parameter for parameter in self.state.model.parameters() if parameter.requires_grad
        ]
        self.parameters = [parameter for parameter in trained if id(parameter) in held]
        """The parameters that a step changes."""
        self.idle_parameters = [parameter for parameter in trained if id(parameter) not in held]
        """Parameters that get gradients, but that the user's optimizer does not hold."""
        self._dense = [
            parameter
            for parameter in self.parameters
            if id(parameter) not in self.step_module.sparse
        ]
        self._exchanged = [
            parameter for parameter in self.step_module.parameters() if parameter.requires_grad
        ]
        """In DDP's order."""
        self.trained = TrainedParameters(self.state.model, self.state.optimizer)
        self.learning_rates = LearningRates(
            self.state.optimizer, optimizer_source(self.task), self.state.scheduler
        )
        self._nothing: Any = None
        self.num_empty = 0
        """Micro-batches of this attempt for which ``collate`` returned None."""
        self.draws = True
        """Whether a forward pass draws random numbers, as far as is known."""
        self.task_state = TaskState(self.task)
        self.after_step: AfterStep | None = None
        if getattr(self.task, "after_step", None) is not None:
            self.after_step = AfterStep(
                self.task,
                where(self.task, "after_step"),
                self.trained,
                {} if self.task_state else owners_of(self),
                alone=self.peers.alone,
            )
        self.used: UsedParameters | None = None
        """None unless ``allows_unused``."""
        self.changed_by_pass: list[str] = []
        """Plain attributes of modules and task that the first pass changed."""
        self.plans = StepPlans(self.sampler, self.peers.rank, self.peers.world_size)
        self.volatile = VolatileBuffers([], (), (), self.peers, self.state.carry)
        self.fingerprints = Fingerprints(self.parameters)
        self.must_agree = True
        """Whether the kernels of all ranks must give equal bits."""
        self.is_apart = False
        """Whether it was logged that they do not."""
        self.begun_at = 0
        """Steps done when the attempt began, with the same state on all ranks."""

    def join(self, *, is_fresh: bool = False) -> None:
        """Connect the replica to its peers, and run one backward pass whose gradients are dropped.

        DDP orders its buckets, and so the summation, by the first backward pass that it sees. Every
        attempt runs this one before the state is loaded, so that a resumed run sums in the same
        order as one that was never interrupted.

        Args:
            is_fresh: whether no state is loaded afterwards.
        """
        kinds = set(self.peers.gather(kernels(self.peers.device)))
        self.must_agree = len(kinds) == 1 and torch.are_deterministic_algorithms_enabled()
        if self.own_updates is not None:
            self.wrapped = self.step_module
            self.volatile = self.own_updates.join(self)
            return
        if self.peers.alone or self.exchange is not None:
            self.wrapped = self.step_module
        else:
            self.wrapped = wrap(self.step_module, self.peers.device)
        first = self.sampler.global_batch(0, 0)[: self.sampler.micro_batch_size]
        batch = self.load(MicroBatch(0, 0, first)).batch
        if batch is None and self.exchanges_in_forward:
            raise BadTask(
                f"{where(self.task, 'collate')} returned None for the first micro-batch; a model "
                "that exchanges in its forward pass "
                "needs to see one. Return a batch of no samples in place of None"
            )
        if self.allows_unused:
            self.used = UsedParameters(self.gradient_parameters, self.peers)
        self._nothing = empty_like(batch) if self.exchanges_in_forward else None
        loaded = sketch(batch)
        self.state.task = self.task_state.capture()
        try_smallest(self)
        self.volatile = run_first_pass(self, batch, loaded, first, is_fresh=is_fresh)
        if self.exchange is not None:
            self.exchange.watch()

    def warn(self, text: str) -> None:
        """Warn the user: in the log, and in the attempt's ``training_started`` event."""
        logger.warning("%s", text)
        self.warnings.append(text)

    def note_empty(self) -> None:
        """Count a micro-batch for which ``collate`` returned None. Log it at 1, 2, 4, 8 …"""
        self.num_empty += 1
        if self.num_empty & (self.num_empty - 1) == 0:
            logger.warning(
                "collate returned None for %d micro-batches so far on this rank; they are left out",
                self.num_empty,
            )

    def num_passes(self, own: int) -> int:
        """Return the number of forward passes for the present global batch, of which this rank has
        ``own`` micro-batches. At least one, since every rank takes part in the backward pass."""
        if self.exchanges_in_forward:  # as many as rank 0 makes, which has the largest share
            own = len(self.sampler.share(self.state.epoch, self.state.k, 0, self.peers.world_size))
        return max(1, own)

    def forward(self, batch: Any | None) -> tuple[torch.Tensor, Sum]:
        """Return (loss sum, weight) of a micro-batch; of none if ``batch`` is None."""
        assert self.wrapped is not None
        answer: tuple[torch.Tensor, Sum] = self.wrapped(self._nothing if batch is None else batch)
        return answer

    def load(self, micro: MicroBatch) -> Loaded:
        """Read one training micro-batch without the loader."""
        loaded = self.train_set.first(micro)
        return loaded._replace(batch=to_device(loaded.batch, self.peers.device))

    def seed(self, step: int, number: int) -> None:
        """Seed the generators for the next forward pass by the step and the canonical number of its
        micro-batch."""
        if self.draws:
            seed_micro_batch(
                self.sampler.seed,
                step,
                number,
                self.peers.device,
                torch_alone=self.draws_from_torch_alone,
            )

    @property
    def gradient_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that get gradients, also those that no step changes."""
        return [*self.parameters, *self.idle_parameters]

    def loss_scale(self, num_samples: int) -> float:
        """Return the factor of a micro-batch's loss, in a global batch of so many samples."""
        # DDP divides by world_size
        averaged_over = 1 if self.exchange is not None else self.peers.world_size
        return averaged_over / (num_samples * self.weight_per_sample)

    def synchronising(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a pass: only the last one of a share sums gradients over ranks."""
        if last or not isinstance(self.wrapped, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.wrapped.no_sync()

    def finish_exchange(self) -> None:
        """Complete the step's gradients after the last backward pass, also of parameters that its
        last micro-batch did not use.

        Raises BadTask if the task changed which parameters are trained.
        """
        if isinstance(self.wrapped, DistributedDataParallel):
            self.trained.check_thawed()
            finish_exchange(
                self.wrapped, self._exchanged, self.state.step, self.trained.check_flags
            )
        else:
            self.trained.check_flags()
            if self.used is None:
                fill_gradients(self._dense)


def build_replica(ctx: WorkerContext) -> Replica:
    """Build the replica from the spec, the same on every rank. Nothing is exchanged yet."""
    spec, train = ctx.spec, ctx.spec.train
    set_determinism(train.wants_determinism, ctx.device)
    bring_packages(ctx)
    if spec.code is not None:
        add_to_path(ctx.run_dir.storage, spec.code.archive)
    seed_building(train.seed, _TASK)
    task = build_task(spec)
    seed_building(train.seed, _DATASETS)
    datasets = checked_datasets(task, task.build_datasets())
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
    peers = Peers(ctx.world_rank, ctx.world_size, ctx.device)
    carrier = Carrier(peers)
    replica = Replica(
        peers=peers,
        task=task,
        state=state,
        sampler=sampler,
        train_set=train_set,
        val_set=datasets.get("val"),
        step_module=StepModule(
            task,
            model,
            train.precision,
            ctx.device,
            carrier.numbers,
            state,
            compiled=train.compile,
            allows_unused=train.unused_parameters == "allow",
        ),
        allows_unused=train.unused_parameters == "allow",
        carrier=carrier,
        total_steps=total_steps,
        last_step=total_steps if spec.replay is None else min(total_steps, spec.replay.to_step),
        draws_from_torch_alone=spec.code is None,
    )
    replica.own_updates = own_updates(replica, train.grad_clip_norm)
    if train.exactness == "elastic":
        replica.exchange = elastic_exchange(replica, spec.full_size)
    if debugging := lowered_level():
        replica.warn(debugging)
    for warning in warnings_of(model, in_eval):
        replica.warn(warning)
    return replica
