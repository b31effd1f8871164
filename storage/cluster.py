"""Files about the whole cluster, not one run: node marks, deployment checks and the storage's
identity.

Imports every other room of `storage`; nothing here imports it.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

from everstep.spec import plain_text
from storage.checkpoints.retention import reported_checkpoints
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptFile, StorageMismatch, StorageNotFound
from storage.filesystem import Storage
from storage.logs.journal import read_journal
from storage.run_dir import CheckpointName, RunDir

# ---------------------------------------------------------------- identity

# The identity of a storage: a file at its root with a UUID, which shows whether the storage was
# replaced, and with the database whose service uses it, which shows whether another one does.

IDENTITY_FILE = "everstep-storage.json"
KNOWN_VARIABLE = "EVERSTEP_KNOWN"
"""Environment variable in which the service passes a driver what its database knows of the run:
``Known`` as JSON."""
EXIT_STORAGE = 4
"""Exit code of a driver that did not touch the run's storage, because it is not the known one or
cannot be used."""
STORAGE_WORDS = "everstep: storage: "
"""Prefix of the line in which such a driver gives the reason."""
REMEDY = (
    "Mount or configure the storage that was used before. To continue with the present one, "
    "without the data that it lacks, run `everstep storage --adopt`"
)


@dataclass(frozen=True)
class Owner:
    """A database to which a storage belongs."""

    database_id: str
    generation: int
    """Starts of services with it: of two copies of a database the newer one has more."""
    service: str = field(default="", compare=False)
    """The service that wrote this, for people."""


@dataclass(frozen=True)
class Identity:
    """What the file says."""

    storage_id: str
    owner: Owner | None
    """None if only services have used it that wrote none."""


def new_identity() -> str:
    """Return a unique id."""
    return str(uuid.uuid4())


def read_identity(storage: Storage) -> str | None:
    """Return the storage's id; None if it has none. Raises as ``read_identity_file``."""
    found = read_identity_file(storage)
    return found.storage_id if found else None


