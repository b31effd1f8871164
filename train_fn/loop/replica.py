"""One rank's replica of what is trained: task, model, data, optimizer and state, and the wrapper
that ties it to its peers.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_fn.checks.check import Check, Checks
from train_fn.checks.fits import require_elastic
from train_fn.checks.order import CallOrder
from train_fn.checks.ranks import SameAfterStep, Together
from train_fn.checks.returns import checked_loss
from train_fn.checks.trained import (
    DataKept,
    LearningRates,
    ModesKept,
    TrainedParameters,
    WeightsKept,
    modes_left,
)
from train_fn.context import WorkerContext
from train_fn.elastic.exchange import Exchange
from train_fn.loop.build import (
    Parts,
    build_parts,
    exchanges_in_forward,
    optimizer_source,
    was_built,
)
from train_fn.loop.own_step import OwnUpdates
from train_fn.loop.sharded import read_past_a_call
from train_fn.node.network import lowered_level
from train_fn.samples.loader import Loaded, to_device
from train_fn.samples.sampler import MicroBatch, seed_micro_batch
from train_fn.state.train_state import TaskState, TrainState
from train_fn.step.buffers import MovingBuffers
from train_fn.step.fingerprints import Fingerprints
from train_fn.step.peers import Peers, UsedParameters, fill_gradients, finish_exchange
from train_fn.step.precision import Precision, autocast, set_determinism
from train_fn.step.report_sums import ReportSums, StepPlans
from train_fn.tasks.protocol import Sum, Task, loss_arguments, makes_own_steps, step_method, where
from train_fn.user_code.packages import bring_packages

# ---------------------------------------------------------------- step module

# The module whose forward pass is one micro-batch's loss, and DDP around it.

_CPU_BUCKET_MIB = 25
"""Size of every bucket on a CPU: DDP's default, without its small first bucket."""


_OTHERWISE = "Each rank calls it another number of times, so ranks would train different models. "
_is_training = operator.attrgetter("training")


class StepModule(nn.Module):
    """Computes the task's loss in its forward pass, so that all of it happens inside DDP's."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        numbers: nn.Parameter | None,
        state: TrainState,
        *,
        compiled: bool,
        allows_unused: bool = False,
    ) -> None:
        """
        Args:
            numbers: the parameter with whose gradient the ranks' reports travel (``ReportSums``).
            state: knows the step and the epoch, which ``loss`` may take.
            allows_unused: whether an empty share uses no parameter, instead of all.
        """
        super().__init__()
        self.model = model
        self.numbers = numbers
        # In a tuple, because torch would register a module, and every parameter would have two
        # names.
        self._called: tuple[Any] = (torch.compile(model) if compiled else model,)
        self._task, self._precision, self._device = task, precision, device
        self._state, self._asked = state, loss_arguments(task)
        self._allows_unused = allows_unused
        self._modules_of_model = list(model.modules())
        self.sparse = {
            id(module.weight)
            for module in self._modules_of_model
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }
        """Ids of the parameters whose gradients are sparse."""

    def _modes(self) -> list[bool]:
        return list(map(_is_training, self._modules_of_model))

    def forward(self, batch: Any | None) -> tuple[torch.Tensor, Sum]:
        """Return (loss summed over the micro-batch, its weight). For an empty share, None, return a
        zero that depends on every parameter, or on none if that is allowed."""
        if batch is None and self._allows_unused:
            assert self.numbers is not None
            return self.numbers.sum() * 0.0, 0.0
        if batch is None:
            used = [
                _zero_of(parameter, is_sparse=id(parameter) in self.sparse)
                for parameter in self.model.parameters()
                if parameter.requires_grad
            ]
            return torch.stack(used).sum(), 0.0
        modes = self._modes()
        with autocast(self._precision, self._device):
            if self._asked:
                arguments = {name: getattr(self._state, name) for name in self._asked}
                answer = self._task.loss(self._called[0], batch, **arguments)
            else:
                answer = self._task.loss(self._called[0], batch)
        if self._modes() != modes:
            raise modes_left(where(self._task, "loss"), _OTHERWISE)
        loss_sum, weight = checked_loss(self._task, answer)
        if hasattr(loss_sum, "device_mesh"):
            refused = read_past_a_call("the loss is a DTensor", self._task)
            assert refused is not None
            raise refused
        return loss_sum, weight


def _zero_of(parameter: nn.Parameter, *, is_sparse: bool) -> torch.Tensor:
    """Return a real zero that depends on ``parameter``, and whose gradient has the layout of any
    other micro-batch's."""
    if is_sparse:
        nowhere = torch.zeros(0, dtype=torch.int64, device=parameter.device)
        return F.embedding(nowhere, parameter, sparse=True).sum()
    if parameter.is_complex():
        return torch.view_as_real(parameter).sum() * 0.0
    return parameter.sum() * 0.0


