"""The parameters of an attempt: from the driver to the controller, and from the controller to each
rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from everstep.spec.run_spec import RunSpec
from everstep.wire import ReasonCode
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.recovery.history import History
from train_fn.recovery.marks import DriverProcess
from train_fn.recovery.settings import RecoverySettings

YIELDED: Final = "yielded"
"""Returned by a rank that left because the group is resized or moved."""

Left = Stop | Literal["yielded"]
"""Why a rank left its attempt before all steps were done."""


@dataclass(frozen=True)
class Position:
    """Where a rank is among its peers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_id: str


@dataclass(frozen=True)
class Meeting:
    """Where and how the ranks of an attempt form their process group."""

    address: str
    port: int
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class RankJob:
    """Parameters shared by all ranks and attempts of a submission."""

    spec: RunSpec
    run_dir: RunDir
    submission: int
    journal: Any
    """Handle of the journal actor."""
    use_gpu: bool
    train: str
    """``module:function`` of the training loop."""
    calls_ray: bool = False
    """Whether the user's code calls Ray's API. Each rank then runs in its host's process, and all
    synchronise in a Ray Train actor at every report."""
    workers_limit: int | None = None
    """Most ranks that the service allowed when the run started; None for as many as it asks for."""

    @property
    def max_workers(self) -> int:
        """Return the most ranks that the run may start with."""
        most, limit = self.spec.most_workers, self.workers_limit
        return most if limit is None else max(self.spec.scaling.min_workers, min(most, limit))


@dataclass(frozen=True)
class RecoveryNote:
    """The failure that an attempt recovers from. Its first new step ends the recovery."""

    noticed_at: float
    """Unix seconds."""
    detect_s: float | None
    last_step: int | None
    """Most steps done before it, as far as any survivor or the journal knows."""
    world_size_before: int
    left_at: float
    """When the last survivor left its step, in unix seconds."""
    since_step_s: float | None = None
    """Seconds from the newest step in the journal, or from the attempt's start, to the failure."""


@dataclass(frozen=True)
class RankLaunch:
    """Parameters of one attempt, passed to its ranks before their process group exists."""

    attempt: int
    started_at: float
    """Unix seconds at which the controller began to start the group."""
    env: dict[str, str] = field(default_factory=dict)
    recovery: RecoveryNote | None = None
    num_nodes: int = 0
    """Number of nodes with ranks; set once the nodes are chosen."""
    last_step: int | None = None
    """Most steps done by earlier attempts, for a script, which may begin where nobody sees."""
    silent_peer_s: float = 0.0
    """Seconds of silence after which a rank closes a connection; 0 for never."""
    micro_batch_size: int | None = None
    """Samples per forward pass, if the run had no memory for those of its spec."""


@dataclass(frozen=True)
class Engine:
    """Everything that the controller needs."""

    job: RankJob
    settings: RecoverySettings
    history: History
    driver: DriverProcess
    """If the driver dies, the controller stays only until the ranks have saved and left."""
    recovery: RecoveryNote | None = None
    """The loss of an earlier controller or driver, if this one replaces it."""
    rank_env: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank."""
    controller_env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the controller, where Ray Train reads its settings."""


@dataclass(frozen=True)
class ControllerOutcome:
    """How the controller ended. If it is not ``decided``, the controller broke down and another one
    may continue the run."""

    finished: bool
    replaced: bool = False
    """A newer submission has taken over the run."""
    stopped: Stop | None = None
    failed: ReasonCode | None = None
    message: str | None = None
    last_step: int | None = None
    attempts: int = 0
    """Attempts of the run so far."""

    @property
    def decided(self) -> bool:
        """Return whether this ends the submission: the ranks finished or stopped, or a verdict
        failed or paused the run."""
        return self.finished or self.failed is not None or self.stopped == "pause"
