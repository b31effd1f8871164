"""What a task that makes its own steps uses beside the replica: its optimizers, the hooks that
average gradients, and the copy of the state that a broken step leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from train_fn.errors import BadTask
from train_fn.loop.build import owners_of, warn_of_lost
from train_fn.state.kept_state import Shadows
from train_fn.state.optim import Optimizers, each_of
from train_fn.state.train_state import TrainState
from train_fn.state.trained_parameters import TrainedParameters
from train_fn.step.buffers import VolatileBuffers
from train_fn.step.peers import Peers
from train_fn.step.plain_attributes import PlainAttributes
from train_fn.step.precision import modes_of
from train_fn.step.rank_mean import RankMean
from train_fn.step.untrained import untrained_places
from train_fn.tasks.checks import where
from train_fn.tasks.own import LOSS, METHOD, checked_values, makes_own_steps
from train_fn.tasks.protocol import Task

if TYPE_CHECKING:
    from train_fn.loop.replica import Replica


class OwnUpdates:
    """Call ``training_step`` of one replica's task.

    Args:
        max_norm: clips each optimizer's gradients, averaged over ranks; None for never.
        owners: objects by name. A warning names their plain attributes that the first step changes,
            which no state holds.
    """

    def __init__(
        self,
        task: Task,
        state: TrainState,
        trained: TrainedParameters,
        peers: Peers,
        max_norm: float | None,
        owners: dict[str, object],
    ) -> None:
        self.source = where(task, METHOD)
        self._task: Any = task
        self._trained, self._peers = trained, peers
        self._owners: dict[str, object] | None = owners
        self._optimizers = (
            state.optimizer.by_name if isinstance(state.optimizer, Optimizers) else state.optimizer
        )
        self.mean = RankMean(each_of(state.optimizer), peers, max_norm, self.source)
        self.shadow = Shadows(state, keeps_older=False)
        """Holds the state with which the present step began."""
        self.lr: float | None = 0.0
        """The learning rate of the present step."""
        self.values: dict[str, float | None] = {}
        """Metrics of the step over all ranks, beside its loss."""
        self._names: list[str] | None = None

    def join(self, replica: Replica) -> VolatileBuffers:
        """Return what may change in a step, which counts as one forward pass: any buffer of the
        model. No step is tried before the first one: it would change the optimizers."""
        if not replica.parts.is_kept:
            replica.state.task = replica.task_state.capture()
        places = untrained_places(replica.state.model, replica.parameters)
        buffers = [number for number, place in enumerate(places) if place.is_buffer]
        return VolatileBuffers(places, buffers, (), self._peers, replica.state.carry)

    @property
    def has_loss(self) -> bool:
        """Return whether the steps report a loss."""
        return LOSS in (self._names or ())

    def measured(self) -> dict[str, float | None]:
        """Return the step's metrics beside its loss: those of the task over all ranks, and the
        gradients' norms before they were clipped."""
        norms = {f"grad_norm{name and f'_{name}'}": each for name, each in self.mean.norms.items()}
        return {**norms, **self.values}

    def run(self, state: TrainState, batch: Any) -> dict[str, torch.Tensor]:
        """Let the task make its step, and return its metrics on this rank. Raises BadTask."""
        owners, self._owners = self._owners, None
        before = PlainAttributes(owners) if owners is not None else None
        modes = modes_of(state.model)
        values = checked_values(
            self._task, self._task.training_step(state.model, batch, state.step, self._optimizers)
        )
        self.mean.end()
        if modes_of(state.model) != modes:
            raise BadTask(
                f"{self.source} left modules in another mode, train or eval, than before. Put the "
                "mode back before it returns, or change it in on_epoch_end"
            )
        self._trained.check(self.source)
        if not self.mean.num_updates:
            raise BadTask(
                f"{self.source} stepped no optimizer: call backward() and then step() of each "
                "optimizer that it is given"
            )
        warn_of_lost(self.source, before)
        self._agree_on_names(list(values))
        return values

    def _agree_on_names(self, names: list[str]) -> None:
        """Require the same metrics on all ranks and in every step. A collective in the first
        step."""
        if self._names is None:
            of_ranks = self._peers.gather(names)
            self._names = of_ranks[0]
        if names != self._names:
            raise BadTask(
                f"{self.source} returned the metrics {names}, where rank 0 returned {self._names} "
                "in the first step; return the same on every rank and in every step"
            )


def own_updates(replica: Replica, max_norm: float | None) -> OwnUpdates | None:
    """Return what the replica of a task that makes its own steps uses for them; None for another
    task."""
    if not makes_own_steps(replica.task):
        return None
    owners = {} if replica.task_state else owners_of(replica.task, replica.state.model)
    return OwnUpdates(replica.task, replica.state, replica.trained, replica.peers, max_norm, owners)
