"""What other people's trainers keep beside model and optimizer: the newest batches of their
loaders, and what callbacks of the user's own change."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from train_fn.errors import BadTask, few
from train_fn.protect.arguments import named
from train_fn.protect.batches import Taken
from train_fn.protect.followed import ReadAgain
from train_fn.protect.protected import Protected
from train_fn.step.trial import PlainAttributes

logger = logging.getLogger(__name__)


class NotedBatches:
    """The newest batch of each of a trainer's loaders: part of the state, and compared after a
    restart as ``es.loader`` does."""

    def __init__(self) -> None:
        self._taken: list[Taken | None] = []
        self._noted: dict[str, Any] = {"marks": None, "rank": 0, "world_size": 0}

    def note(self, taken: Sequence[Taken | None], state: Protected) -> None:
        """Take the newest batch of each loader as that of the commit."""
        self._taken = list(taken)
        self._noted = {
            "marks": [each and each.marks for each in taken],
            "rank": state.rank,
            "world_size": state.world_size,
        }

    @property
    def mark(self) -> int:
        """Return a digest of the newest batches; 0 if none is known."""
        known = [each.whole for each in self._taken if each is not None]
        return Taken(known).whole if known else 0

    def state_dict(self) -> dict[str, Any]:
        return self._noted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, which may hold more. Earlier ones have no marks."""
        self._noted = {name: state.get(name, old) for name, old in self._noted.items()}

    def place(
        self,
        number: int,
        loader: Any,
        num_done: int,
        epoch: int,
        order: Callable[[], None],
        state: Protected,
        who: str,
    ) -> ReadAgain | None:
        """Return the place after the noted batch of a loader; None if nothing can be compared.

        Args:
            number: of the loader, among the trainer's.
            num_done, epoch, order, who: as in ``ReadAgain``.
        """
        marks, world_size = self._noted["marks"] or [], self._noted["world_size"]
        if world_size not in (0, state.world_size):
            logger.warning(
                "the number of ranks changed from %d to %d: %s goes on after %d batches of each "
                "rank, so samples of this epoch are used again or left out",
                world_size,
                state.world_size,
                who,
                num_done,
            )
            return None
        if not num_done or number >= len(marks) or marks[number] is None:
            return None
        mine = marks[number] if self._noted["rank"] == state.rank else None
        return ReadAgain(loader, num_done, epoch, order, mine, who)


# ---------------------------------------------------------------- callbacks

# Callbacks of a user's own in somebody's trainer: what they change is part of no state, unless
# they keep one.


class CallbackWatch:
    """Name what callbacks of the user's own changed in the first step of an attempt, and no state
    holds."""

    def __init__(self, callbacks: Iterable[Any], extra: Any, way_out: str) -> None:
        """``callbacks`` are those whose state the trainer does not keep, ``extra`` is what the user
        gave to be kept, and ``way_out`` names its argument."""
        self._kept = list(named("extra", extra).values())
        self._way_out = way_out
        self._owners = {
            type(each).__name__: each
            for each in callbacks
            if _is_own(type(each)) and not self._is_kept(each)
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


def keeps_itself(callback: Any) -> bool:
    """Return whether Lightning asks a callback of the user's for its state."""
    own = {name for kind in type(callback).__mro__ if _is_own(kind) for name in vars(kind)}
    return bool(own & {"state_dict", "on_save_checkpoint"})


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's, not one of an installed package."""
    if kind.__module__ in ("builtins", "abc"):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" not in file and not kind.__module__.startswith(
        ("train_fn.", "everstep.")
    )
