"""What the Trainer of Hugging Face keeps beside model and optimizer: parts of a protected state."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

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
