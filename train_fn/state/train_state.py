"""TrainState: the one registry of everything that a run needs to resume exactly where it
stopped.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from train_fn.errors import BadTask, NothingTrained, few
from train_fn.samples.ledger import START, Bookmarks
from train_fn.samples.sampler import Sampler
from train_fn.state.contents import Contents, FrozenPart, other_base, require_same_data
from train_fn.state.optim import (
    Ema,
    Optimizers,
    load_optimizer,
    match_layout,
    unpacked,
    with_strides,
)
from train_fn.state.pieces import weights_in
from train_fn.state.run_state import VERSION, RunState
from train_fn.state.sound_state import not_finite, require_sound
from train_fn.state.tensor_tree import copy_to_cpu, of_own_types, tree_digest
from train_fn.step.precision import BuiltModes
from train_fn.step.untrained import (
    TensorPlace,
    copy_all,
    is_alike,
    require_loaded,
    untrained_places,
)
from train_fn.tasks.protocol import Task, where

if TYPE_CHECKING:
    from train_fn.state.sharded import Shards

logger = logging.getLogger(__name__)


class TrainState(RunState):
    """Hold the live training objects and counters. ``epoch`` and ``k`` (the global batch within the
    epoch) follow from ``step``, the steps done.

    Between steps the state is bitwise equal on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        scaler: torch.amp.GradScaler,
        ema: Ema | None,
        *,
        steps_per_epoch: int,
        fingerprint: str,
        scheduler: Any | None = None,
        frozen: FrozenPart | None = None,
        model_source: str = "the task",
        contents: Contents | None = None,
        sampler: Sampler | None = None,
        bookmarks: Bookmarks | None = None,
        data_source: str | None = None,
        shards: Shards | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.shards = shards
        """None for a model that every rank holds whole."""
        if shards is not None:
            self.piece, self.rows = shards.piece, shards.rows
        self.optimizer = optimizer
        self._modes = BuiltModes(model)
        self.scaler = scaler
        self.scheduler = scheduler
        """The task's own; None if the spec's schedule sets the learning rates."""
        self.frozen = frozen
        """Parameters that states leave out; None if they hold all."""
        self._model_source = model_source
        self.skipped = SkippedSteps()
        """Steps that the scaler skipped."""
        self.ema = ema
        self.steps_per_epoch = steps_per_epoch
        self.fingerprint = fingerprint
        """Fingerprint of the training data. Resuming on other data is refused."""
        self.sampler = sampler
        """Gives the number of samples in the steps; None if the ledger is not compared with it."""
        self._trained = {
            name
            for name, value in model.named_parameters(remove_duplicate=False)
            if value.requires_grad
        }
        self.contents = contents
        """Sketches of a few samples; None if they are not compared."""
        self.data_name = (
            f"the training data of {data_source}" if data_source else "the training data"
        )
        """Name of the data in errors. For a user's task, with the method that built it, its file
        and line."""
        self.bookmarks = bookmarks
        """Positions in iterable data."""
        self.hook_due = False
        """Whether the task's ``on_epoch_end`` has still to run for the epoch closed last."""
        self.chain = START
        self.numerics: dict[str, Any] | None = None
        """Fingerprint of the run's kernels (``Numerics``); None before the first attempt."""
        self.task: Any = None
        """The task's own state (``TaskState``) after the last step."""
        self._unsaved: dict[str, TensorPlace] = {}
        """Buffers, by name, that forward passes change but the model's state_dict leaves out."""

    @property
    def gathered(self) -> Shards | None:
        """Return the shards of weights that are gathered for each pass; None for a model whose
        weights every rank holds."""
        return self.shards if self.shards is not None and self.shards.gathers else None

    @property
    def num_weight_parts(self) -> int:
        """Return over how many ranks the weights are spread. Rank r has part r modulo that."""
        return 1 if self.gathered is None else self.gathered.piece.of

    @property
    def epoch(self) -> int:
        return self.step // self.steps_per_epoch

    @property
    def k(self) -> int:
        return self.step % self.steps_per_epoch

    def carry(self, places: Iterable[TensorPlace]) -> None:
        """Also save these places if the model's ``state_dict`` does not, since forward passes
        change them."""
        places = list(places)
        if self.frozen is not None:
            self.frozen.require_none(place.name for place in places if not place.is_buffer)
        self._unsaved |= {place.name: place for place in places if not place.is_saved}

    def unsaved(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors of ``carry``'s places by name."""
        return {name: place.tensor for name, place in self._unsaved.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts of plain values and live tensors. It can be saved to a
        file that loads with ``weights_only=True``. No kernel runs on a device."""
        model, ema = self.model.state_dict(), self.ema.state_dict() if self.ema else None
        if self.frozen is not None:
            model, ema = self.frozen.without(model), ema and self.frozen.without(ema)
        optimizer = self.optimizer.state_dict()
        if self.shards is None:
            optimizer = with_strides(optimizer, self.optimizer)
        state = {
            **self.counters(self.k),
            "hook_due": self.hook_due,
            "fingerprint": self.fingerprint,
            "contents": self.contents.dump() if self.contents else None,
            "chain": self.chain,
            "model": dict(model),
            "frozen": dict(self.frozen.sums) if self.frozen else {},
            "modes": self._modes.state_dict(),
            "unsaved": self.unsaved(),
            "task": self.task,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped.state_dict(),
            "ema": ema,
            "bookmarks": self.bookmarks.state_dict() if self.bookmarks else None,
            "numerics": self.numerics,
        }
        return state if self.shards is None else self.shards.apart(state, self.optimizer)

    def require_sound(self, state: Mapping[str, Any]) -> None:
        """Check a state of this run, from this or another process, before it is saved or resumed
        from.

        Raise StateNotWhole or NonFiniteWeights.
        """
        require_sound({**state, "model": weights_in(state)}, self.sampler, self._trained)
        if self.frozen is not None:
            self.frozen.require_unchanged(thorough=False)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. ``state`` is copied and not changed.

        Raises:
            DataChanged: it was trained on other data.
            BadTask: the task built other frozen parameters than those that the state leaves out.
            ValueError: this Everstep does not read the state's version.
        """
        if state["version"] != VERSION:
            raise ValueError(
                f"the state to resume has version {state['version']}, and this Everstep reads "
                f"version {VERSION}; resume with the Everstep that wrote it"
            )
        require_same_data(
            state,
            self.data_name,
            fingerprint=self.fingerprint,
            steps_per_epoch=self.steps_per_epoch,
            contents=self.contents,
        )
        self.complete = False
        if self.shards is not None:
            self.shards.load(self.optimizer, state)
        else:
            self._load_weights(state)
            # Optimizer.load_state_dict keeps references to the tensors that it is given.
            saved = copy_to_cpu(state["optimizer"])
            load_optimizer(self.optimizer, unpacked(saved))
            match_layout(self.optimizer, saved.get("strides"))
        self._modes.load_state_dict(state["modes"])
        self._load_unsaved(state["unsaved"])
        if self.scheduler is not None and state["scheduler"] is not None:
            kept = copy_to_cpu(state["scheduler"])
            self.scheduler.load_state_dict(of_own_types(kept, self.scheduler.state_dict()))
        self.scaler.load_state_dict(state["scaler"])
        self.skipped.load_state_dict(state["skipped"])
        if self.ema is not None:
            averages = {**self.ema.state_dict(), **(state["ema"] or {})}
            if self.shards is not None:
                averages |= self.shards.averages(state["shards"])
            self.ema.load_state_dict(averages)
        self.task = copy_to_cpu(state["task"]) if state["task"] is not None else self.task
        self.chain = state["chain"]
        if self.bookmarks is not None:
            self.bookmarks.load_state_dict(state["bookmarks"])
        self.numerics, self.hook_due = state["numerics"], state["hook_due"]
        self.load_counters(state)
        self.complete = True

    def _load_weights(self, state: dict[str, Any]) -> None:
        """Load parameters and buffers, beside the frozen ones that the state leaves out."""
        saved, own = state["frozen"], self.model.state_dict()
        if changed := other_base(saved, own):
            raise BadTask(
                f"{self._model_source} returned other frozen parameters than those with which step "
                f"{state['step']} was trained: {few(changed)}. No checkpoint holds them, as "
                "checkpoint.parameters was trainable. Let build_model load the same weights, from "
                "the same file on all nodes, or start a new run"
            )
        self.model.load_state_dict({**{name: own[name] for name in saved}, **state["model"]})
        require_loaded(self.model, state["model"], self._model_source)

    def _load_unsaved(self, saved: dict[str, torch.Tensor]) -> None:
        """Load buffers that the model's ``state_dict`` leaves out."""
        places = {place.name: place for place in untrained_places(self.model, ())} if saved else {}
        for name, value in saved.items():
            own = places[name].tensor if name in places else None
            if own is None or not is_alike(own, value):
                logger.warning(
                    "the saved value of buffer %s is dropped: the model has no such buffer any "
                    "more, or one of another shape",
                    name,
                )
                continue
            copy_all([own], [value.to(own.device)])
            self.carry([places[name]])


# ---------------------------------------------------------------- skipped steps

# Count the steps that fp16's loss scaler skipped because gradients were not finite. Raise an error
# if no other step succeeds.

MOST_IN_A_ROW = 30
"""Limit on consecutive skipped steps. Each halves the scale, so a scale may start 2**30 times too
high. GradScaler starts at 2**16."""
LEAST_SCALE = 2.0**-14
"""Below this scale, scaled gradients underflow in fp16, so scaling no longer helps."""


class SkippedSteps:
    """Count skipped steps, as part of the training state. A skipped step has used its samples: the
    position in the data and the schedule still advance."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0

    def note(self, scaler: torch.amp.GradScaler, scale_before: float) -> bool:
        """Count a step after the scaler's update, and return whether it was skipped. A scaler
        lowers its scale exactly when it skips a step."""
        scale = scaler.get_scale()
        skipped = scale < scale_before or scale == 0
        self.total += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return skipped

    def check(
        self,
        step: int,
        scaler: torch.amp.GradScaler,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        last: bool,
    ) -> None:
        """Raise NothingTrained if steps keep being skipped, and name the gradients that are not
        finite. Call this after a skipped step.

        Args:
            step: steps done.
            named: parameters with the gradients of the step.
            last: whether the run has no further step.
        """
        scale = scaler.get_scale()
        if (
            self.in_a_row < MOST_IN_A_ROW
            and scale >= LEAST_SCALE
            and not (last and self.total == step)
        ):
            return
        names = not_finite({name: value.grad for name, value in named if value.grad is not None})
        raise NothingTrained(step, self.total, self.in_a_row, scale, names)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.in_a_row = state["total"], state["in_a_row"]


# ---------------------------------------------------------------- task state

# The task's own state: the result of its ``state_dict`` after each step, saved with the training
# state.


READ_BACK = (
    "%s does not load all that state_dict() returns. A restart goes on from something else than "
    "was saved: load all of it, and keep no times in it"
)


class TaskState:
    """Call a task's optional methods ``state_dict()`` and ``load_state_dict(state)``. Do nothing if
    the task has neither.

    Raise BadTask for a task that has only one of the two.
    """

    def __init__(self, task: Task) -> None:
        names = ("state_dict", "load_state_dict")
        own = [
            name
            for name in names
            if callable(getattr(task, name, None))
            # that of a module is its model's
            and getattr(type(task), name, None) is not getattr(nn.Module, name)
        ]
        if len(own) == 1:
            lacking = names[own == [names[0]]]
            raise BadTask(
                f"{where(task, own[0])} needs {lacking} beside it: a restart goes on from what the "
                "two of them keep"
            )
        self._task: Any = task if own else None
        self._has_warned = False

    def __bool__(self) -> bool:
        return self._task is not None

    def capture(self) -> Any:
        """Return a copy of the task's current state; None if it has no such methods. Raise BadTask
        for a value that cannot be saved."""
        return (
            copy_to_cpu({"task": self._task.state_dict()})["task"]
            if self._task is not None
            else None
        )

    def load(self, state: Any) -> None:
        """Load a captured state into the task."""
        if self._task is None:
            if state is not None:
                logger.warning(
                    "the state to resume holds a state of the task, but the task has no "
                    "load_state_dict any more, so that state is dropped"
                )
        elif state is not None:
            self._task.load_state_dict(copy.deepcopy(state))
            if not self._has_warned and tree_digest(self.capture()) != tree_digest(state):
                self._has_warned = True
                logger.warning(READ_BACK, where(self._task, "load_state_dict"))
