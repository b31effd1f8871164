"""What Lightning's Trainer knows beside model and optimizers: a part of a protected state, and how
Lightning goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.evaluation_loop import RestartStage

from train_fn.errors import BadTask
from train_fn.protect.followed import after_batches, set_order
from train_fn.state.tensor_tree import put_together, take_apart


class LightningPlace:
    """What Lightning knows beside model, optimizers and schedulers."""

    def __init__(self, trainer: Any, protect: Any) -> None:
        self._trainer, self._protect = trainer, protect
        self._noted: dict[str, Any] = {}

    def note(self) -> None:
        """Take the present state as that of the commit. What Lightning does between two steps is
        done again after a restart."""
        trainer = self._trainer
        kept: dict[str, Any] = {}
        for callback in self._callbacks():
            callback.on_save_checkpoint(trainer, trainer.lightning_module, kept)
        trainer.lightning_module.on_save_checkpoint(kept)
        data = trainer.datamodule
        tensors: list[torch.Tensor] = []
        present = {
            "loop": trainer.fit_loop.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
            "data": data.state_dict() if data is not None else {},
            "callbacks": {each.state_key: each.state_dict() for each in self._callbacks()},
            "hooks": kept,
            "metrics": dict(trainer.callback_metrics),
            "should_stop": trainer.should_stop,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
        }
        # Callbacks hand out the dicts that they go on changing.
        self._noted = put_together(take_apart(present, tensors), tensors)

    def state_dict(self) -> dict[str, Any]:
        if not self._noted:
            self.note()
        return self._noted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._noted = state

    def restore(self) -> None:
        """Give Lightning what was loaded."""
        trainer, state, fit = self._trainer, self._noted, self._trainer.fit_loop
        trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        for callback in self._callbacks():
            callback.on_load_checkpoint(trainer, trainer.lightning_module, state["hooks"])
            if known := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(known)
        trainer.lightning_module.on_load_checkpoint(state["hooks"])
        # A monitor may read what an earlier evaluation measured.
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        trainer.should_stop = state["should_stop"]
        fit.load_state_dict(state["loop"])
        # The commit was made by a hook at the end of the batch, which is completed now.
        fit.epoch_loop.batch_progress.increment_completed()
        if 0 <= fit.max_steps <= fit.epoch_loop.global_step:
            _enter_once_more(fit)

    def restore_schedule(self) -> None:
        """Accumulate gradients as at the commit, once a callback for that has begun."""
        self._trainer.accumulate_grad_batches = self._noted["accumulate_grad_batches"]

    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callbacks if each is not self._protect]


def _enter_once_more(fit: Any) -> None:
    """Let Lightning enter a loop that has made its last step, for what was due after it."""
    epoch, limit = fit.epoch_loop, fit.epoch_loop.max_steps
    epoch.max_steps = epoch.global_step + 1

    def advance() -> None:
        del fit.advance
        epoch.max_steps = limit
        fit.advance()

    fit.advance = advance


def do_what_was_due(fit: Any) -> None:
    """Let Lightning evaluate again, and call the hooks of an epoch that ends, where it would have
    done so after the step that is restored: their results are not part of its state."""
    epoch = fit.epoch_loop
    if epoch._should_check_val_fx(fit._data_fetcher):
        epoch.val_loop.restarting = False
        epoch.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        return
    epoch._batches_that_stepped += 1
    if epoch._is_training_done or "advance" in vars(fit):

        def run(_: Any) -> None:
            del epoch.run
            epoch.on_iteration_done()

        epoch.run = run  # it would train another batch


def batches_done(loader: Any, num_done: int, *, cycles: bool) -> int:
    """Return how many batches of its present pass a loader has yielded.

    Args:
        num_done: batches of the epoch.
        cycles: the loader begins anew within an epoch, until a longer one ends.
    """
    if not cycles or not num_done:
        return num_done
    if sized_len(loader) is None:
        raise BadTask(
            "es.lightning.Protect: one of several loaders has no length, so where it is in a "
            "cycle is not known; use CombinedLoader(…, mode='min_size') or 'max_size'"
        )
    return num_done % len(loader)


class FollowingLoader:
    """A loader whose epochs have an order by the run's seed, and whose first one goes on after the
    batches that were done."""

    def __init__(self, loader: Any, trainer: Any, seed: int, num_done: int) -> None:
        self._loader, self._trainer, self._seed, self._num_done = loader, trainer, seed, num_done

    def __iter__(self) -> Iterator[Any]:
        num_done, self._num_done = self._num_done, 0
        return self._rest(num_done)

    def _rest(self, num_done: int) -> Iterator[Any]:
        set_order(self._loader, self._seed, self._trainer.fit_loop.epoch_progress.current.processed)
        yield from after_batches(self._loader, num_done) if num_done else self._loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
