"""What the Trainer of Hugging Face keeps beside model and optimizer: parts of a protected state."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from train_fn.errors import BadTask
from train_fn.protect.arguments import named
from train_fn.state.contents import few
from train_fn.step.plain_attributes import PlainAttributes

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
        self._state, self._log, self._num_logged = "{}", "", 0
        self._callbacks = "[]"
        self.flags = dict.fromkeys(FLAGS, False)
        """What the Trainer does after the step, and whether the epoch or the training ends."""
        self._epoch, self._num_batches = -1, 0
        self._noted = (0, 0)
        self._is_resumed = False

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
            "flags": dict(self.flags),
            "epoch": self._noted[0],
            "num_batches": self._noted[1],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self._log = state["state"], state["log"]
        self._num_logged, self._callbacks = state["num_logged"], state["callbacks"]
        self.flags = {**dict.fromkeys(FLAGS, False), **state["flags"]}
        self._noted = self._epoch, self._num_batches = state["epoch"], state["num_batches"]
        self._is_resumed = True

    def _exportable(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState)]


# ---------------------------------------------------------------- callbacks

# Callbacks of a user's own in somebody's trainer: what they change is part of no state, unless
# they keep one.

logger = logging.getLogger(__name__)


class CallbackWatch:
    """Name what callbacks of the user's own changed in the first step of an attempt, and no state
    holds."""

    def __init__(self, callbacks: Iterable[Any], extra: Any, way_out: str) -> None:
        """``extra`` is what the user gave to be kept; ``way_out`` names its argument."""
        self._kept = list(named("extra", extra).values())
        self._way_out = way_out
        self._owners = {
            type(each).__name__: each
            for each in callbacks
            if _is_own(type(each)) and not _keeps_itself(each) and not self._is_kept(each)
        }
        self._before: PlainAttributes | None = PlainAttributes(dict(self._owners))
        self._weights = set(self._held())

    def committing(self) -> None:
        """Look once, before the first commit. Raises BadTask for tensors that a restart would
        lose; warns of numbers."""
        before, self._before = self._before, None
        if before is None:
            return
        tensors = sorted({name for name, _ in set(self._held()) - self._weights})
        changed = before.changed()
        if tensors:
            raise BadTask(
                f"a callback keeps tensors that no checkpoint holds, in {few(tensors)}: a restart "
                "would begin them anew. Make them before the training begins, and pass what has "
                f"state_dict() and load_state_dict() as {self._way_out}"
            )
        if changed:
            logger.warning(
                "a callback changes %s, which no checkpoint holds: a restart begins with the first "
                "values. Pass an object with state_dict() and load_state_dict() that keeps them as "
                "%s",
                few(changed),
                self._way_out,
            )

    def _held(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name of each attribute with tensors, and what shows that one has changed."""
        for owner, callback in self._owners.items():
            for name, value in vars(callback).items():
                if self._is_kept(value):
                    continue
                for tensor in _tensors(value):
                    yield f"{owner}.{name}", (id(tensor), tensor._version)

    def _is_kept(self, value: Any) -> bool:
        return any(value is each for each in self._kept)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return []


def _keeps_itself(callback: Any) -> bool:
    """Return whether the trainer keeps a callback's state: Lightning asks for ``state_dict`` or
    ``on_save_checkpoint``, Hugging Face for ``state``."""
    own = {name for kind in type(callback).__mro__ if _is_own(kind) for name in vars(kind)}
    return bool(own & {"state_dict", "on_save_checkpoint", "state"})


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's, not one of an installed package."""
    if kind.__module__ in ("builtins", "abc"):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" not in file and not kind.__module__.startswith(
        ("train_fn.", "everstep.")
    )
