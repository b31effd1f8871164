"""``es.lightning.Protect``: the Trainer of Lightning.

>>> trainer = Trainer(callbacks=[es.lightning.Protect()])         # doctest: +SKIP

A step of the run is a batch after which an optimizer has stepped. The state is taken over once the
strategy has made model and optimizers, before Lightning would restore a checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from train_fn.errors import BadTask
from train_fn.protect.adapters.trainer_state import CallbackWatch, NotedBatches, keeps_itself
from train_fn.protect.arguments import check_torn, named, parts_of
from train_fn.protect.batches import Taken
from train_fn.protect.data_order import (
    BegunElsewhere,
    after_batches,
    divides,
    samplers_of,
    set_order,
)
from train_fn.protect.protected import Protected
from train_fn.protect.training import OnItsOwn
from train_fn.samples.sampler import digest_of, own_generators
from train_fn.state.tensor_tree import put_together, take_apart

__all__ = ["Protect"]

_LOADERS = "combined_loader"
_BATCH_END = "on_train_batch_end"
"""In the state of Lightning's loop: what loaders with ``state_dict`` say of their places."""
_MOST_AHEAD = 4
"""Newest batches of a loader that are known. Lightning reads one ahead if it has no length."""

logger = logging.getLogger(__name__)


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
        fresh: bool | None = None,
    ) -> None:
        """The arguments are those of ``es.protect``. Manual optimization with several optimizers
        needs ``torn='shadow'``."""
        self._torn, self._extra = torn, extra
        self._settings = OnItsOwn(storage, run_id, checkpoint or {}, fresh)
        self._state: Protected | None = None
        self._place: LightningPlace | None = None
        self._updates = 0
        self._combined: Any = None
        """The loaders that follow the run."""
        self._max_steps = 0
        self._watch: CallbackWatch | None = None
        self._skips: Callable[..., None] | None = None
        """What stands for the module's hook, which was called already, until Lightning calls it."""
        self._counting: list[Any] = []
        """Checkpoint callbacks that number files of one name, and do not while the last step's are
        written again."""

    # -- what Lightning calls

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Come after all callbacks but those that save: a commit holds what they do in a batch."""
        if stage != "fit":
            return
        others = [each for each in trainer.callbacks if each is not self]
        saving = [each for each in others if isinstance(each, Checkpoint)]
        trainer.callbacks = [*(each for each in others if each not in saving), self, *saving]
        unkept = [each for each in others if not keeps_itself(each)]
        self._watch = CallbackWatch(unkept, self._extra, "es.lightning.Protect(extra=…)")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over the newest trustworthy state."""
        if self._state is not None:
            raise BadTask(
                "es.lightning.Protect: fit() was called a second time; make another Trainer with a "
                "Protect of its own for another training"
            )
        _check(trainer)
        self._max_steps = trainer.max_steps
        self._place = place = LightningPlace(trainer, self)
        extras = {name or "given": each for name, each in named("extra", self._extra).items()}
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
        state.ends_with_commit = True
        state.__enter__()
        state.follow(trainer.strategy.model)
        self._updates = state.num_updates
        if state.step_number:
            if trainer.ckpt_path is not None:
                logger.warning(
                    "trainer.fit(ckpt_path=…) is left out of account: the run goes on from its own "
                    "state of step %d",
                    state.step_number,
                )
                trainer._checkpoint_connector._loaded_checkpoint = {}
            place.restore()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the loaders go on at the very batch, and do what was due after the step."""
        state = self._open()
        if isinstance(total := trainer.estimated_stepping_batches, int) and total > 0:
            state.expect(total if trainer.max_steps < 0 else min(total, self._max_steps))
        if not state.step_number:
            self._follow(trainer, 0)
            return
        assert self._place is not None
        self._place.restore_schedule()
        epoch = trainer.fit_loop.epoch_loop
        self._follow(trainer, epoch.batch_progress.current.ready)
        for callback in trainer.checkpoint_callbacks:
            # It writes again what it may have written: under the same name.
            if getattr(callback, "_enable_version_counter", False):
                callback._enable_version_counter = False
                self._counting.append(callback)
            # Lightning calls it after this one, so it was not part of the commit.
            callback.on_train_batch_end(trainer, pl_module, None, None, epoch.batch_idx)
        do_what_was_due(trainer.fit_loop)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Let loaders that were made anew follow the run, too."""
        if trainer.fit_loop._combined_loader is not self._combined:
            self._follow(trainer, 0)

    def _follow(self, trainer: Any, num_done: int) -> None:
        fit, state = trainer.fit_loop, self._open()
        assert self._place is not None
        self._combined = combined = fit._combined_loader
        loaders = list(combined.flattened)
        cycles = combined._mode == "max_size_cycle" and len(loaders) > 1
        own = [digest_of(own_generators(samplers_of(each), of_samplers=True)) for each in loaders]
        differ = [len(set(of_ranks)) > 1 for of_ranks in zip(*state.gather(own), strict=True)]
        combined.flattened = self._place.loaders = [
            FollowingLoader(
                loader,
                number,
                self._place,
                state,
                batches_done(loader, num_done, cycles=cycles),
                draws_by_rank=differ[number],
            )
            for number, loader in enumerate(loaders)
        ]
        iter(fit._data_fetcher)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Seed what the batch draws: the loader may have drawn since the last commit."""
        while self._counting:
            self._counting.pop()._enable_version_counter = True
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self._open().reseed()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Mark the state torn."""
        if self._torn == "refuse":
            self._open().before_update()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Commit the step, if an optimizer has stepped, with what the module does at its end."""
        state = self._open()
        pl_module.on_train_batch_end(outputs, batch, batch_idx)
        # Lightning calls it next. Nothing may stay on the module, which code copies and saves.
        of_module = vars(pl_module)
        own = of_module.get(_BATCH_END)

        def skip_once(*_: Any) -> None:
            del of_module[_BATCH_END]
            if own is not None:
                of_module[_BATCH_END] = own

        pl_module.on_train_batch_end = self._skips = skip_once
        if state.num_updates == self._updates:
            return  # gradients are being accumulated
        self._updates = state.num_updates
        assert self._place is not None and self._watch is not None
        self._watch.committing()
        self._place.note(state)
        state.step(**_metrics(trainer, outputs))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the final state."""
        self._open().finish()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the final state, where Lightning had nothing left to train."""
        self._open().finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the state of the last commit."""
        if self._skips is not None and vars(pl_module).get(_BATCH_END) is self._skips:
            self._skips()
        if self._state is not None:
            self._state.__exit__(type(exception), exception, exception.__traceback__)

    def _open(self) -> Protected:
        if self._state is None:
            raise BadTask("es.lightning.Protect protects Trainer.fit only; call trainer.fit()")
        return self._state


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
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        raise BadTask(
            f"es.lightning.Protect: {type(trainer.strategy).__name__} shards the state in a way "
            "that nothing can take apart. Use FSDP2: ModelParallelStrategy, and fully_shard in "
            "configure_model()"
        )
    if all(isinstance(each, _MockOptimizer) for each in trainer.optimizers):
        raise BadTask(
            "es.lightning.Protect: configure_optimizers() returned no optimizer; return one"
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
        raise BadTask("es.lightning.Protect: LBFGS runs several passes in a step; use another one")
    if any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs):
        raise BadTask(
            "es.lightning.Protect: ReduceLROnPlateau steps after the step is committed; choose a "
            "scheduler that steps with the optimizer, or at the end of an epoch"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise BadTask(
                f"es.lightning.Protect: {type(callback).__name__} swaps weights outside of the "
                "step that is committed; average them in optimizer_step() of the module, in a "
                "torch.optim.swa_utils.AveragedModel that you pass as Protect(extra=…)"
            )
        if isinstance(callback, BaseFinetuning):
            raise BadTask(
                f"es.lightning.Protect: {type(callback).__name__} changes what is trained when an "
                "epoch begins, which a restart within the epoch cannot do again; build the "
                "optimizer with all that will be trained, and set learning rates by a scheduler"
            )
    if trainer.reload_dataloaders_every_n_epochs > 1:
        raise BadTask(
            f"es.lightning.Protect: reload_dataloaders_every_n_epochs="
            f"{trainer.reload_dataloaders_every_n_epochs} counts from where a restart begins; set "
            "it to 1 or 0"
        )


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else list(found)


# ---------------------------------------------------------------- lightning state

# What Lightning's Trainer knows beside model and optimizers: a part of a protected state, and how
# Lightning goes on from there.


class LightningPlace:
    """What Lightning knows beside model, optimizers and schedulers."""

    def __init__(self, trainer: Any, protect: Any) -> None:
        self._trainer, self._protect = trainer, protect
        self._noted: dict[str, Any] = {}
        self.batches = NotedBatches()
        self.loaders: list[FollowingLoader] = []
        """Those that follow the run, once they do."""

    @property
    def epoch(self) -> int:
        """Return the number of the present epoch."""
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    @property
    def mark(self) -> int:
        """Return a digest of the newest batches; 0 if none is known."""
        return self.batches.mark

    def note(self, state: Protected | None = None) -> None:
        """Take the present state as that of the commit. What Lightning does between two steps is
        done again after a restart.

        Args:
            state: None before the first commit.
        """
        trainer = self._trainer
        if state is not None:
            num_done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self.batches.note([each.taken(num_done) for each in self.loaders], state)
        kept: dict[str, Any] = {}
        for callback in self._callbacks():
            callback.on_save_checkpoint(trainer, trainer.lightning_module, kept)
        trainer.lightning_module.on_save_checkpoint(kept)
        data, loop = trainer.datamodule, trainer.fit_loop.state_dict()
        loop["state_dict"].pop(_LOADERS, None)  # of one rank: loaders go on by their place
        tensors: list[torch.Tensor] = []
        present = {
            "loop": loop,
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
        return {**self._noted, **self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._noted = state
        self.batches.load_state_dict(state)

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
                if isinstance(callback, ModelCheckpoint):  # which saves this, and does not load it
                    callback.current_score = known["current_score"]
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


class FollowingLoader(BegunElsewhere):
    """A loader whose epochs have an order by the run's seed, and whose first one goes on after the
    batches that were done."""

    def __init__(
        self,
        loader: Any,
        number: int,
        place: LightningPlace,
        state: Protected,
        num_done: int,
        *,
        draws_by_rank: bool,
    ) -> None:
        """``number`` is that among Lightning's loaders. ``draws_by_rank``: the generators that its
        samplers own differ between ranks."""
        super().__init__(loader, self._rest)
        self._number, self._place, self._state, self._num_done = number, place, state, num_done
        stream = 1 + state.rank
        self._streams = (
            stream if state.seeds_differ and not divides(loader) else 0,
            stream if draws_by_rank else 0,
        )
        self._newest: deque[tuple[int, Taken]] = deque(maxlen=_MOST_AHEAD)

    def taken(self, num_done: int) -> Taken | None:
        """Return the last of so many batches of its present iteration; None if it is not known."""
        return next((each for at, each in reversed(self._newest) if at == num_done), None)

    def _rest(self) -> Iterator[Any]:
        num_done, self._num_done = self._num_done, 0  # now, not at the first batch
        return self._noting(num_done)

    def _noting(self, num_done: int) -> Iterator[Any]:
        for number, batch in enumerate(self._batches(num_done), start=num_done + 1):
            self._newest.append((number, Taken(batch)))
            yield batch

    def _batches(self, num_done: int) -> Any:
        loader, epoch = self._loader, self._place.epoch
        order = partial(set_order, loader, self._state.seed, epoch, *self._streams)
        if num_done:
            place = self._place.batches.place(
                self._number, loader, num_done, epoch, order, self._state, "es.lightning.Protect"
            )
            if place is not None:
                return place.rest(self._state)
        order()
        return after_batches(loader, num_done) if num_done else loader
