"""Files of deployment checks: ``cluster/checks/ID/`` with one probe per node, and the report."""

from __future__ import annotations

import hashlib

from storage.errors import StorageNotFound
from storage.filesystem import Storage

PROBE_BYTES = 4 << 20
KEPT = 20
_ROOT = "cluster/checks"


def probe(check_id: str, node_id: str) -> bytes:
    """Return the content of a node's probe, which every reader can compute."""
    return hashlib.shake_128(f"{check_id} {node_id}".encode()).digest(PROBE_BYTES)


def write_probe(storage: Storage, check_id: str, node_id: str, data: bytes) -> None:
    """Write a node's probe. Raises StorageError."""
    storage.files.write(f"{_ROOT}/{check_id}/probes/{node_id}", data)


def read_probe(storage: Storage, check_id: str, node_id: str) -> bytes:
    """Return a node's probe. Raises StorageNotFound if this machine does not see it,
    StorageError."""
    return storage.files.read(f"{_ROOT}/{check_id}/probes/{node_id}")


def write_report(storage: Storage, check_id: str, data: bytes) -> None:
    """Write the report, and delete the probes and old checks. Raises StorageError."""
    storage.files.write(f"{_ROOT}/{check_id}/report.json", data)
    storage.files.delete_dir(f"{_ROOT}/{check_id}/probes")
    # sorted by name, which is by time
    checks = [entry.name for entry in storage.files.list(_ROOT) if entry.is_dir]
    for old in checks[:-KEPT]:
        storage.files.delete_dir(f"{_ROOT}/{old}")


def read_report(storage: Storage, check_id: str) -> bytes | None:
    """Return the report; None if there is none. Raises StorageError."""
    try:
        return storage.files.read(f"{_ROOT}/{check_id}/report.json")
    except StorageNotFound:
        return None
