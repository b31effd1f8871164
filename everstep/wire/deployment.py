"""Results of a deployment check. ``everstep.doctor.findings`` interprets them."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire.base import Answer, Open, Time

_PACKAGES = ("everstep", "storage", "train_fn")
"""The packages that run on nodes; the service has them too."""
LONGEST_ALL_REDUCE_S: Final = 60.0


def source_digest() -> str | None:
    """Return the SHA-256 over Everstep's installed modules: two installations of one version may
    differ.

    None if a package is not installed as files.
    """
    digest = hashlib.sha256()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(spec.submodule_search_locations[0])
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class CheckOrder(BaseModel):
    """Duration of the parts of a check that take time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all_reduce_s: float = Field(
        5.0,
        gt=0,
        le=LONGEST_ALL_REDUCE_S,
        allow_inf_nan=False,
        description="Duration of the all-reduce test in seconds.",
    )


class StorageFacts(Answer):
    """The storage as one node sees it."""

    problem: str | None = None
    """Why the node could not write or read it."""
    unseen: tuple[str, ...] = ()
    """Ids of nodes whose file this node does not see."""
    differs: tuple[str, ...] = ()
    """Ids of nodes whose file has other bytes here than were written."""
    write_mb_per_s: float | None = None
    """Megabytes (10**6 bytes) per second for one small file, with all nodes writing at once: a
    hint, not a benchmark."""


class NodeFacts(Answer):
    """Facts that one node reports about itself."""

    id: str
    hostname: str
    ip: str
    is_head: bool
    gpus: int
    """As registered with Ray."""
    problem: str | None = None
    """Why nothing more is known: no Everstep process could start there."""
    versions: dict[str, str | None] = Field(default_factory=dict)
    """Versions of python, everstep, ray, torch, torchvision, cuda and nccl; absent if not
    installed."""
    source: str | None = None
    """Digest of Everstep's own modules."""
    clock_offset_s: float | None = None
    """The node's clock minus the head's."""
    clock_error_s: float | None = None
    """Largest error of that offset: half a round trip."""
    storage: StorageFacts | None = None
    unreachable: tuple[str, ...] = ()
    """Ids of nodes that do not accept a TCP connection from here on a port of their choice."""
    raylets_unreachable: tuple[str, ...] = ()
    """Ids of nodes whose raylet does not accept a TCP connection from here."""
    interface: str | None = None
    """The network interface that has the node's address."""
    interface_variables: dict[str, str] = Field(default_factory=dict)
    """NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, if the node's environment sets them."""
    interfaces: tuple[str, ...] = ()
    shared_memory_bytes: int | None = None
    shared_memory_free_bytes: int | None = None
    temporary_free_bytes: int | None = None
    cuda: bool | None = None
    """Whether torch can use the GPU assigned to the check; null if it was assigned none."""


class AllReduceFacts(Answer):
    """Repeated all-reduces over the nodes that run ranks."""

    backend: Open[Literal["gloo", "nccl"]]
    nodes: tuple[str, ...]
    problem: str | None = None
    rounds: int = 0
    size_bytes: int
    round_s: float | None = None
    """Seconds of one all-reduce."""


class DeploymentReport(Answer):
    at: Time
    """When the report was written, by the head's clock."""
    nodes: tuple[NodeFacts, ...]
    all_reduce: AllReduceFacts | None
    """Null if fewer than two nodes run ranks."""


class ServiceFacts(Answer):
    """Facts that the service reports about itself."""

    hostname: str
    versions: dict[str, str | None]
    source: str | None
    at: Time
    """When it answered, by the service's clock."""
    storage: str
    """The storage's URI."""


class DeploymentCheck(Answer):
    """A requested check: the state of its job on the cluster, and its report."""

    id: str
    state: Open[Literal["running", "done", "failed"]]
    problem: str | None = None
    """Why it failed."""
    service: ServiceFacts
    report: DeploymentReport | None = None
