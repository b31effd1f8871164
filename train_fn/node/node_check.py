"""One node's part in a check of the deployment: what it has, what it sees, and a sum with the
others."""

from __future__ import annotations

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

from everstep.doctor.interface_choice import GLOO_VARIABLE, NCCL_VARIABLE
from everstep.wire.deployment import StorageFacts, source_digest
from storage.cluster import deployment_checks
from storage.errors import StorageError
from storage.filesystem import open_storage
from train_fn.node.network_settings import meet_on_the_clusters_network
from train_fn.node.node_dir import SHARED_MEMORY
from train_fn.node.probe import accepts_connection
from train_fn.node.silent_peers import interface_of
from train_fn.node.versions import versions
from train_fn.storage_proof import APPEAR_S, appeared

CONNECT_S = 3.0
ALL_REDUCE_BYTES = 4 << 20
JOIN_S = 20.0
"""How long nodes may take to find each other for the sum, and one sum may take."""


class NodeProbe:
    """Lives on the node that it is asked about; every method returns plain values."""

    def __init__(self, node_id: str, ip: str) -> None:
        self._node_id = node_id
        self._ip = ip
        self._listener: socket.socket | None = None
        self._store: TCPStore | None = None

    def facts(self, has_gpu: bool) -> dict[str, object]:
        """Fields of ``NodeFacts`` that need nobody else."""
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
        """Unix seconds of this node's clock."""
        return time.time()

    def listen(self) -> int:
        """A port of this node's address that takes connections until this process ends; the kernel
        does, by its backlog."""
        family = socket.AF_INET6 if ":" in self._ip else socket.AF_INET
        self._listener = socket.create_server((self._ip, 0), family=family, backlog=1024)
        return int(self._listener.getsockname()[1])

    def connect(self, addresses: Sequence[tuple[str, int]]) -> list[bool]:
        """Which addresses accept a connection from here."""
        return accepts_connection(addresses, CONNECT_S)

    def write_storage(self, uri: str, check_id: str) -> StorageFacts:
        """Write this node's file."""
        data = deployment_checks.probe(check_id, self._node_id)
        began = time.monotonic()
        try:
            deployment_checks.write_probe(open_storage(uri), check_id, self._node_id, data)
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
                data = appeared(
                    partial(deployment_checks.read_probe, storage, check_id, writer), deadline
                )
            except StorageError as exc:
                return StorageFacts(problem=str(exc))
            if data is None:
                unseen.append(writer)
            elif data != deployment_checks.probe(check_id, writer):
                differs.append(writer)
        return StorageFacts(unseen=tuple(unseen), differs=tuple(differs))

    def host_store(self) -> int:
        """Make this node the one where the others meet for the sum; the port."""
        self._store = TCPStore(
            self._ip, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S)
        )
        return int(self._store.port)

    def all_reduce(
        self, backend: str, rank: int, meeting: tuple[str, int], world_size: int, seconds: float
    ) -> tuple[int, float]:
        """Add up ``ALL_REDUCE_BYTES`` over all nodes for so long: the number of sums, and seconds a
        sum.

        Raises RuntimeError where nodes do not find each other, one is too slow, or a sum is wrong.
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
    """Rank 0 tells the others within a sum that it is the last one, so that nobody waits for a sum
    that others do not make."""
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
