"""RunState: what every state of a run has, whoever's loop makes its steps, and what saving,
publishing, leaving and restoring use of it.
"""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from everstep.wire.events import EventKind
from train_fn.samples.ledger import Count, Ledger
from train_fn.state.pieces import Piece
from train_fn.state.tensor_tree import (
    TensorShape,
    copy_to_cpu,
    lacking_memory,
    memory_in_use,
    put_together,
)

logger = logging.getLogger(__name__)

VERSION = 3  # no released Everstep has written another one


@dataclass(frozen=True)
class BestSoFar:
    """Describe the best evaluation so far. ``checkpoint`` names the checkpoint that holds it."""

    metric: str
    value: float
    step: int
    checkpoint: str


class RunState(ABC):
    """The state of a run: of Everstep's loop (``TrainState``), or of a user's own (``LoopState``).

    Between two steps it is the same on all ranks, bit by bit. This class has the counters, those
    who derive from it what is trained.
    """

    def __init__(self) -> None:
        self.step = 0
        """Steps done."""
        self.begun_at = 0
        """Steps done when the attempt began, with the same state on all ranks."""
        self.closed_epochs = 0
        """Epochs whose end was reported and, if due, evaluated."""
        self.evaluated_step = 0
        """Steps done at the last evaluation."""
        self.ledger = Ledger()
        self.metrics: dict[str, float] = {}
        """Latest validation metrics."""
        self.best: BestSoFar | None = None
        self.parent: str | None = None
        """Newest committed checkpoint that this rank knows this state to descend from."""
        self.recent = RecentEvents()
        self.piece: Piece | None = None
        """The piece that this rank holds of a state that is sharded; None for a state that every
        rank holds whole."""
        self.rows: dict[str, int] = {}
        """Rows of each sharded weight, over all pieces."""
        self.complete = False
        """Whether a run can resume from this state. It must be restored, and no commit may have
        stopped halfway."""

    def count_step(self, count: Count | None) -> None:
        """Count one more step, with the samples that all ranks trained on; None if they are not
        known."""
        if count is not None:
            self.ledger.commit(self.step, count)
        self.step += 1

    @property
    def is_at_first(self) -> bool:
        """Return whether the next step is one of the attempt's first two."""
        return self.step < self.begun_at + 2

    @property
    @abstractmethod
    def epoch(self) -> int: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts of plain values and live tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. ``state`` is copied and not changed."""

    @abstractmethod
    def require_sound(self, state: Mapping[str, Any]) -> None:
        """Raise StateNotWhole or NonFiniteWeights for a state that must not be kept."""

    def counters(self, k: int) -> dict[str, Any]:
        """Return what ``state_dict`` says beside what is trained. ``k`` is the global batch within
        the epoch."""
        return {
            "version": VERSION,
            "step": self.step,
            "epoch": self.epoch,
            "k": k,
            "closed_epochs": self.closed_epochs,
            "evaluated_step": self.evaluated_step,
            "ledger": self.ledger.state_dict(),
            "metrics": dict(self.metrics),
            "best": asdict(self.best) if self.best else None,
            "parent": self.parent,
            "tail": self.recent.dump(),
        }

    def load_counters(self, state: Mapping[str, Any]) -> None:
        """Load what ``counters`` returned."""
        self.step, self.closed_epochs = state["step"], state["closed_epochs"]
        self.evaluated_step, self.parent = state["evaluated_step"], state["parent"]
        self.ledger.load_state_dict(state["ledger"])
        self.metrics = dict(state["metrics"])
        self.best = BestSoFar(**state["best"]) if state["best"] else None
        self.recent = RecentEvents(json.loads(state["tail"]))


# ---------------------------------------------------------------- recent events

# The last events that a rank reported. They are part of its training state, since the rank that
# sends them to the journal may die before it has done so.

NUM_POINTS = 64
"""Steps whose metrics are always kept. Older ones are kept until the journal has them."""
MOST_POINTS = 4096
"""Limit on steps whose metrics are kept in all, for when rank 0 is cut off from the journal."""
NUM_OTHERS = 16
"""Other events (ends of epochs, evaluations) that are always kept. Older ones are kept until the
journal has them. They are separate from metrics, so that short steps do not push out events that
are reported once an epoch."""
MOST_OTHERS = 1024
"""Limit on other events in all."""
_METRICS_KIND = EventKind.METRICS.value


class RecentEvents:
    """Keep a rank's last events.

    An entry is ``{"kind": …, "at": Unix time in seconds, "data": …}`` and can be written as JSON.
    """

    def __init__(self, entries: list[dict[str, Any]] | None = None) -> None:
        self.points: deque[dict[str, Any]] = deque()
        """Metrics events. Every step appends one (``add_point``)."""
        self.others: deque[dict[str, Any]] = deque()
        """Events between steps (``add_other``)."""
        for entry in entries or ():
            (self.points if entry["kind"] == _METRICS_KIND else self.others).append(entry)

    def add_point(self, entry: dict[str, Any], journaled_step: Callable[[], float]) -> None:
        """Append a step's metrics, and drop the oldest that need not be kept.

        Args:
            journaled_step: returns the newest step that the journal has.
        """
        points = self.points
        points.append(entry)
        while len(points) > NUM_POINTS and (
            len(points) > MOST_POINTS or points[0]["data"]["step"] <= journaled_step()
        ):
            points.popleft()

    def add_other(self, entry: dict[str, Any], journaled_step: Callable[[], float]) -> None:
        """Append an event between steps, which has a ``step``, and drop the oldest as ``add_point``
        does."""
        others = self.others
        others.append(entry)
        while len(others) > NUM_OTHERS and (
            len(others) > MOST_OTHERS or others[0]["step"] < journaled_step()
        ):
            others.popleft()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over all entries by time."""
        return iter(sorted((*self.points, *self.others), key=itemgetter("at")))

    def dump(self) -> str:
        """Return all entries as one JSON string. As many small values would add a millisecond to
        each copy of the state at a step boundary."""
        return json.dumps([*self.points, *self.others])


