"""The passes of one rank: the module whose forward pass is one micro-batch's loss, the wrapper that
ties it to its peers, and what the attempt's first pass has found out about it.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import TrainSpec
from train_fn.checks.fits import require_elastic
from train_fn.checks.returns import checked_loss
from train_fn.checks.trained import modes_left
from train_fn.elastic.exchange import Exchange
from train_fn.loop.build import Parts, exchanges_in_forward
from train_fn.loop.sharded import read_past_a_call
from train_fn.samples.loader import Loaded, to_device
from train_fn.samples.sampler import MicroBatch, seed_micro_batch
from train_fn.step.buffers import MovingBuffers
from train_fn.step.peers import Peers, UsedParameters, fill_gradients, finish_exchange
from train_fn.step.precision import autocast
from train_fn.step.report_sums import ReportSums
from train_fn.tasks.protocol import Sum, loss_arguments, where

_CPU_BUCKET_MIB = 25
"""Size of every bucket on a CPU: DDP's default, without its small first bucket."""


_OTHERWISE = "Each rank calls it another number of times, so ranks would train different models. "
_is_training = operator.attrgetter("training")
logger = logging.getLogger(__name__)


class StepModule(nn.Module):
    """Computes the task's loss in its forward pass, so that all of it happens inside DDP's."""

    def __init__(
        self,
        parts: Parts,
        train: TrainSpec,
        device: torch.device,
        numbers: nn.Parameter | None,
        *,
        allows_unused: bool = False,
    ) -> None:
        """
        Args:
            numbers: the parameter with whose gradient the ranks' reports travel (``ReportSums``).
            allows_unused: whether an empty share uses no parameter, instead of all.
        """
        super().__init__()
        self.model, self.numbers = parts.state.model, numbers
        compiles = train.compile and train.sharding not in ("full", "hybrid")
        # In a tuple, because torch would register a module, and every parameter would have two
        # names.
        self._called: tuple[Any] = (torch.compile(self.model) if compiles else self.model,)
        self._task, self._precision, self._device = parts.task, train.precision, device
        # It knows the step and the epoch, which ``loss`` may take.
        self._state, self._asked = parts.state, loss_arguments(parts.task)
        self._allows_unused = allows_unused
        self._modules_of_model = list(self.model.modules())
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


class Passes:
    """Forward and backward passes over micro-batches. The last pass of a step sums the gradients
    over ranks, and sends this rank's report of the step along."""

    def __init__(self, spec: RunSpec, parts: Parts, peers: Peers) -> None:
        state, trained = parts.state, parts.trained
        self.parts, self.peers = parts, peers
        self.sums = ReportSums(peers)
        self.allows_unused = spec.train.unused_parameters == "allow"
        """Whether parameters that no micro-batch of a step used have no gradient, instead of zero.
        """
        self.module = StepModule(
            parts, spec.train, peers.device, self.sums.numbers, allows_unused=self.allows_unused
        )
        self.wrapped: DistributedDataParallel | StepModule | None = None
        """None until the rank has joined its peers."""
        self.exchanges_in_forward = exchanges_in_forward(state.model) or state.gathered is not None
        self._dense = [each for each in trained.parameters if id(each) not in self.module.sparse]
        self._exchanged = [each for each in self.module.parameters() if each.requires_grad]
        """In DDP's order."""
        self.tree: Exchange | None = None
        """None unless ``train.exactness`` is elastic. Then it stands in for DDP and ``sums``."""
        if spec.train.exactness == "elastic":
            has_sparse = bool(self.module.sparse)
            require_elastic(parts.task, exchanges=self.exchanges_in_forward, has_sparse=has_sparse)
            self.tree = Exchange(peers, trained.parameters, parts.sampler, spec.full_size)
        self.weight_per_sample = 1.0
        """A sample's weight in the first pass: 1, or for example the tokens of a sequence. Losses
        are divided by it before backward. Gradients are corrected afterwards, where samples weigh
        differently."""
        self.nothing: Any = None
        """What stands in for a batch of no samples."""
        self.used: UsedParameters | None = None
        """None unless ``allows_unused``."""
        self.changed: list[str] = []
        """Plain attributes of modules and task that the first pass changed."""
        self._num_empty = 0
        self.moving = MovingBuffers([], (), (), peers, state.carry)

    def forward(self, batch: Any | None) -> tuple[torch.Tensor, Sum]:
        """Return (loss sum, weight) of a micro-batch; of none if ``batch`` is None."""
        assert self.wrapped is not None
        answer: tuple[torch.Tensor, Sum] = self.wrapped(self.nothing if batch is None else batch)
        if batch is None and self.parts.state.gathered is not None:
            return answer[0] * 0.0, 0.0
        return answer

    def load(self, micro: MicroBatch) -> Loaded:
        """Read one training micro-batch without the loader."""
        loaded = self.parts.train_set.first(micro)
        return loaded._replace(batch=to_device(loaded.batch, self.peers.device))

    def note_empty(self) -> None:
        """Count a micro-batch for which ``collate`` returned None. Log it at 1, 2, 4, 8 …"""
        self._num_empty += 1
        if self._num_empty & (self._num_empty - 1) == 0:
            logger.warning(
                "collate returned None for %d micro-batches so far on this rank; they are left out",
                self._num_empty,
            )

    def seed(self, step: int, number: int) -> None:
        """Seed the generators for the next forward pass by the step and the canonical number of its
        micro-batch."""
        seed_micro_batch(self.parts.sampler.seed, step, number, self.peers.device)

    def loss_scale(self, num_samples: int) -> float:
        """Return the factor of a micro-batch's loss, in a global batch of so many samples."""
        averaged_over = 1 if self.tree is not None else self.peers.world_size  # by DDP
        return averaged_over / (num_samples * self.weight_per_sample)

    def finish(self) -> None:
        """Complete the step's gradients after the last backward pass, also of parameters that its
        last micro-batch did not use.

        Raises BadTask if the task changed which parameters are trained.
        """
        trained = self.parts.trained
        if isinstance(self.wrapped, DistributedDataParallel):
            trained.check_thawed()
            step = self.parts.state.step
            finish_exchange(self.wrapped, self._exchanged, step, trained.check_flags)
        else:
            trained.check_flags()
            if self.used is None:
                fill_gradients(self._dense)

    def let_go(self) -> None:
        """Take off what ties the parts to the peers of this attempt: DDP, hooks, and gradients in
        DDP's memory."""
        self.wrapped = None
        for hooked in (self.tree, self.used):
            if hooked is not None:
                hooked.remove_hooks()
        for parameter in self.parts.state.model.parameters():
            parameter.grad = None
