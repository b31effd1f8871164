"""What Ray answers about jobs and nodes: the models, and how its JSON becomes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Literal

from everstep.wire import NodeLoad
from storage.cluster.identity import EXIT_STORAGE, STORAGE_WORDS

_USED: Final = re.compile(r"^ *([\d.]+)/[\d.]+ ([A-Za-z_]\w*)\b", re.MULTILINE)
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
    used: Mapping[str, float] | None = None
    """Of the resources, where Ray keeps that account; without memory."""
    load: NodeLoad | None = None


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
    return replace(
        node,
        hostname=raw.get("hostname") or node.hostname,
        state=state,
        load=None if node.state == "DEAD" else _load_of(raw),
    )


def used_of(text: object) -> dict[str, float] | None:
    """Return the used amounts in Ray's account of a node, a text such as ``1.0/2.0 CPU`` with a
    line for each resource; None without one."""
    if not isinstance(text, str):
        return None
    return {found[2]: float(found[1]) for found in _USED.finditer(text)} or None


def _load_of(raw: Mapping[str, Any]) -> NodeLoad | None:
    """Return a host's load; None if Ray's agent there has not reported yet."""
    memory, load, gpus = raw.get("mem"), raw.get("loadAvg"), raw.get("gpus")
    if not isinstance(memory, list) or len(memory) < 4:
        return None
    gpus = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    busy = [share for gpu in gpus if (share := _number(gpu.get("utilizationGpu"))) is not None]
    averages = load[0] if isinstance(load, list) and load and isinstance(load[0], list) else []
    cpu = _number(raw.get("cpu"))
    return NodeLoad(
        cpu=None if cpu is None else cpu / 100,
        load_1m=_number(averages[0]) if averages else None,
        memory_used_bytes=_whole(memory[3]),
        memory_total_bytes=_whole(memory[0]),
        gpu=sum(busy) / len(busy) / 100 if busy else None,
        gpu_memory_used_bytes=_sum_of_mebibytes(gpus, "memoryUsed"),
        gpu_memory_total_bytes=_sum_of_mebibytes(gpus, "memoryTotal"),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _sum_of_mebibytes(gpus: Sequence[Mapping[str, Any]], key: str) -> int | None:
    amounts = [amount for gpu in gpus if (amount := _number(gpu.get(key))) is not None]
    return int(sum(amounts)) << 20 if amounts else None
