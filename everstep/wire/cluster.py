"""The cluster and the service's own state."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire.base import Answer, Open, Time

LONGEST_DEADLINE_S: Final = 30 * 24 * 3600

NodeState = Literal["ALIVE", "CORDONED", "DRAINING", "DRAINED", "DEAD"]
"""``CORDONED``: gets no new ranks, keeps those it has. ``DRAINING``: its ranks are leaving.
``DRAINED``: they have left; the node may be taken away. ``DEAD``: the cluster has lost it."""


class NodeMark(Answer):
    """Why a node takes no new ranks."""

    reason: str | None
    """In words. The evidence, if the service cordoned the node by itself."""
    by: str
    """Name of the token that set the mark; ``everstep`` is the service itself."""
    at: Time
    deadline: Time | None
    """When a draining node will be taken away; null if unknown."""


class NodeOrder(BaseModel):
    """Why a node is cordoned, uncordoned or drained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str | None = Field(None, max_length=1000, description="Free text, shown with the node.")


class DrainOrder(NodeOrder):
    """Why a node is drained, and until when."""

    deadline_s: float | None = Field(
        None,
        gt=0,
        le=LONGEST_DEADLINE_S,
        allow_inf_nan=False,
        description="Seconds from now at which the node will be removed.",
    )


class NodeLoad(Answer):
    """What a node's host does, whoever uses it. Nodes of one host have the same."""

    cpu: float | None
    """Share of its processors that is busy, 0 to 1."""
    load_1m: float | None
    """Processes that run or wait, over the last minute."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    gpu: float | None = None
    """Mean share of time in which kernels run on its GPUs, 0 to 1; null without GPUs."""
    gpu_memory_used_bytes: int | None = None
    """Sum over its GPUs."""
    gpu_memory_total_bytes: int | None = None


class Node(Answer):
    id: str
    hostname: str
    ip: str
    state: Open[NodeState]
    is_head: bool
    mark: NodeMark | None = None
    """Who cordoned or drained the node, and why; null if nobody did, or if it was drained by
    Ray."""
    resources_total: dict[str, float]
    resources_used: dict[str, float] | None = None
    """Held on the node, by Ray's account, or else by the ranks of all runs; the rest is free. Null
    for a dead node."""
    load: NodeLoad | None = None
    """Null for a dead node, and until Ray knows it."""
    runs: tuple[str, ...]
    """Ids of the runs with ranks on this node."""


class ClusterInfo(Answer):
    available: bool
    """Whether Ray answered; only then is the list of nodes current."""
    address: str | None
    dashboard_url: str | None
    ray_version: str | None
    nodes: tuple[Node, ...]
    coming_back: tuple[Time, ...] = ()
    """When the embedded cluster starts its missing nodes again, soonest first."""


class Readiness(Answer):
    status: Open[Literal["ready", "unavailable"]]
    database: Open[Literal["up", "down"]]
    storage: Open[Literal["up", "down"]]
    ray: Open[Literal["up", "down"]]
    reconciler_lag_s: float | None
    """Seconds since the reconciler's last completed tick."""


# ---------------------------------------------------------------- storage status

# Whether the storage and the database belong together.


class RunBehind(Answer):
    """A run that is further in the storage than in the database."""

    run_id: str
    database_submission: int
    """Newest submission in the database."""
    storage_submission: int
    """Newest submission with a journal in the storage."""


class StorageStatus(Answer):
    """Whether the storage is the one that the database belongs to."""

    uri: str
    known_id: str | None
    """Id of the storage that the database belongs to; null before its first use."""
    found_id: str | None
    """Id found in the storage; null if it has none or could not be read."""
    problem: str | None
    """Why the service starts no run in this storage, and what to do; null if all is well."""
    behind: tuple[RunBehind, ...]
    """Runs that are further in the storage than in the database: the database is older."""
    unknown_runs: tuple[str, ...]
    """Run directories that the database does not know, 100 at most."""


class StorageAdoption(Answer):
    """The result of adopting a storage."""

    storage_id: str
    previous_id: str | None
    caught_up: tuple[str, ...]
    """Runs whose later submissions were read from their journals."""
    lost: tuple[str, ...]
    """Runs of which the storage lacks something that was known. Each continues from what is
    left."""
