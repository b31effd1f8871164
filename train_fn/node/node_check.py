"""A rank's own check of its node and device before it trains, with the versions that it runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from everstep.doctor.nodes import GLOO_VARIABLE, NCCL_VARIABLE
from everstep.wire.deployment import StorageFacts, source_digest
from storage import cluster
from storage.errors import StorageError
from storage.filesystem import open_storage
from train_fn.node.network import (
    accepts_connection,
    interface_of,
    listen_at,
    meet_on_the_clusters_network,
    store_at,
)
from train_fn.node.node_dir import SHARED_MEMORY
from train_fn.storage_proof import APPEAR_S, appeared

CONNECT_S = 3.0
ALL_REDUCE_BYTES = 4 << 20
JOIN_S = 20.0
"""Longest wait of nodes for each other before the all-reduce, and for one all-reduce."""


class NodeProbe:
    """Check the node on which this actor runs. Every method returns plain values."""

    def __init__(self, node_id: str, ip: str) -> None:
        self._node_id = node_id
        self._ip = ip
        self._listener: socket.socket | None = None
        self._store: TCPStore | None = None

    def facts(self, has_gpu: bool) -> dict[str, object]:
        """Return the fields of ``NodeFacts`` that need no other node."""
        memory = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
        return {
            "hostname": platform.node(),
            "versions": versions(),
            "source": source_digest(),
            "interface": interface_of(self._ip),
            "interfaces": tuple(sorted(psutil.net_if_addrs())),
            "interface_variables": {
                name: os.environ[name]
                for name in (NCCL_VARIABLE, GLOO_VARIABLE)
                if os.environ.get(name)
            },
            "shared_memory_bytes": memory and memory.total,
            "shared_memory_free_bytes": memory and memory.free,
            "temporary_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
            "cuda": torch.cuda.is_available() if has_gpu else None,
        }

    def now(self) -> float:
        """Return the time by this node's clock, in unix seconds."""
        return time.time()

    def listen(self) -> int:
        """Open a port of this node's address, and return it. The kernel accepts connections there
        until this process ends."""
        self._listener = listen_at(self._ip)
        return int(self._listener.getsockname()[1])

    def connect(self, addresses: Sequence[tuple[str, int]]) -> list[bool]:
        """Return, for each address, whether it accepts a connection from this node."""
        return accepts_connection(addresses, CONNECT_S)

    def write_storage(self, uri: str, check_id: str) -> StorageFacts:
        """Write this node's file."""
        data = cluster.probe(check_id, self._node_id)
        began = time.monotonic()
        try:
            cluster.write_probe(open_storage(uri), check_id, self._node_id, data)
        except StorageError as exc:
            return StorageFacts(problem=str(exc))
        return StorageFacts(
            write_mb_per_s=round(len(data) / 1e6 / max(time.monotonic() - began, 1e-6), 1)
        )

    def read_storage(self, uri: str, check_id: str, writers: Sequence[str]) -> StorageFacts:
        """Read every node's file, once all are written."""
        storage, unseen, differs = open_storage(uri), [], []
        deadline = time.monotonic() + APPEAR_S
        for writer in writers:
            try:
                data = appeared(partial(cluster.read_probe, storage, check_id, writer), deadline)
            except StorageError as exc:
                return StorageFacts(problem=str(exc))
            if data is None:
                unseen.append(writer)
            elif data != cluster.probe(check_id, writer):
                differs.append(writer)
        return StorageFacts(unseen=tuple(unseen), differs=tuple(differs))

    def host_store(self) -> int:
        """Serve the store for the all-reduce's rendezvous on this node. Return its port."""
        self._store = store_at(self._ip, timedelta(seconds=JOIN_S))
        return int(self._store.port)

    def all_reduce(
        self, backend: str, rank: int, meeting: tuple[str, int], world_size: int, seconds: float
    ) -> tuple[int, float]:
        """All-reduce ``ALL_REDUCE_BYTES`` for so many seconds. Return the number of rounds, and the
        seconds of one.

        Raises RuntimeError if nodes do not find each other, one is too slow, or a sum is wrong.
        """
        meet_on_the_clusters_network(self._ip)  # as ranks do
        wait = timedelta(seconds=JOIN_S)
        store = self._store if rank == 0 else TCPStore(*meeting, is_master=False, timeout=wait)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=wait
        )
        try:
            return _sums(
                torch.device("cuda" if backend == "nccl" else "cpu"), rank, world_size, seconds
            )
        finally:
            dist.destroy_process_group()


def _sums(device: torch.device, rank: int, world_size: int, seconds: float) -> tuple[int, float]:
    """Return the number of all-reduces, and the seconds of one. The first value of each is rank 0's
    flag for the last one, so that all ranks make as many."""
    values = torch.empty(ALL_REDUCE_BYTES // 4, device=device)
    expected = world_size * (world_size + 1) / 2
    began, rounds = time.monotonic(), 0
    while True:
        values.fill_(rank + 1)
        values[0] = 1.0 if rank == 0 and time.monotonic() - began >= seconds else 0.0
        dist.all_reduce(values)
        rounds += 1
        last = values[0].item() > 0
        if not bool((values[1:] == expected).all()):
            raise RuntimeError(
                f"the sum over {world_size} nodes is wrong: {values[1:4].tolist()}, not "
                f"{expected:g}"
            )
        if last:
            return rounds, (time.monotonic() - began) / rounds


# ---------------------------------------------------------------- versions

# Versions of what a node runs. They must be the same on all nodes of a run.

_PACKAGES = ("everstep", "ray", "torch", "torchvision")


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages that are installed, and of CUDA and NCCL if
    torch was built with CUDA. This needs no GPU."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a node that lacks it differs from the others
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
