"""KeptState: what saving, publishing, leaving and restoring use of a run's state, whoever's loop
changes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from train_fn.state.event_tail import EventTail
from train_fn.state.train_state import Best


class KeptState(Protocol):
    """The state of a run: that of Everstep's loop (``TrainState``), or of a user's own loop. Its
    ``state_dict`` has the same entries."""

    step: int
    """Steps done."""
    closed_epochs: int
    """Epochs whose end was reported."""
    evaluated_step: int
    """Steps done at the last evaluation."""
    best: Best | None
    parent: str | None
    """Newest committed checkpoint that this rank knows this state to descend from."""
    tail: EventTail
    complete: bool
    """Whether a run can resume from this state."""

    @property
    def epoch(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts of plain values and live tensors."""

    def load_state_dict(self, state: dict[str, Any], *, gives_memory: bool = False) -> None:
        """Load a state. ``state`` is copied and not changed. If it ``gives_memory``, the state may
        keep parts of it, which the caller does not use afterwards."""

    def require_sound(self, state: Mapping[str, Any]) -> None:
        """Raise StateNotWhole or NonFiniteWeights for a state that must not be kept."""
