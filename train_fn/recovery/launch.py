"""What travels with an attempt: from the driver to the controller, and from the controller to each
rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everstep.spec.run_spec import RunSpec
from everstep.wire import ReasonCode
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.recovery.driver_process import DriverProcess
from train_fn.recovery.history import History
from train_fn.recovery.settings import RecoverySettings

YIELDED = "yielded"
"""What a rank returns that left because the group is to be resized or moved."""


@dataclass(frozen=True)
class RankJob:
    """The same for every rank of every attempt of a submission."""

    spec: RunSpec
    run_dir: RunDir
    submission: int
    journal: Any
    """Handle of the journal actor."""
    use_gpu: bool
    train: str
    """``module:function`` of the training loop."""
    workers_limit: int | None = None
    """Most ranks that the service let the run use when it started; None for
    ``scaling.max_workers``."""

    @property
    def max_workers(self) -> int:
        """Most ranks that the run may begin with."""
        scaling = self.spec.scaling
        return (
            scaling.max_workers
            if self.workers_limit is None
            else max(scaling.min_workers, min(scaling.max_workers, self.workers_limit))
        )


@dataclass(frozen=True)
class RecoveryNote:
    """The failure that an attempt recovers from; its first new step completes the story."""

    noticed_at: float
    """Unix seconds."""
    detect_s: float | None
    last_step: int | None
    """Most steps done before it, as far as any survivor or the journal knows."""
    world_size_before: int
    left_at: float
    """When the last survivor had left its step."""


@dataclass(frozen=True)
class RankLaunch:
    """What one attempt tells its ranks before their process group exists."""

    attempt: int
    started_at: float
    """Unix seconds at which the controller began to start the group."""
    env: dict[str, str] = field(default_factory=dict)
    recovery: RecoveryNote | None = None
    num_nodes: int = 0
    """Nodes that the ranks are on: filled in when these were chosen."""
    silent_peer_s: float = 0.0
    """Seconds after which a rank gives up a connection on which nothing is heard; 0 for never."""
    meets_to_report: bool = True
    """Whether ranks meet in an actor of Ray Train's for every report. Those of Everstep's loop all
    report the same in the same order; a user's function may not."""


@dataclass(frozen=True)
class Engine:
    """What the controller is given."""

    job: RankJob
    settings: RecoverySettings
    history: History
    driver: DriverProcess
    """The controller outlives it only until the ranks have saved and left."""
    recovery: RecoveryNote | None = None
    """The loss of the controller or driver before this one."""
    rank_env: dict[str, str] = field(default_factory=dict)
    """Environment of every rank."""
    controller_env: dict[str, str] = field(default_factory=dict)
    """Environment of the controller: Ray Train reads its own settings from there."""


@dataclass(frozen=True)
class Outcome:
    """How the controller left its run. One that is not ``decided`` broke down, and another may go
    on."""

    finished: bool
    replaced: bool = False
    """It was told to leave: a newer submission goes on."""
    stopped: Stop | None = None
    failed: ReasonCode | None = None
    message: str | None = None
    last_step: int | None = None
    attempts: int = 0
    """Of the run so far."""

    @property
    def decided(self) -> bool:
        """Whether this ends the submission: the ranks finished or stopped, or a verdict failed or
        paused the run."""
        return self.finished or self.failed is not None or self.stopped == "pause"