def read_identity_file(storage: Storage) -> Identity | None:
    """Return what the file says; None if there is none. Raises StorageError; CorruptFile if the
    file has no valid id."""
    try:
        data = storage.files.read(IDENTITY_FILE)
    except StorageNotFound:
        return None
    try:
        fields = json.loads(data)
        owner = fields.get("owner")
        return Identity(
            str(uuid.UUID(fields["id"])),
            owner
            and Owner(
                str(owner["database_id"]), int(owner["generation"]), str(owner.get("service", ""))
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        path = storage.files.path(IDENTITY_FILE)
        raise CorruptFile(
            f"{path} contains no storage id ({exc}); restore it, or delete it and run `everstep "
            "storage adopt`"
        ) from exc


def write_identity(storage: Storage, identity: str) -> str:
    """Give a storage an id unless it has one; return its id. Raises StorageError."""
    storage.files.create_new(IDENTITY_FILE, json.dumps({"id": identity}).encode() + b"\n")
    found = read_identity(storage)
    if found is None:
        raise StorageMismatch(
            f"storage {storage.uri} does not return the identity file that was just written "
            f"to it. {REMEDY}"
        )
    return found


def write_owner(storage: Storage, storage_id: str, owner: Owner) -> None:
    """Record to which database the storage belongs. Raises StorageError."""
    data = {"id": storage_id, "owner": asdict(owner)}
    storage.files.write(IDENTITY_FILE, json.dumps(data).encode() + b"\n")


def check_identity(storage: Storage, known: str) -> Identity:
    """Return what the file says. Raises StorageMismatch if the storage does not have the known id;
    StorageError."""
    identity = read_identity_file(storage)
    found = identity.storage_id if identity else None
    if identity is None or found != known:
        has = (
            f"has the id {found}"
            if found
            else "has no id: it is empty, not mounted, or not the right one"
        )
        raise StorageMismatch(
            f"storage {storage.uri} {has}, but the database belongs to the storage with the id "
            f"{known}. {REMEDY}"
        )
    return identity


def problem_of_owner(found: Owner | None, mine: Owner | None) -> str | None:
    """Return why a database must not use a storage whose id it knows; None if it may.

    Args:
        found: to whom the storage belongs by its own file; None if nobody wrote that.
        mine: the database; None if no service has taken the storage with it.
    """
    if found is None:
        return None
    if mine is None or found.database_id != mine.database_id:
        return (
            f"belongs to the database of another service ({found.service}), which has taken it "
            "over. Stop one of the two, or give each a storage of its own; to take it back, stop "
            "the other one and run `everstep storage --adopt`"
        )
    if found.generation > mine.generation:
        return (
            f"was used with a newer copy of this database, by the service {found.service}: the "
            "database was restored from a backup, or another service runs on a copy of it. Stop "
            "the other service if there is one, and restore the newer database; to go on with "
            "this one, run `everstep storage --adopt`"
        )
    return None


@dataclass(frozen=True)
class Known:
    """What the service's database knows of its storage and of one run, for that run's driver."""

    storage: str | None = None
    """Id of the storage; None if unknown."""
    journal: int = 0
    """Newest submission with an event in its journal; 0 if there is none."""
    checkpoint: str | None = None
    """Name of the run's newest checkpoint."""

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str | None) -> Known:
        """Parse the result of ``to_text``; fields of a newer service are ignored. Raises
        ValueError."""
        found = json.loads(text) if text else {}
        return Known(found.get("storage"), int(found.get("journal", 0)), found.get("checkpoint"))


def check_known(run_dir: RunDir, known: Known) -> None:
    """Check that the storage has at least what the database knows of a run.

    A checkpoint that a journal names may be missing: restoring reports that, and uses the one
    before it.

    Raises:
        StorageMismatch: the storage lacks something; the error names it.
        StorageError: the storage could not be read.
    """
    if known.storage is not None:
        check_identity(run_dir.storage, known.storage)
    if known.journal and not read_journal(run_dir, known.journal, None, 1)[0]:
        raise StorageMismatch(
            f"the database knows the journal of submission {known.journal} of run "
            f"{run_dir.run_id}, but {run_dir.uri} does not have it. {REMEDY}"
        )
    name = CheckpointName.parse(known.checkpoint or "")
    if name is None:
        return
    newest = max((manifest.step for manifest in CheckpointStore(run_dir).list()), default=-1)
    if newest < 0 or (newest < name.step and name not in reported_checkpoints(run_dir)):
        there = f"has only checkpoints up to step {newest}" if newest >= 0 else "has no checkpoint"
        raise StorageMismatch(
            f"the database knows checkpoint {name} of run {run_dir.run_id}, but {run_dir.uri} "
            f"{there}. {REMEDY}"
        )


# ---------------------------------------------------------------- node marks

# Marks of nodes that may take no rank: ``cluster/nodes.json``, from the service to drivers.
#
# Only the service writes it, and always as a whole. Without the file no node is marked.

PATH = "cluster/nodes.json"
VERSION = 1

MarkState = Literal["cordoned", "draining"]


@dataclass(frozen=True)
class MarkedNode:
    """A node that takes no new ranks. Ranks also leave a node that is ``draining``. Times are unix
    seconds."""

    node_id: str
    state: MarkState
    reason: str | None
    by: str
    """Name of whoever set the mark."""
    at: float
    deadline: float | None = None
    """When a draining node will be removed; None if unknown."""


def encode_marks(marks: Iterable[MarkedNode]) -> bytes:
    """Return the file's bytes; equal marks give equal bytes."""
    nodes = {}
    for mark in sorted(marks, key=lambda mark: mark.node_id):
        fields = asdict(mark)
        nodes[fields.pop("node_id")] = fields
    return json.dumps({"version": VERSION, "nodes": nodes}, indent=1).encode()


NO_MARKS = encode_marks(())


def read_marks_file(storage: Storage) -> bytes:
    """Return the file's bytes; NO_MARKS if it does not exist. Raises StorageError."""
    try:
        return storage.files.read(PATH)
    except StorageNotFound:
        return NO_MARKS


def write_marks_file(storage: Storage, data: bytes) -> None:
    """Replace the file atomically. Raises StorageError."""
    storage.files.write(PATH, data)


def read_node_marks(storage: Storage) -> dict[str, MarkedNode]:
    """Return the marks by node id. Fields of a newer service are ignored.

    Raises StorageError; CorruptFile if the file has other content.
    """
    data = read_marks_file(storage)
    try:
        nodes = plain_text.parse_json(data)["nodes"]
        return {node_id: _mark(node_id, fields) for node_id, fields in nodes.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptFile(
            f"{storage.files.path(PATH)} does not contain node marks: {data[:80]!r}"
        ) from exc


def _mark(node_id: str, fields: dict[str, object]) -> MarkedNode:
    state, deadline = fields["state"], fields.get("deadline")
    if state not in ("cordoned", "draining"):
        raise ValueError(f"unknown state {state!r}")
    return MarkedNode(
        node_id=node_id,
        state="draining" if state == "draining" else "cordoned",
        reason=None if fields.get("reason") is None else str(fields["reason"]),
        by=str(fields.get("by", "")),
        at=float(str(fields["at"])),
        deadline=None if deadline is None else float(str(deadline)),
    )


# ---------------------------------------------------------------- deployment checks

# Files of deployment checks: ``cluster/checks/ID/`` with one probe per node, and the report.

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
