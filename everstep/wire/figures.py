"""Measurements of a run: step times of ranks, samples, goodput, metrics."""

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
    """Seconds of a step that the rank works by itself: data, forward, backward, optimizer."""
    wait_s: float
    """The rest of the step: the all-reduce, which is mostly waiting for slower ranks."""
    skew: float
    """Its own time divided by a typical peer's for the same share; 1 is as fast as the others."""


class NodeTimes(Answer):
    """Means over a node's ranks."""

    node_id: str
    ranks: tuple[int, ...]
    own_s: float
    wait_s: float
    skew: float


class Straggler(Answer):
    """A rank that slowed its peers down for a while."""

    at: Time
    """When it was detected, about 15 s after it began."""
    attempt: int
    rank: int
    node_id: str
    step: int
    """Optimizer steps done when it was found."""
    own_s: float
    peers_s: float
    """Seconds that a typical peer takes for the same share, or with shares by speed for its own."""
    skew: float
    ended_at: Time | None
    """When the rank was as fast as the others again, or its attempt ended; null while it is
    slow."""


class GpuUse(Answer):
    """A rank's GPU over the last minute."""

    rank: int
    node_id: str
    at: Time
    name: str
    busy: float | None
    """Share of the time in which a kernel ran, 0 to 1; null if the driver does not report it."""
    used_bytes: int
    """Peak memory in use on the GPU, by all processes."""
    total_bytes: int
    allocated_bytes: int
    """Peak memory of the rank's own tensors."""
    power_w: float | None = None
    """Mean power in watts; null if the driver does not report it."""
    celsius: float | None = None
    """Highest temperature of the chip; null if the driver does not report it."""


class StragglerReport(Answer):
    at: Time | None
    """When step times were last reported; null before that, and for runs of one rank."""
    attempt: int | None
    step: int | None
    """Optimizer steps done at the newest times; null before there are any."""
    step_s: float | None
    """Typical time of a step then."""
    ranks: tuple[RankTimes, ...]
    nodes: tuple[NodeTimes, ...]
    stragglers: tuple[Straggler, ...]
    """All ranks that were ever found slow, oldest first."""
    gpus: tuple[GpuUse, ...] = ()
    """Last report of each rank that trains on a GPU, by rank."""


class EpochSamples(Answer):
    epoch: int
    samples: int
    used_once: int
    duplicates: int
    missing: int
    digest: str
    """Hash chain over the sample indices that the loaders yielded, in order of steps."""


class SampleOrigin(Answer):
    """Where the ledger of a forked run begins. Earlier samples are in the other run's ledger, whose
    hash chain continues here."""

    run_id: str
    checkpoint: str
    step: int
    """Steps done in the other run."""
    epoch: int
    """Epoch in progress at the fork; its counts include both runs."""
    samples: int
    """Samples of that epoch that the other run used."""
    digest: str
    """Hash chain over all steps up to the fork."""


class Samples(Answer):
    epochs: tuple[EpochSamples, ...]
    origin: SampleOrigin | None = None
    """Set if the run began from another run's checkpoint, else null."""


class GoodputBuckets(Answer):
    """Seconds of wall time. Every moment since a run's creation is in exactly one bucket."""

    queued: float = 0.0
    starting: float = 0.0
    productive: float = 0.0
    checkpoint_stall: float = 0.0
    detecting: float = 0.0
    restarting: float = 0.0
    rework: float = 0.0
    unreported: float = 0.0
    """A user's own loop ran between its last report and a failure. How much of that work was kept
    is not known."""
    paused: float = 0.0
    idle: float = 0.0


class FirstStart(Answer):
    """Seconds from a run's creation to its first step, one after the other. Null for what has not
    ended yet, and for a part that the run's kind of code does not have."""

    queued_s: float | None = None
    """In the queue."""
    job_s: float | None = None
    """Ray starts the job, and the driver imports what it needs."""
    ranks_s: float | None = None
    """Ray places the ranks and starts their processes."""
    model_s: float | None = None
    """The ranks meet, try the storage, build the model and restore a state."""
    data_s: float | None = None
    """The ranks build optimizer and loaders."""
    step_s: float | None = None
    """The first step."""


class Goodput(Answer):
    wall_s: float
    buckets: GoodputBuckets
    goodput: float | None
    first_start: FirstStart | None = None
    """Null for a run that an older version began."""


class ProjectGoodput(Answer):
    """The wall time of all runs of a project, without deleted runs."""

    project: str
    runs: int
    wall_s: float
    buckets: GoodputBuckets
    goodput: float | None
    """Productive share of the time in which runs held resources (all but ``queued`` and
    ``paused``); null if there is none."""


MetricPoint = Annotated[
    tuple[int, float, float | None],
    WithJsonSchema(
        {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 3, "maxItems": 3}
    ),
]
"""Step, unix seconds, value; null means not finite."""


class MetricSeries(Answer):
    series: dict[str, list[MetricPoint]]
    """For each name, points ``[step, unix seconds, value]``; null means not finite."""
