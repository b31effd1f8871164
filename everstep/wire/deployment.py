"""What a check of a deployment found, as the service answers it; ``everstep.doctor.findings`` says
what it means."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Literal

from pydantic import Field

from everstep.wire import Answer, Time

_PACKAGES = ("everstep", "storage", "train_fn")
"""What runs on the nodes; the service has them too."""


def source_digest() -> str | None:
    """SHA-256 over Everstep's own modules as they lie here: two installations of one version may
    still differ.

    None where a package is not installed as files.
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


class StorageFacts(Answer):
    """How one node sees the storage."""

    problem: str | None = None
    """Why it could not be written or read."""
    unseen: tuple[str, ...] = ()
    """Ids of nodes whose file this node does not see."""
    differs: tuple[str, ...] = ()
    """Ids of nodes whose file holds other bytes here than were written."""
    write_mb_per_s: float | None = None
    """Megabytes (10**6 bytes) a second, of one small file with all nodes writing at once: a hint,
    not a benchmark."""


class NodeFacts(Answer):
    """What one node says about itself."""

    id: str
    hostname: str
    ip: str
    is_head: bool
    gpus: int
    """As Ray was told."""
    problem: str | None = None
    """Why nothing more is known: no process of Everstep came up there."""
    versions: dict[str, str | None] = Field(default_factory=dict)
    """Of python, everstep, ray, torch, torchvision, cuda, nccl; null for what is not there."""
    source: str | None = None
    """Digest of Everstep's own modules."""
    clock_offset_s: float | None = None
    """The node's clock minus the head's."""
    clock_error_s: float | None = None
    """How far off that may be: half a round trip."""
    storage: StorageFacts | None = None
    unreachable: tuple[str, ...] = ()
    """Ids of nodes that do not accept a TCP connection from here on a port of their own choice."""
    raylets_unreachable: tuple[str, ...] = ()
    """Ids of nodes whose raylet does not accept one."""
    interface: str | None = None
    """The network interface that has the node's address."""
    interface_variables: dict[str, str] = Field(default_factory=dict)
    """NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, where the node's environment sets them."""
    interfaces: tuple[str, ...] = ()
    shared_memory_bytes: int | None = None
    shared_memory_free_bytes: int | None = None
    temporary_free_bytes: int | None = None
    cuda: bool | None = None
    """Whether torch can use the GPU that the check was given; null where it was given none."""


class AllReduceFacts(Answer):
    """A sum over the nodes that run ranks, again and again."""

    backend: Literal["gloo", "nccl"]
    nodes: tuple[str, ...]
    problem: str | None = None
    rounds: int = 0
    size_bytes: int
    round_s: float | None = None
    """Seconds of one sum."""


class DeploymentReport(Answer):
    at: Time
    """By the head's clock, when the report was written."""
    nodes: tuple[NodeFacts, ...]
    all_reduce: AllReduceFacts | None
    """Null where fewer than two nodes run ranks."""


class ServiceFacts(Answer):
    """What the service says about itself."""

    hostname: str
    versions: dict[str, str | None]
    source: str | None
    at: Time
    """By the service's clock, when it answered."""
    storage: str
    """The storage's URI."""


class DeploymentCheck(Answer):
    """A check that was asked for: its job on the cluster, and what it found."""

    id: str
    state: Literal["running", "done", "failed"]
    problem: str | None = None
    """Why it failed."""
    service: ServiceFacts
    report: DeploymentReport | None = None
