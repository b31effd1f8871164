"""What a rank knows about its place in a run.

`ranks/rank.py` builds it under Ray, `standalone/rank.py` without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_control import DrillOrder, ProfileOrder, Stop
from storage.run_dir import CheckpointName, RunDir


class JournalClient(Protocol):
    """A rank's client of the run's journal. No method but ``flush`` blocks."""

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Queue one event. A background thread delivers all in order, in batches."""

    @property
    def stop_requested(self) -> Stop | None:
        """Return the user's stop request, as far as this rank knows."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until every event so far is durable. Return False if that took too long."""


@dataclass(frozen=True)
class WorkerContext:
    """One rank's place in an attempt. The process group exists (also at world size 1) and belongs
    to this attempt."""

    spec: RunSpec
    run_dir: RunDir
    submission: int
    attempt: int
    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this machine; several Ray nodes may share one."""
    node_id: str
    num_nodes: int
    """Ray nodes that the ranks of this attempt are on."""
    device: torch.device
    journal: JournalClient
    report_checkpoint: Callable[[str, dict[str, float]], object]
    """Report a committed checkpoint to Ray Train in the background, by its directory's name and its
    metrics. All ranks call this at the same step."""
    profile_ordered: Callable[[], ProfileOrder | None] = lambda: None
    """Return the newest profile that was ordered, as far as this rank knows; never blocks."""

    flip_ordered: Callable[[], DrillOrder | None] = lambda: None
    """Return the newest drill that flips a bit in a rank, as far as this rank knows; never
    blocks."""
    holds_lease: Callable[[float], bool] = lambda timeout_s: True
    """Return whether the journal has confirmed lately that no newer attempt has begun. If not, wait
    up to so many seconds for its reply."""
    journaled_step: Callable[[], float] = lambda: inf
    """Return the newest step whose metrics are in the journal, as far as this rank knows; infinity
    where no rank can know. Never blocks."""
    steps_before: int = 0
    """Steps that earlier attempts are known to have done; set for a user's script only."""
    report_state_bytes: Callable[[int], None] = lambda num_bytes: None
    """Report how large a snapshot of the state would be."""
    report_kept: Callable[[int], None] = lambda step: None
    """Report the step of a snapshot that was left while the rank waits for its peers."""
    on_commit: Callable[[], None] = lambda: None
    """Called after every step that was committed here, before anything else follows."""
    most_samples: int | None = None
    """Limit on the samples that are read of each data set that has a length; None for all of them.
    A rehearsal sets it."""
    is_abandoned: Callable[[], bool] = lambda: False
    """Return whether the attempt was given up although this rank's peers may live. The rank then
    leaves its step, and keeps its state, as if they were gone. Called once a step."""
    hands_over: Callable[[], bool] = lambda: False
    """Return whether the controller has asked the ranks to exit for a group that follows at once.
    Rank 0 decides by it for all."""
    remembered: Mapping[str, Any] = field(default_factory=dict)
    """What earlier attempts of this host have found out of its node and of what is trained."""
    remember: Callable[[str, Any], None] = lambda name, value: None
    """Let later attempts know what takes long to find out."""
    on_replaced: Callable[[str], None] = lambda why: None
    """Called once the storage shows that a newer attempt or submission has begun. Under a driver it
    ends the process."""
    checkpoints: CheckpointStore = field(init=False, repr=False, compare=False)
    """The run's checkpoints. Restoring and saving share this store: retention must not count as
    sound what restoring found to be corrupt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoints", CheckpointStore(self.run_dir))

    def limited(self, num_samples: int) -> int:
        """Return how many of these samples of a data set are read."""
        return num_samples if self.most_samples is None else min(num_samples, self.most_samples)

    def limited_batches(self, num_batches: int | None, num_samples: int | None) -> int | None:
        """Return how many batches of so many samples are read of a user's loader: the same share;
        None for all of them."""
        if self.most_samples is None or not num_batches or not num_samples:
            return None
        most = max(1, ceil(num_batches * self.most_samples / num_samples))
        return most if most < num_batches else None

    def checkpoint_name(self, step: int) -> CheckpointName:
        """Return the name of a checkpoint of this attempt."""
        return CheckpointName(step, self.submission, self.attempt)
