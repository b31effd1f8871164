"""What is measured of a run: ranks' times, samples, goodput, series."""

from __future__ import annotations

from typing import Annotated

from pydantic import WithJsonSchema

from everstep.wire.base import Answer, Time


class RankTimes(Answer):
    """A rank's typical step: medians over the last few seconds of training."""

    rank: int
    node_id: str
    micro_batches: int
    """Its share of a global batch."""
    own_s: float
    """Seconds of a step in which it worked by itself: data, forward, backward, optimizer."""
    wait_s: float
    """The rest of the step: all-reduce, most of it waiting for slower ranks."""
    skew: float
    """Its own time by that of a typical peer for the same share; 1 is as fast as the others."""


class NodeTimes(Answer):
    """The mean of a node's ranks."""

    node_id: str
    ranks: tuple[int, ...]
    own_s: float
    wait_s: float
    skew: float


class Straggler(Answer):
    """A rank that held its peers up for a while."""

    at: Time
    """When that was sure; it began some 15 s before."""
    attempt: int
    rank: int
    node_id: str
    step: int
    own_s: float
    peers_s: float
    """What a typical peer took for the same share."""
    skew: float
    ended_at: Time | None
    """When it was as fast as the others again, or its attempt ended; null while it is slow."""


class GpuUse(Answer):
    """A rank's GPU over the last minute."""

    rank: int
    node_id: str
    at: Time
    name: str
    busy: float | None
    """Share of the time in which a kernel ran, 0 to 1; null where the driver does not tell."""
    used_bytes: int
    """Most of the GPU's memory that was in use, whoever used it."""
    total_bytes: int
    allocated_bytes: int
    """Most that the rank's own tensors took."""


class StragglerReport(Answer):
    at: Time | None
    """When the ranks' times were told; null before the first time, and for runs of one rank."""
    attempt: int | None
    step: int | None
    step_s: float | None
    ranks: tuple[RankTimes, ...]
    nodes: tuple[NodeTimes, ...]
    stragglers: tuple[Straggler, ...]
    """Every rank that was ever found slow, oldest first."""
    gpus: tuple[GpuUse, ...] = ()
    """Of the ranks that train on GPUs, as told last; by rank."""


class EpochSamples(Answer):
    epoch: int
    samples: int
    used_once: int
    duplicates: int
    missing: int
    digest: str
    """Hash chain over the indices that the loaders yielded, in order of steps."""


class SampleOrigin(Answer):
    """Where a forked run's account begins. What came before is in the other run's; the ledger's
    chain goes on from there."""

    run_id: str
    checkpoint: str
    step: int
    """Steps done there."""
    epoch: int
    """Epoch that was in progress; its counts hold what both runs used of it."""
    samples: int
    """Samples of that epoch that the other run used."""
    digest: str
    """Hash chain over every step up to there."""


class Samples(Answer):
    epochs: tuple[EpochSamples, ...]
    origin: SampleOrigin | None = None
    """Of a run that began from another run's checkpoint; null otherwise."""


class GoodputBuckets(Answer):
    queued: float = 0.0
    starting: float = 0.0
    productive: float = 0.0
    checkpoint_stall: float = 0.0
    detecting: float = 0.0
    restarting: float = 0.0
    rework: float = 0.0
    paused: float = 0.0
    idle: float = 0.0


class Goodput(Answer):
    wall_s: float
    buckets: GoodputBuckets
    goodput: float | None


class ProjectGoodput(Answer):
    """The wall time of all runs of a project together; runs that were deleted are left out."""

    project: str
    runs: int
    wall_s: float
    buckets: GoodputBuckets
    goodput: float | None
    """Productive share of the time in which a run held resources, that is, of all but ``queued``
    and ``paused``; null for none."""


MetricPoint = Annotated[
    tuple[int, float, float | None],
    WithJsonSchema(
        {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 3, "maxItems": 3}
    ),
]
"""Step, unix seconds, value; null was not finite."""


class MetricSeries(Answer):
    series: dict[str, list[MetricPoint]]
    """For each name ``[step, unix seconds, value]``; a value that is not finite is null."""
