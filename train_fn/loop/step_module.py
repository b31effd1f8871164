"""The module whose forward pass is one micro-batch's loss, and DDP around it."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_fn.errors import BadTask
from train_fn.state.train_state import TrainState
from train_fn.step.precision import Precision, autocast
from train_fn.tasks.checks import checked_loss, where
from train_fn.tasks.options import loss_arguments
from train_fn.tasks.protocol import Sum, Task

_CPU_BUCKET_MIB = 25
"""Size of every bucket on a CPU: DDP's default, without its small first bucket."""


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
            numbers: the carrier's parameter, with whose gradient the step's totals travel.
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
                answer = self._task.loss(self._called[0], batch, **self._step_arguments())
            else:
                answer = self._task.loss(self._called[0], batch)
        if self._modes() != modes:
            raise BadTask(
                f"{where(self._task, 'loss')} left modules in another mode, train or eval, than "
                "before. Each rank calls it another number of times, so ranks would train "
                "different models. Put the mode back before it returns, or change it in "
                "on_epoch_end"
            )
        return checked_loss(self._task, answer)

    def _step_arguments(self) -> dict[str, int]:
        return {name: getattr(self._state, name) for name in self._asked}


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
