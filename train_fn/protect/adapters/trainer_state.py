"""What the Trainer of Hugging Face keeps beside model and optimizer: parts of a protected state."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

FLAGS = ("should_log", "should_evaluate", "should_save")


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
        """What the Trainer does after the step."""

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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self._log = state["state"], state["log"]
        self._num_logged, self._callbacks = state["num_logged"], state["callbacks"]
        self.flags = dict(state["flags"])

    def _exportable(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState)]
