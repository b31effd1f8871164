"""What a host tells the processes that it has forked, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_fn.ranks.zygote import Streams
from train_fn.recovery.launch import RankJob, RankLaunch


@dataclass(frozen=True)
class BuildOrder:
    """What a run's builder on a node is told."""

    job: RankJob
    path: Path
    """Of the socket at which it will fork ranks."""
    environ: dict[str, str]
    """The environment of its host."""
    env: dict[str, str]
    """What every rank of the run sets in addition."""
    streams: Streams


@dataclass(frozen=True)
class BuildResult:
    """What the builder says once it has built."""

    why_not: str | None
    """Why ranks cannot be forked from it; None if they can."""
    failed: str | None
    """What the build has raised; None if it was well."""
    seconds: float


@dataclass(frozen=True)
class RankFacts:
    """What a rank is told when it begins."""

    launch: RankLaunch
    environ: dict[str, str]
    """The environment of its host."""
    node_id: str
    ip: str
    """The node's address in the cluster."""
    use_gpu: bool
    streams: Streams
    remembered: Mapping[str, Any] = field(default_factory=dict)
    """As of ``WorkerContext``."""
