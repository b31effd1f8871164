"""``es.lightning.Protect``: the Trainer of Lightning.

>>> trainer = Trainer(callbacks=[es.lightning.Protect()])         # doctest: +SKIP

A step of the run is a batch after which an optimizer has stepped. The state is taken over once the
strategy has made model and optimizers, before Lightning would restore a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback

from train_fn.errors import BadTask
from train_fn.protect.arguments import check_torn, parts_of
from train_fn.protect.followed import after_batches, is_stateful, set_order
from train_fn.protect.place import OnItsOwn
from train_fn.protect.protected import Protected

__all__ = ["Protect"]


class Protect(Callback):  # type: ignore[misc]
    """Protect the loop of ``Trainer.fit``: add this to ``Trainer(callbacks=…)``, as the last."""

    def __init__(
        self,
        *,
        torn: str = "refuse",
        extra: Any = None,
        storage: str = "out/protect",
        run_id: str | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        fresh: bool = False,
    ) -> None:
        """The arguments are those of ``es.protect``. Manual optimization with several optimizers
        needs ``torn='shadow'``."""
        self._torn, self._extra = torn, extra
        self._settings = OnItsOwn(storage, run_id, checkpoint or {}, fresh)
        self._state: Protected | None = None
        self._place: _Place | None = None
        self._updates = 0

    # -- what Lightning calls

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over the newest trustworthy state."""
        _check(trainer)
        self._place = place = _Place(trainer, self)
        extras = {"given": self._extra} if self._extra is not None else {}
        given = parts_of(
            pl_module,
            _one_or_all(trainer.optimizers),
            _one_or_all([each.scheduler for each in trainer.lr_scheduler_configs]),
            {**extras, "trainer": place},
        )
        # Ranks may note different times and files in their callbacks.
        parts = dataclasses.replace(given, loaders=given.loaders | {"extra.trainer"})
        self._state = state = Protected(parts, check_torn(self._torn, parts), self._settings)
        # Lightning runs forward and backward in the closure that it gives to optimizer.step.
        state.is_told_of_updates = True
        state.__enter__()
        state.follow(trainer.strategy.model)
        self._updates = state.num_updates
        if state.step_number:
            place.restore()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the loaders go on at the very batch."""
        state, fit = self._open(), trainer.fit_loop
        if isinstance(total := trainer.estimated_stepping_batches, int) and total > 0:
            state.expect(total)
        progress = fit.epoch_loop.batch_progress
        num_done = 0 if progress.is_last_batch else progress.current.ready
        combined = fit._combined_loader
        combined.flattened = [
            loader if is_stateful(loader) else _Following(loader, trainer, state.seed, num_done)
            for loader in combined.flattened
        ]
        iter(fit._data_fetcher)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Seed what the batch draws: the loader may have drawn since the last commit."""
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self._open().reseed()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Mark the state torn."""
        if self._torn == "refuse":
            self._open().before_update()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Commit the step, if an optimizer has stepped."""
        state = self._open()
        if state.num_updates == self._updates:
            return  # gradients are being accumulated
        self._updates = state.num_updates
        state.step(**_metrics(trainer, outputs))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the final state."""
        self._open().finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the state of the last commit."""
        if self._state is not None:
            self._state.__exit__(type(exception), exception, exception.__traceback__)

    def _open(self) -> Protected:
        if self._state is None:
            raise BadTask("es.lightning.Protect protects Trainer.fit only")
        return self._state


class _Place:
    """What Lightning knows beside model, optimizers and schedulers."""

    def __init__(self, trainer: Any, protect: Protect) -> None:
        self._trainer, self._protect = trainer, protect
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        kept: dict[str, Any] = {}
        for callback in self._callbacks():
            callback.on_save_checkpoint(trainer, trainer.lightning_module, kept)
        trainer.lightning_module.on_save_checkpoint(kept)
        data = trainer.datamodule
        return {
            "loop": trainer.fit_loop.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
            "data": data.state_dict() if data is not None else {},
            "callbacks": {each.state_key: each.state_dict() for each in self._callbacks()},
            "hooks": kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def restore(self) -> None:
        """Give Lightning what was loaded."""
        trainer, state = self._trainer, self._loaded
        trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        for callback in self._callbacks():
            callback.on_load_checkpoint(trainer, trainer.lightning_module, state["hooks"])
            if known := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(known)
        trainer.lightning_module.on_load_checkpoint(state["hooks"])
        trainer.fit_loop.load_state_dict(state["loop"])
        self._loaded = {}

    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callbacks if each is not self._protect]


class _Following:
    """A loader whose epochs have an order by the run's seed, and whose first one goes on after the
    batches that were done."""

    def __init__(self, loader: Any, trainer: Any, seed: int, num_done: int) -> None:
        self._loader, self._trainer, self._seed, self._num_done = loader, trainer, seed, num_done

    def __iter__(self) -> Iterator[Any]:
        num_done, self._num_done = self._num_done, 0
        set_order(self._loader, self._seed, self._trainer.fit_loop.epoch_progress.current.processed)
        yield from after_batches(self._loader, num_done) if num_done else self._loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def _metrics(trainer: Any, outputs: Any) -> dict[str, Any]:
    """Return the loss of the batch, and the numbers that the module logs for every step."""
    found = {
        name.replace("/", "_"): value
        for name, value in trainer.callback_metrics.items()
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not name.startswith("val")
    }
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        found["loss"] = loss
    return found


def _check(trainer: Any) -> None:
    """Raise BadTask for a Trainer that cannot be protected."""
    if not trainer.optimizers:
        raise BadTask("es.lightning.Protect: configure_optimizers() returned no optimizer")
    if any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
        raise BadTask("es.lightning.Protect: LBFGS runs several passes in a step; use another one")
    if any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs):
        raise BadTask(
            "es.lightning.Protect: ReduceLROnPlateau steps after the step is committed; choose a "
            "scheduler that steps with the optimizer, or at the end of an epoch"
        )


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else list(found)