def wrap(module: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Return DDP around ``module``, without what the replica does itself: ``restore`` broadcasts
    the state, and a step's commit the buffers.

    DDP's first bucket is small, so that a device begins to exchange early in backward. On a CPU the
    exchange takes the cores that compute, and one more bucket only costs time. The size depends on
    the device alone: buckets decide the order in which gradients are summed, which must be the same
    wherever a run's ranks are.
    """
    bucket_mib = None if device.type == "cuda" else _CPU_BUCKET_MIB
    return DistributedDataParallel(
        module,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        init_sync=False,
        bucket_cap_mb=bucket_mib,
    )


def empty_like(batch: Any) -> Any:
    """Return a batch of no samples with the structure of ``batch``: every tensor has length 0 along
    its first dimension."""
    if isinstance(batch, torch.Tensor):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, dict):
        return {name: empty_like(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(empty_like(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(empty_like(value) for value in batch)
    return batch


# ---------------------------------------------------------------- replica

logger = logging.getLogger(__name__)


@dataclass
class Replica:
    """What is trained on one rank. ``wrapped`` is None until the replica has joined its peers."""

    ctx: WorkerContext
    peers: Peers
    parts: Parts
    step_module: StepModule
    sums: ReportSums
    """Sends this rank's report of a step along with its gradients."""
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
    exchange: Exchange | None = None
    """None unless ``train.exactness`` is elastic. Then it stands in for DDP and ``sums``."""

    def __post_init__(self) -> None:
        parts = self.parts
        self.task, self.state, self.total_steps = parts.task, parts.state, parts.total_steps
        self.sampler, self.train_set = parts.sampler, parts.train_set
        self.val_set = parts.datasets.get("val")
        shards = self.state.shards
        self.shards = shards if shards is not None and shards.gathers else None
        """None for a model whose weights every rank holds."""
        self.exchanges_in_forward = (
            exchanges_in_forward(self.state.model) or self.shards is not None
        )
        self.order = CallOrder([self.state.model], self.peers) if self.shards is not None else None
        groups = self.state.optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        trained = [each for each in self.state.model.parameters() if each.requires_grad]
        self.parameters = [parameter for parameter in trained if id(parameter) in held]
        """The parameters that a step changes."""
        self.idle_parameters = [parameter for parameter in trained if id(parameter) not in held]
        """Parameters that get gradients, but that the user's optimizer does not hold."""
        self._dense = [each for each in self.parameters if id(each) not in self.step_module.sparse]
        self._exchanged = [each for each in self.step_module.parameters() if each.requires_grad]
        """In DDP's order."""
        self.trained = TrainedParameters(self.state.model, self.state.optimizer)
        self.learning_rates = LearningRates(
            self.state.optimizer, optimizer_source(self.task), self.state.scheduler
        )
        self.nothing: Any = None
        self.num_empty = 0
        """Micro-batches of this attempt for which ``collate`` returned None."""
        self.draws = True
        """Whether a forward pass draws random numbers, as far as is known."""
        self.task_state = TaskState(self.task)
        has_hook = getattr(self.task, "after_step", None) is not None
        self.after_step = where(self.task, "after_step") if has_hook else None
        """Name of the task's hook, for errors; None if there is none."""
        self.used: UsedParameters | None = None
        """None unless ``allows_unused``."""
        self.changed_by_pass: list[str] = []
        """Plain attributes of modules and task that the first pass changed."""
        self.plans = StepPlans(self.sampler, self.peers.rank, self.peers.world_size)
        self.moving = MovingBuffers([], (), (), self.peers, self.state.carry)
        self.fingerprints = Fingerprints(self.parameters)
        source = step_method(self.task)
        self.together = Together(
            self.ctx, self.peers, self.state, self.trained, self.fingerprints, source
        )
        self.checks = Checks(_checks_of(self))
        self.before_hook: str | None = None
        """Digest of the state before the task's ``on_epoch_end``, which runs; None if it does not.
        """

    @property
    def order_at_first(self) -> CallOrder | None:
        """Return the order of a sharded model's calls in the first two steps; else None."""
        return self.order if self.state.step < self.together.begun_at + 2 else None

    def let_go(self) -> None:
        """Take off what ties the parts to the peers of this attempt: DDP, hooks, and gradients in
        DDP's memory."""
        self.wrapped = None
        mean = None if self.own_updates is None else self.own_updates.mean
        for hooked in (self.exchange, self.used, mean):
            if hooked is not None:
                hooked.remove_hooks()
        for parameter in self.state.model.parameters():
            parameter.grad = None

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
        answer: tuple[torch.Tensor, Sum] = self.wrapped(self.nothing if batch is None else batch)
        if batch is None and self.shards is not None:
            return answer[0] * 0.0, 0.0
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


def _checks_of(replica: Replica) -> list[Check]:
    """Return the checks of Everstep's own loop, in the order in which they are made."""
    state, trained = replica.state, replica.trained
    checks: list[Check] = [
        DataKept(replica.train_set),
        ModesKept(state.model),
        trained,
        WeightsKept(trained),
        replica.together,
    ]
    has_hook = replica.after_step is not None
    return [*checks, SameAfterStep(replica.peers, state)] if has_hook else checks


def build_replica(ctx: WorkerContext) -> Replica:
    """Build the replica from the spec, the same on every rank. Nothing is exchanged yet."""
    spec, train = ctx.spec, ctx.spec.train
    bring_packages(ctx)  # all ranks wait there for those that are new
    if not was_built():
        set_determinism(train.wants_determinism, ctx.device)  # the build may choose otherwise
    parts = build_parts(ctx)
    peers = Peers(ctx.world_rank, ctx.world_size, ctx.device)
    sums = ReportSums(peers)
    allows_unused = train.unused_parameters == "allow"
    replica = Replica(
        ctx=ctx,
        peers=peers,
        parts=parts,
        step_module=StepModule(
            parts.task,
            parts.state.model,
            train.precision,
            ctx.device,
            sums.numbers,
            parts.state,
            compiled=train.compile and train.sharding not in ("full", "hybrid"),
            allows_unused=allows_unused,
        ),
        allows_unused=allows_unused,
        sums=sums,
        last_step=min(parts.total_steps, spec.replay.to_step if spec.replay else parts.total_steps),
        draws_from_torch_alone=spec.code is None,
    )
    if makes_own_steps(parts.task):
        replica.own_updates = OwnUpdates(
            parts.task, parts.state, replica.checks, peers, train.grad_clip_norm
        )
    if train.exactness == "elastic":
        has_sparse = bool(replica.step_module.sparse)
        exchanges = replica.exchanges_in_forward
        require_elastic(parts.task, exchanges=exchanges, has_sparse=has_sparse)
        replica.exchange = Exchange(peers, replica.parameters, replica.sampler, spec.full_size)
    if not spec.recovery.in_process:
        replica.warn("recovery.in_process has no effect any more; leave it out of the spec")
    if debugging := lowered_level():
        replica.warn(debugging)
    if (most := spec.most_workers) < spec.scaling.max_workers:
        replica.warn(
            f"scaling.max_workers is {spec.scaling.max_workers}, but a global batch has {most} "
            f"micro-batches, so the run uses at most {most} ranks; lower train.micro_batch_size to "
            "use more"
        )
    for warning in parts.warnings:
        replica.warn(warning)
    return replica
