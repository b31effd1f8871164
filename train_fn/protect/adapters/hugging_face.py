"""``es.hf.Protect``: the Trainer of Hugging Face transformers.

>>> trainer.add_callback(es.hf.Protect(trainer))                  # doctest: +SKIP
>>> trainer.train()                                               # doctest: +SKIP

Every optimizer step of the Trainer is a step of the run. A restart hands the Trainer a checkpoint
directory in shared memory that holds its own state only: where it is in the data. Weights,
optimizer and scheduler come from the protected state, without a copy on the way.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import ExportableState, TrainerState

from train_fn.errors import BadTask
from train_fn.node.node_dir import shared_memory_root
from train_fn.protect.adapters.trainer_state import CallbackWatch, NotedBatches
from train_fn.protect.arguments import LoopParts, named, parts_of
from train_fn.protect.batches import Taken
from train_fn.protect.data_order import BegunElsewhere, set_order
from train_fn.protect.protected import Protected
from train_fn.protect.training import OnItsOwn

__all__ = ["Protect"]

_STATE_FILE = "trainer_state.json"
_OLDEST = 5
"""Version of transformers whose Trainer keeps the sum of its losses where a callback sees it."""
_REPLACED = (
    "_init_training_state",
    "_load_from_checkpoint",
    "_maybe_log_save_evaluate",
    "_run_epoch",
)
"""Methods of the Trainer that a restart uses or replaces."""
_SKIP = "skip_first_batches"
"""The function of Accelerate, in the Trainer's module, that a restart replaces."""
_AT_EVALUATION = ("reduce_lr_on_plateau", "greedy")
"""Schedulers that step after an evaluation, not in the step."""


