"""The task's hook ``after_step(model, step)``, which changes the model after each update: an
average of the weights as a teacher, a queue, weights that are clipped."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from train_fn.loop.build import warn_of_lost
from train_fn.samples.sampler import seed_micro_batch
from train_fn.state.train_state import TrainState
from train_fn.state.trained_parameters import TrainedParameters
from train_fn.step.buffers import VolatileBuffers
from train_fn.step.fingerprints import word_sum
from train_fn.step.plain_attributes import PlainAttributes
from train_fn.tasks.protocol import Task

_NUMBER = -1
"""Seeds what the hook draws. Micro-batches have numbers from 0 on."""


class AfterStep:
    """Call the hook of one replica. It is part of the commit, so no rank may wait for others in it.

    Args:
        source: name of the hook, with its file and line.
        owners: objects by name. A warning names their plain attributes that the hook changes, which
            no state holds.
    """

    def __init__(
        self,
        task: Task,
        source: str,
        trained: TrainedParameters,
        owners: dict[str, object],
        *,
        alone: bool,
    ) -> None:
        self.source = source
        self._hook = task.after_step  # type: ignore[attr-defined]
        self._trained, self._alone = trained, alone
        self._owners: dict[str, object] | None = owners
        self.sums: tuple[dict[str, int], dict[str, int]] | None = None
        """Sums of the words of each tensor, before and after the hook of the present step; None if
        the ranks are not to be compared."""

    @torch.no_grad()
    def __call__(
        self, state: TrainState, volatile: VolatileBuffers, seed: int, device: torch.device
    ) -> None:
        """Run the hook after the update of the present step. What it draws is the same on all
        ranks, and in all attempts."""
        owners, self._owners = self._owners, None
        before = PlainAttributes(owners) if owners is not None else None
        is_last = (state.step + 1) % state.steps_per_epoch == 0
        is_compared = not self._alone and (before is not None or is_last)
        sums = _sums(state) if is_compared else {}
        seed_micro_batch(seed, state.step, _NUMBER, device)
        self._hook(state.model, state.step)
        volatile.rebase()
        self._trained.check(self.source)
        self.sums = (sums, _sums(state)) if is_compared else None
        warn_of_lost(self.source, before)


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the tensors of the model that the run's state holds, by name."""
    held = {**state.model.state_dict(), **state.unsaved()}
    return {
        name: value
        for name, value in held.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not is_lazy(value)
    }


def _sums(state: TrainState) -> dict[str, int]:
    return {name: word_sum(value) for name, value in tensors_of(state).items()}