# ---------------------------------------------------------------- copies

# Copies of a whole state, for loops that change it in several parts with collectives in
# between.


class StateCopies:
    """Hold the state of the newest commit.

    Args:
        keeps_older: also hold that of the commit before. While one is written, the other stays
            whole. Without it, take the copy only while the state itself is whole.
    """

    def __init__(self, state: RunState, *, keeps_older: bool = True) -> None:
        self._state, self._keeps_older = state, keeps_older
        self.newest: dict[str, Any] | None = None
        self.older: dict[str, Any] | None = None

    def take(self) -> None:
        """Copy the present state as that of the newest commit."""
        if not self._keeps_older:
            memory, self.newest = self.newest, None
            self.newest = self._copy(into=memory)
            return
        self.newest, self.older = self._copy(into=self.older), self.newest

    def renew(self) -> None:
        """Copy the newest commit again: its epoch was closed since."""
        self.newest = self._copy(into=None)

    def _copy(self, into: dict[str, Any] | None) -> dict[str, Any]:
        copied: dict[str, Any] = copy_to_cpu(self._state.state_dict(), into)
        return copied


# ---------------------------------------------------------------- copy memory

# Memory for copies of a state: kept for the next copy, and taken ahead.
#
# A GPU copies fast, and beside its kernels, only to memory that is pinned. To pin it takes 0.16 s
# for 1 GB with torch's threads for that, and 0.65 s without. On a CPU the kernel provides new pages
# at a quarter of the speed of a copy. So a thread takes the memory while training goes on, and
# whoever can wait for it copies at a later step. What is copied, and when, is not decided here: the
# memory that a thread takes holds nothing yet.


class CopyMemory:
    """Hold the memory of one copy between two uses.

    One thread at a time calls ``is_ready`` and ``take``; any thread may ``put``.
    """

    def __init__(self) -> None:
        self._kept: Any = None
        self._coming: Future[Any] | None = None
        """What a thread is taking, together with what was kept before."""
        self._waits = True
        """Whether to wait for a thread: not once one has failed."""

    def is_ready(self, live: Callable[[], Any]) -> bool:
        """Return whether ``copy_to_cpu(live(), self.take())`` pins nothing, and takes no large
        memory. Otherwise let a thread take what is missing. Where that has failed, return True: the
        copy does so itself then.

        Raise BadTask for a state that cannot be copied.
        """
        if not self._waits:
            return True
        if self._coming is not None and not self._coming.done():
            return False
        found, lacking = lacking_memory(live(), self.take())
        if not lacking:
            self.put(found)
        if not lacking or not self._waits:
            return True
        coming: Future[Any] = Future()
        self._coming = coming
        # Not a daemon: a process that ends waits for it, since CUDA must not end beside it.
        threading.Thread(
            target=_fill, args=(found, lacking, coming), name="copy-memory", daemon=False
        ).start()
        return False

    def take(self) -> Any:
        """Return the memory, for ``copy_to_cpu`` to use; None if there is none. Wait for a thread
        that is taking it."""
        coming, self._coming = self._coming, None
        if coming is not None:
            if (failed := coming.exception()) is None:
                return coming.result()
            logger.warning("no memory was taken beside training: %s", failed)
            self._waits = False
        kept, self._kept = self._kept, None
        return kept

    def put(self, memory: Any) -> None:
        """Keep the memory of a copy that is not needed any more. That of one copy is kept."""
        self._kept = memory


def _fill(found: Any, lacking: list[TensorShape], coming: Future[Any]) -> None:
    """Complete ``found``. One tensor after the other: while memory is pinned, CUDA may hold up what
    other threads ask of it."""
    try:
        taken = [memory_in_use(each.shape, each.dtype) for each in lacking]
        coming.set_result(put_together(found, taken))
    except Exception as exc:
        coming.set_exception(exc)