class Protect(TrainerCallback):  # type: ignore[misc]
    """Protect a Trainer's loop: add this to its callbacks, and call ``trainer.train()``."""

    def __init__(
        self,
        trainer: Any,
        *,
        extra: Any = None,
        storage: str = "out/protect",
        run_id: str | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        fresh: bool | None = None,
    ) -> None:
        """Take a Trainer that has not trained yet. The other arguments are those of ``es.protect``:
        ``extra`` is what callbacks of your own need to go on, such as an average of the weights.

        Raises BadTask for a Trainer that cannot be protected.
        """
        _check(trainer)
        self._trainer, self._extra = trainer, extra
        self._settings = OnItsOwn(storage, run_id, checkpoint or {}, fresh)
        self._unprotected: Callable[..., Any] = trainer.train
        trainer.train = self.train
        self._place = TrainerPlace(trainer)
        self._scheduler = TrainerScheduler(trainer)
        self._state: Protected | None = None
        self._watch: CallbackWatch | None = None
        self._groups: list[dict[str, Any]] = []
        self._taken: Taken | None = None
        """Of the newest batch."""
        self._loss: Any = 0.0
        """Sum of the step's losses. The Trainer's own sum goes on over several steps, and so has
        another rounding error after a restart."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as ``Trainer.train`` does, from the newest trustworthy state on."""
        trainer = self._trainer
        if all(callback is not self for callback in trainer.callback_handler.callbacks):
            raise BadTask("es.hf.Protect is no callback of its Trainer; call trainer.add_callback")
        if trial is not None:
            raise BadTask("es.hf.Protect cannot protect a hyperparameter search; leave it out")
        if self._state is not None:
            raise BadTask(
                "es.hf.Protect: train() was called a second time; make another Trainer with a "
                "Protect of its own for another training"
            )
        if trainer.optimizer is None:
            trainer.create_optimizer()
        with _sharded_first(trainer):
            return self._train(resume_from_checkpoint, ignore_keys_for_eval)

    def _train(
        self, resume_from_checkpoint: str | bool | None, ignore_keys_for_eval: list[str] | None
    ) -> Any:
        trainer = self._trainer
        self._measure_losses()
        # The commit comes after what other callbacks do in a step.
        handler = trainer.callback_handler
        others = [each for each in handler.callbacks if each is not self]
        handler.callbacks = [*others, self]
        unkept = [each for each in others if not isinstance(each, ExportableState)]
        self._watch = CallbackWatch(unkept, self._extra, "es.hf.Protect(trainer, extra=…)")
        self._state = Protected(self._parts(), "refuse", self._settings)
        self._state.ends_with_commit = True
        with self._state as state:
            # The order of the data follows from torch's seed, which is the run's on all ranks. The
            # state has just seeded the next step, differently on each rank.
            torch.manual_seed(state.seed)
            if not state.step_number:
                if resume_from_checkpoint:
                    raise BadTask(
                        "trainer.train(resume_from_checkpoint=…): es.hf.Protect continues by "
                        "itself; leave it out, or load those weights into the model before"
                    )
                return self._unprotected(ignore_keys_for_eval=ignore_keys_for_eval)
            # Without parameters: FSDP2 puts others in their place, and these would stay in memory.
            self._groups = [{**group, "params": None} for group in trainer.optimizer.param_groups]
            with self._resumed() as directory:
                return self._unprotected(directory, ignore_keys_for_eval=ignore_keys_for_eval)

    def _parts(self) -> LoopParts:
        trainer = self._trainer
        given = {name or "given": each for name, each in named("extra", self._extra).items()}
        extra = {**given, "trainer": self._place}
        if trainer.accelerator.scaler is not None:
            extra["scaler"] = trainer.accelerator.scaler
        parts = parts_of(trainer.model, trainer.optimizer, self._scheduler, extra)
        # Ranks note different times in the Trainer's log.
        return dataclasses.replace(parts, loaders=parts.loaders | {"extra.trainer"})

    @contextmanager
    def _resumed(self) -> Iterator[str]:
        """Yield a checkpoint directory that tells the Trainer where it is, and let it go on
        there."""
        trainer, place = self._trainer, self._place
        directory = tempfile.mkdtemp(prefix="trainer-", dir=shared_memory_root())
        evaluates, begin = trainer.args.eval_on_start, trainer._init_training_state
        library = importlib.import_module("transformers.trainer")
        skip = getattr(library, _SKIP)

        def begin_there(*args: Any, **kwargs: Any) -> tuple[int, int]:
            begin(*args, **kwargs)
            return place.noted

        try:
            Path(directory, _STATE_FILE).write_text(place.trainer_state())
            # The weights are there already.
            trainer._load_from_checkpoint = lambda *_, **__: None
            trainer._init_training_state = begin_there
            trainer.args.eval_on_start = False
            setattr(library, _SKIP, partial(self._rest_of_epoch, skip))
            yield directory
        finally:
            setattr(library, _SKIP, skip)
            trainer.args.eval_on_start = evaluates
            for name in ("_load_from_checkpoint", "_init_training_state", "_run_epoch"):
                vars(trainer).pop(name, None)
            shutil.rmtree(directory, ignore_errors=True)

    def _rest_of_epoch(self, skip: Callable[..., Any], loader: Any, num_batches: int) -> Any:
        """Return a loader of the batches that are left of an epoch."""
        state, epoch = self._open(), self._place.noted[0]
        order = partial(set_order, loader, state.seed, epoch)
        place = self._place.batches.place(
            0, loader, num_batches, epoch, order, state, "es.hf.Protect"
        )
        if place is None:
            return skip(loader, num_batches)
        return BegunElsewhere(loader, lambda: place.rest(state))

    # -- what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> TrainerControl:
        """Give the scheduler its state: the Trainer has just made it."""
        protected, trainer = self._open(), self._trainer
        protected.follow(trainer.model_wrapped)
        self._scheduler.load()
        for group, saved in zip(trainer.optimizer.param_groups, self._groups, strict=False):
            # A scheduler that begins sets its first rates.
            group.update({**saved, "params": group["params"]})
        protected.expect(state.max_steps)
        if trainer.args.load_best_model_at_end:
            self._finish_before_best_model()
        if protected.step_number:
            self._place.restore_callbacks()
            self._do_what_was_due()
        return trainer.control

    def _do_what_was_due(self) -> None:
        """Log, evaluate and save what the Trainer does after a step: the state is that before."""
        trainer = self._trainer
        for flag, value in self._place.flags.items():
            setattr(trainer.control, flag, value)
        self._log_evaluate_save()
        control = trainer.control
        control.should_training_stop |= trainer.state.global_step >= trainer.state.max_steps
        if control.should_training_stop or control.should_epoch_stop:
            trainer._run_epoch = self._end_epoch

    def _end_epoch(self, **_: Any) -> None:
        """Do what the Trainer does once it has left the steps of an epoch."""
        trainer = self._trainer
        vars(trainer).pop("_run_epoch")
        handler = trainer.callback_handler
        trainer.control = handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        self._log_evaluate_save()

    def _log_evaluate_save(self) -> None:
        trainer = self._trainer
        epoch = int(trainer.state.epoch)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, trainer.model_wrapped, None, epoch, None, 0.0
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Give the epoch the order that the run's seed says: a sampler may draw it from torch's
        generator, which every step seeds by its rank."""
        set_order(facts["train_dataloader"], self._open().seed, self._place.begin_epoch())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seed what the step draws: the loader may have drawn since the last commit."""
        self._open().reseed()
        self._loss = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit the step."""
        if self._watch is not None:
            self._watch.committing()
        self._place.note(control)
        self._place.batches.note([self._taken], self._open())
        rates = self._trainer.lr_scheduler.get_last_lr()
        self._open().step(loss=self._loss, learning_rate=float(rates[0]))

    def _measure_losses(self) -> None:
        trainer, training_step = self._trainer, self._trainer.training_step

        def measured(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._taken = Taken(inputs)
            loss = training_step(model, inputs, *args, **kwargs)
            self._loss = self._loss + loss.detach()
            self._place.count_batch()
            return loss

        trainer.training_step = measured

    def _finish_before_best_model(self) -> None:
        """Let the last checkpoint hold the last weights, not the best ones."""
        trainer, load = self._trainer, self._trainer._load_best_model

        def finish_and_load() -> None:
            vars(trainer).pop("_load_best_model", None)
            self._open().finish()
            load()

        trainer._load_best_model = finish_and_load

    def _open(self) -> Protected:
        if self._state is None:
            raise BadTask("es.hf.Protect: call trainer.train(), not its parts")
        return self._state


def _shards(trainer: Any) -> bool:
    """Return whether the Trainer shards its model by FSDP2."""
    return bool(getattr(trainer.accelerator, "is_fsdp2", False))


@contextmanager
def _sharded_first(trainer: Any) -> Iterator[None]:
    """Let the Trainer's Accelerator shard model and optimizer now, and not when it trains: a state
    in pieces is loaded into shards."""
    accelerator = trainer.accelerator
    if not _shards(trainer):
        yield
        return
    made = accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model, trainer.optimizer = made
    trainer.model_wrapped = trainer.model
    prepare = accelerator.prepare

    def prepare_once(*objects: Any, **settings: Any) -> Any:
        if len(objects) != len(made) or any(a is not b for a, b in zip(objects, made, strict=True)):
            return prepare(*objects, **settings)
        accelerator._models.append(trainer.model)
        accelerator._optimizers.append(trainer.optimizer)
        return made

    accelerator.prepare = prepare_once
    try:
        yield
    finally:
        del accelerator.prepare


def _check(trainer: Any) -> None:
    """Raise BadTask for a Trainer whose ranks do not hold the whole state, or that replaces its
    parts within ``train``."""
    args = trainer.args
    version = transformers.__version__
    missing = [name for name in _REPLACED if not hasattr(trainer, name)]
    if not hasattr(importlib.import_module("transformers.trainer"), _SKIP):
        missing.append(_SKIP)
    if int(version.partition(".")[0]) < _OLDEST or missing:
        raise BadTask(
            f"es.hf.Protect does not know the Trainer of transformers {version}; install a version "
            f"that its documentation names, at least {_OLDEST}"
        )
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not _shards(trainer)):
        raise BadTask(
            "es.hf.Protect: the Trainer shards its state by DeepSpeed or FSDP1, which nothing can "
            "take apart. Set fsdp_config={'version': 2}, or leave es.hf.Protect out and let Ray's "
            "RayTrainReportCallback report"
        )
    if trainer.model_init is not None:
        raise BadTask("es.hf.Protect: Trainer(model_init=…) makes the model anew; pass model=…")
    if args.auto_find_batch_size:
        raise BadTask(
            "es.hf.Protect: auto_find_batch_size begins anew after a failure; set "
            "per_device_train_batch_size"
        )
    if args.ignore_data_skip:
        raise BadTask(
            "es.hf.Protect: ignore_data_skip=True would train again on the samples of the epoch in "
            "which a rank died; leave it out"
        )
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if scheduler in _AT_EVALUATION:
        raise BadTask(
            f"es.hf.Protect: lr_scheduler_type={scheduler!r} steps after an evaluation, outside of "
            "the step that is committed; choose one that steps with the optimizer"
        )


# ---------------------------------------------------------------- trainer's state

# What the Trainer keeps beside model and optimizer: parts of a protected state.

FLAGS = (
    "should_log",
    "should_evaluate",
    "should_save",
    "should_epoch_stop",
    "should_training_stop",
)


class TrainerScheduler:
    """The learning-rate scheduler, which the Trainer makes when its training begins."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        scheduler = self._trainer.lr_scheduler
        return self._loaded if scheduler is None else dict(scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def load(self) -> None:
        """Hand the loaded state to the scheduler."""
        if self._loaded:
            self._trainer.lr_scheduler.load_state_dict(self._loaded)
        self._loaded = {}


class TrainerPlace:
    """What the Trainer knows beside model, optimizer and scheduler, as text."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.batches = NotedBatches()
        self._state, self._log, self._num_logged = "{}", "", 0
        self._callbacks, self._flos = "[]", 0.0
        self.flags = dict.fromkeys(FLAGS, False)
        """What the Trainer does after the step, and whether the epoch or the training ends."""
        self._epoch, self._num_batches = -1, 0
        self._noted = (0, 0)
        self._is_resumed = False

    @property
    def mark(self) -> int:
        """Return a digest of the newest batch; 0 if there is none."""
        return self.batches.mark

    @property
    def noted(self) -> tuple[int, int]:
        """Return the epoch, and the batches of it that this rank had read, at the last commit."""
        return self._noted

    def begin_epoch(self) -> int:
        """Return the number of an epoch that begins, or goes on."""
        if not self._is_resumed:
            self._epoch, self._num_batches = self._epoch + 1, 0
        self._is_resumed = False
        return self._epoch

    def count_batch(self) -> None:
        """Count a batch that was read. The Trainer itself counts steps, and takes a stream to have
        one epoch: it would begin the wrong pass where a stream ends before the training does."""
        self._num_batches += 1

    def note(self, control: TrainerControl) -> None:
        """Take the Trainer's present state."""
        state = self._trainer.state
        facts = {one.name: getattr(state, one.name) for one in dataclasses.fields(state)}
        entries = facts.pop("log_history")
        # The log grows: each entry becomes text once.
        for entry in entries[self._num_logged :]:
            self._log += ("," if self._log else "") + json.dumps(entry)
        self._num_logged = len(entries)
        self._flos = self._trainer.current_flos
        self._state = json.dumps(facts, default=str)
        self._noted = self._epoch, self._num_batches
        self.flags = {flag: bool(getattr(control, flag)) for flag in FLAGS}
        self._callbacks = json.dumps([one.state()["attributes"] for one in self._exportable()])

    def trainer_state(self) -> str:
        """Return the contents of ``trainer_state.json``."""
        facts = {**json.loads(self._state), "log_history": json.loads(f"[{self._log}]")}
        known = {one.name for one in dataclasses.fields(TrainerState)}
        return json.dumps({name: value for name, value in facts.items() if name in known})

    def restore_callbacks(self) -> None:
        """Give callbacks that have a state, as early stopping, what they had."""
        saved = json.loads(self._callbacks)
        for callback, attributes in zip(self._exportable(), saved, strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": self._state,
            "log": self._log,
            "num_logged": self._num_logged,
            "callbacks": self._callbacks,
            "flos": self._flos,
            "flags": dict(self.flags),
            "epoch": self._noted[0],
            "num_batches": self._noted[1],
            **self.batches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self._log = state["state"], state["log"]
        self._num_logged, self._callbacks = state["num_logged"], state["callbacks"]
        self._flos = self._trainer.current_flos = state.get("flos", 0.0)  # earlier states lack it
        self.flags = {**dict.fromkeys(FLAGS, False), **state["flags"]}
        self._noted = self._epoch, self._num_batches = state["epoch"], state["num_batches"]
        self._is_resumed = True
        self.batches.load_state_dict(state)

    def _exportable(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState)]
