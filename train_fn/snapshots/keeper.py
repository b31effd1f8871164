"""Who keeps the states of an attempt on its nodes, and finds the newest there for the next one.

A state that every rank holds whole is a piece with one part. ``whole.py`` keeps those: survivors
leave theirs, and rank 0 publishes some where one node holds all ranks. ``pieces.py`` keeps the
pieces of a sharded model, on the nodes of their ranks and on those of their heirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from train_fn.checkpoints.commit import Collect
from train_fn.checkpoints.fork import Origin
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import MEET_S
from train_fn.recovery.evidence import RankError
from train_fn.snapshots.election import Candidate, Elected, Rejection

Snapshots = Literal["published", "survivors", "every_n", "own_node"]
"""Who keeps states on nodes: rank 0 all the time, or the survivors when an attempt breaks. Of a
sharded model, every rank its piece: a rank of another node has it after some steps, or never."""
Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes, of one size, to all, by rank. A collective."""
Adopt = Callable[[dict[str, Any], Origin], dict[str, Any]]
"""Turns the state of another run's checkpoint into the initial one of this run."""
Unusable = Mapping[Candidate, Rejection]
"""Files that cannot be used, and why. The same on all ranks."""


@dataclass(frozen=True)
class Restored:
    """Where an attempt begins. ``checkpoint`` names the checkpoint that was read, as
    ``RUN_ID/NAME`` if it is another run's."""

    source: str
    """``fresh``, ``checkpoint``, ``snapshot``, or ``fork``: from another run's checkpoint."""
    holder: int
    """Rank that has the state."""
    checkpoint: str | None
    rejected: tuple[Rejection, ...]
    origin: Origin | None = None  # of a fork


class Remains(NamedTuple):
    """What a rank has left behind, as its failure reports it."""

    step: int | None
    """Steps done; None if there was no state yet."""
    problem: str | None
    """Why no state is kept; None if one is."""
    snapshot_step: int | None = None
    """Step of the state on this node; None for none."""


class StateKeeper(Protocol):
    """One rank's part in it. All ranks make the same calls in the same order. What does nothing
    here does so for whole states: only pieces need the peers."""

    snapshots: Snapshots
    """Who keeps states while all goes well."""
    has_gate: bool = False
    """Whether a step counts only once all ranks have met at a gate after it."""
    committed: float = math.inf
    """Steps that no single death takes any more."""
    collect: Collect | None = None
    """Adds the other ranks' pieces to a checkpoint."""
    meets_every_s: float = MEET_S
    """The longest time between two calls of ``meet`` while the last save is written."""

    # -- restore

    def join(self) -> None:
        """Connect the ranks, before anything is restored. A collective."""
        return None

    def read(self, elected: Elected) -> tuple[dict[str, Any] | None, Unusable]:
        """Return an elected state on the ranks that can read it here, or what cannot be used of
        it. A collective."""

    def read_durable(
        self, restored: Restored, found: dict[str, Any] | None, adopt: Adopt
    ) -> dict[str, Any] | None:
        """Return what this rank reads of a checkpoint. Rank 0 has ``found``. A collective."""
        return found

    def spread(self, restored: Restored, found: dict[str, Any] | None) -> dict[str, Any]:
        """Return this rank's state, once those have it that lack it. A collective."""

    # -- steps

    def open(self, copies: BoundaryCopies, exchange: Exchange, restored: Restored) -> None:
        """Begin to keep states. What may fail has come before."""

    def begin(self) -> None:
        """Keep the state with which the attempt begins, before anything of it changes."""
        return None

    def is_due(self) -> bool:
        """Return whether ``after_step`` would publish the present state."""
        return False

    def after_step(self, due: bool | None = None) -> None:
        """Keep the present state in the background, if that is due. Called between two steps.
        ``due`` is what ``is_due`` has returned since the last one; None if nobody has asked."""

    def publish_now(self, *, if_soon: bool = False) -> None:
        """Publish the present state, due or not, since code of the user may end all ranks at once.
        With ``if_soon``, do so only if the last publication is ten times as long ago as it took."""
        return None

    def save(self) -> None:
        """Keep a copy of the present state for a checkpoint of it."""
        return None

    def gate(self, said: int = 0) -> list[int]:
        """Wait until all ranks hold what they should of the newest state, if there is a gate.
        Return what each rank said. A collective."""
        return [said]

    # -- the ends

    def begin_last_save(self) -> None:
        """Publish no more, since the first rank that leaves removes what is there."""

    def meet(self) -> None:
        """Exchange what ranks have written of the last checkpoint. A collective."""
        return None

    def leave_unsaved(self) -> None:
        """Leave the state of a run that pauses without a last checkpoint."""
        return None

    def let_go(self) -> None:
        """Free the peers that wait for this rank."""
        return None

    def leave(
        self,
        error: RankError,
        last_committed: Callable[[], dict[str, Any] | str],
        *,
        distrusted: str | None = None,
    ) -> Remains:
        """End the keeping after an error, and leave the state of the last committed step here.

        Args:
            last_committed: returns that state, or why there is none.
            distrusted: why the state must not be used; None if it may.
        """

    def close(self) -> None:
        """End the keeping. On return, a write that was under way is complete."""
