"""The fields of a run, as of the last response of the service."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from everstep.client.notebook import run_html
from everstep.wire import (
    Best,
    ForkedFrom,
    LatestCheckpoint,
    Links,
    Progress,
    Protection,
    Reason,
    Run,
    RunStatus,
    Transition,
    Usage,
)
from everstep.wire.run import Replay


class RunFields:
    """A run as of the last response of the service, which ``run`` holds unchanged."""

    if TYPE_CHECKING:
        name: str
        project: str
        status: RunStatus
        reason: Reason | None
        priority: int
        tags: dict[str, str]
        attempt: int
        submission: int
        created_at: datetime
        started_at: datetime | None
        finished_at: datetime | None
        epoch: int
        step: int
        total_steps: int | None
        world_size: int | None
        best: Best | None
        latest_checkpoint: LatestCheckpoint | None
        restarts: int
        steps_lost: int
        redone_s: float | None
        protection: Protection
        links: Links
        transitions: tuple[Transition, ...]
        forked_from: ForkedFrom | None
        progress: Progress | None
        usage: Usage | None
        replay_of: Replay | None
        chain: str | None
        exactness: Literal["world_size", "elastic"]
        audit_fraction: float
        guarantee: str | None
        sweep_id: str | None
        owner: str | None
        notes: str | None

        @property
        def run(self) -> Run: ...
    else:

        def __getattr__(self, name: str) -> Any:
            if name in Run.model_fields:
                return getattr(self.run, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """Return every name, for completion in a notebook."""
        return sorted({*super().__dir__(), *Run.model_fields})

    @property
    def latest_metrics(self) -> dict[str, float]:
        """Return the latest value of every metric; ``metrics()`` returns their history."""
        return self.run.metrics

    @property
    def goodput_share(self) -> float | None:
        """Return the share of time spent training, 0 to 1; ``goodput()`` returns where the rest
        went."""
        return self.run.goodput

    def __repr__(self) -> str:
        return (
            f"<run {self.run.id} {self.run.name!r} {self.run.status} step "
            f"{self.run.step}/{self.run.total_steps or '?'}>"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return run_html(self.run)

    @property
    def id(self) -> str:
        return self.run.id
