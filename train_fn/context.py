"""What a rank knows about its place in a run; built by worker.py under Ray, by tests and standalone
runs by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_control import ProfileOrder, Stop
from storage.run_dir import RunDir
from storage.run_names import CheckpointName


class JournalClient(Protocol):
    """The way from a rank to the run's journal. Nothing here ever blocks a step."""

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Hand over one event; a background thread delivers it, in order, in batches."""

    @property
    def stop_requested(self) -> Stop | None:
        """What the user asked for, as far as this rank has heard."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything handed over so far is durable; False when that took too long."""


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
    report_checkpoint: Callable[[str, dict[str, float]], None]
    """Have Ray Train told, beside training, of a committed checkpoint: its directory's name and
    metrics; all ranks at one step."""
    profile_ordered: Callable[[], ProfileOrder | None] = lambda: None
    """The newest profile that was asked for, as far as this rank has heard; never blocks."""

    hears_journal: Callable[[float], bool] = lambda timeout_s: True
    """Whether the journal has said lately that no newer attempt has begun; it is asked for so long
    where it has not."""
    journaled_step: Callable[[], float] = lambda: inf
    """The newest step that the journal knows of, as far as this rank has heard; never blocks."""
    steps_before: int = 0
    """Steps that earlier attempts are known to have done; set for a user's script only."""
    report_state_bytes: Callable[[int], None] = lambda num_bytes: None
    """Hears how large the state is that the rank would leave on its node."""
    report_kept: Callable[[int], None] = lambda step: None
    """Hears of the step whose state was left on this node while the rank waits for its peers."""
    is_let_go: Callable[[], bool] = lambda: False
    """Whether the attempt was given up although this rank's peers may live: it leaves its step, and
    keeps its state, as if they were gone. Asked once a step."""
    on_replaced: Callable[[str], None] = lambda why: None
    """What follows once the storage says that a newer attempt, or submission, has begun; under a
    driver the process ends."""
    checkpoints: CheckpointStore = field(init=False, repr=False, compare=False)
    """The run's checkpoints. Restoring and saving share this store: retention must not count as
    sound what restoring found to be corrupt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoints", CheckpointStore(self.run_dir))

    def checkpoint_name(self, step: int) -> CheckpointName:
        """Of the checkpoint of a step that this attempt writes."""
        return CheckpointName(step, self.submission, self.attempt)
