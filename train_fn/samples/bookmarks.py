"""Bookmarks: the positions in a data set's streams from which a later attempt resumes at the exact
sample.

The convention is that of torchdata's StatefulDataLoader: a data set, or its iterator, may have
``state_dict()`` and ``load_state_dict(state)``. A bookmark is such a state with the number of
samples before it. Samples between the bookmark and the first one needed are read and dropped.

Bookmarks are taken every few steps, and leave the loader process with their micro-batch. Ranks
exchange them, so that every rank has those of all streams and a dead rank loses none.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from train_fn.errors import BadTask
from train_fn.samples.loader import Loaded

BOOKMARK_STEPS = 20
"""Steps from one bookmark to the next."""


class Bookmark(NamedTuple):
    """Describe a position in a stream."""

    ordinal: int
    """Number of the stream's samples before it."""
    pass_began: int
    """Number of those samples that precede the current pass over the data."""
    state: bytes | None
    """State of the data set and its iterator; None if they have no ``state_dict``."""


class Bookmarks:
    """Hold the newest bookmark of every stream that this rank knows, as part of the training
    state."""

    def __init__(self) -> None:
        self.newest: dict[int, Bookmark] = {}
        self._passed: dict[int, Bookmark] = {}

    def note(self, loaded: Loaded) -> None:
        """Note the bookmark of a micro-batch that the loader returned, if it has one."""
        if loaded.place is not None:
            stream, bookmark = loaded.place
            self._passed[stream] = bookmark

    def exchange(self, step: int, gather: Callable[[Any], list[Any]]) -> None:
        """Share the passed bookmarks with all ranks, once every BOOKMARK_STEPS steps. All ranks
        call this after a step was committed."""
        if step % BOOKMARK_STEPS == 0:
            for passed in gather(self._passed):
                self.newest.update(passed)
            self._passed = {}

    def forget_passed(self) -> None:
        """Forget what no exchange has shared: a step that broke may have passed it."""
        self._passed = {}

    def state_dict(self) -> dict[str, Any]:
        return {str(stream): list(bookmark) for stream, bookmark in self.newest.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.newest = {int(stream): Bookmark(*values) for stream, values in state.items()}
        self._passed = {}


def pack_state(source: str, state: dict[str, Any]) -> bytes:
    """Return a state as bytes that a checkpoint can hold. They run no code when they are read
    back.

    Raise BadTask, with ``source``, if the state holds other objects than such bytes can.
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        unpack_state(buffer.getvalue())
    except Exception as exc:
        raise BadTask(
            f"{source}: the state_dict of train cannot be kept, for {state!r:.200} holds more "
            "than numbers, strings, lists, tuples, dicts and tensors; of a numpy array keep "
            ".tolist()"
        ) from exc
    return buffer.getvalue()


def unpack_state(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state
