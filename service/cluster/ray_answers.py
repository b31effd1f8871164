"""What Ray answers about jobs and nodes: the models, and how its JSON becomes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from storage.cluster.identity import EXIT_STORAGE, STORAGE_WORDS

NodeState = Literal["ALIVE", "DRAINING", "DEAD"]


class JobStatus(StrEnum):
    """Ray's status of a job. It is not a verdict: Ray says FAILED of a healthy driver that it lost
    contact with."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self not in (JobStatus.PENDING, JobStatus.RUNNING)


@dataclass(frozen=True)
class Job:
    """One Ray Job."""

    submission_id: str
    status: JobStatus
    message: str | None
    metadata: Mapping[str, str]
    driver_node_id: str | None
    driver_exit_code: int | None

    @property
    def storage_problem(self) -> str | None:
        """Return why the driver ended without touching the storage, by its last lines, or None."""
        if not self.status.ended or self.driver_exit_code != EXIT_STORAGE:
            return None
        lines = [
            line.partition(STORAGE_WORDS)[2]
            for line in (self.message or "").splitlines()
            if STORAGE_WORDS in line
        ]
        return (
            lines[-1].strip()
            if lines
            else "the driver could not use the run's storage; its job's log says more"
        )


@dataclass(frozen=True)
class RayNode:
    """One node of the cluster."""

    node_id: str
    ip: str
    hostname: str
    state: NodeState
    is_head: bool
    resources: Mapping[str, float]
    """By Ray's names: CPU, GPU, memory (bytes), and custom resources."""


def job_of(raw: Mapping[str, Any]) -> Job:
    """Return a job from its JSON. Raises LookupError, ValueError."""
    return Job(
        submission_id=raw["submission_id"],
        status=JobStatus(raw["status"]),
        message=raw.get("message"),
        metadata=raw.get("metadata") or {},
        driver_node_id=raw.get("driver_node_id"),
        driver_exit_code=raw.get("driver_exit_code"),
    )


def jobs_of(answer: Sequence[Mapping[str, Any]]) -> list[Job]:
    """Return the submitted jobs of a list. Raises TypeError, LookupError, ValueError."""
    if not isinstance(answer, list):
        raise TypeError("no list of jobs")
    return [job_of(raw) for raw in answer if raw["submission_id"] is not None]


def node_of(raw: Mapping[str, Any]) -> RayNode:
    """Return a node from its JSON, without its hostname's and drain's summary. Raises
    LookupError."""
    return RayNode(
        node_id=raw["node_id"],
        ip=raw["node_ip"],
        hostname=raw.get("node_name") or raw["node_ip"],
        state="ALIVE" if raw["state"] == "ALIVE" else "DEAD",
        is_head=bool(raw["is_head_node"]),
        resources=raw.get("resources_total") or {},
    )


def with_summary(node: RayNode, raw: Mapping[str, Any] | None) -> RayNode:
    """Return the node with what only the dashboard's summary knows: its hostname and a drain."""
    if raw is None:
        return node
    is_draining = raw["raylet"].get("stateSnapshot", {}).get("state") == "DRAINING"
    state: NodeState = "DRAINING" if is_draining and node.state == "ALIVE" else node.state
    return replace(node, hostname=raw.get("hostname") or node.hostname, state=state)
