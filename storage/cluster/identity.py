"""A storage's identity: a UUID in a file at its root, which tells a replaced storage from the known
one."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass

from storage.checkpoints.journal_records import told_checkpoints
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptFile, StorageMismatch, StorageNotFound
from storage.filesystem import Storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from storage.run_names import CheckpointName

IDENTITY_FILE = "everstep-storage.json"
KNOWN_VARIABLE = "EVERSTEP_KNOWN"
"""Variable in which the service tells a driver what its database knows of the run: ``Known`` as
JSON."""
EXIT_STORAGE = 4
"""Exit code of a driver that left the run's storage alone, since it is not the one that is known,
or could not be used."""
STORAGE_WORDS = "everstep: storage: "
"""How the line begins in which such a driver says why."""
REMEDY = (
    "Mount or name the storage that was used before. To go on with the one that is there, and "
    "without what it lacks, run "
    "`everstep storage adopt`"
)


def new_identity() -> str:
    """Return an id that no other storage has."""
    return str(uuid.uuid4())


def read_identity(storage: Storage) -> str | None:
    """Return the storage's id; None where it has none. Raises StorageError, or CorruptFile if the
    file holds no id."""
    try:
        data = storage.files.read(IDENTITY_FILE)
    except StorageNotFound:
        return None
    try:
        return str(uuid.UUID(json.loads(data)["id"]))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        path = storage.files.path(IDENTITY_FILE)
        raise CorruptFile(
            f"{path} holds no storage id ({exc}); put it back, or delete it and adopt the storage"
        ) from exc


def write_identity(storage: Storage, identity: str) -> str:
    """Give a storage an id unless it has one, and return the id that it has then. Raises
    StorageError."""
    storage.files.create_new(IDENTITY_FILE, json.dumps({"id": identity}).encode() + b"\n")
    found = read_identity(storage)
    if found is None:
        raise StorageMismatch(
            f"storage {storage.uri} does not return the identity file that was just written "
            f"to it. {REMEDY}"
        )
    return found


def check_identity(storage: Storage, known: str) -> None:
    """Raise StorageMismatch if the storage has another id than the known one, or none;
    StorageError."""
    found = read_identity(storage)
    if found != known:
        has = (
            f"has the id {found}"
            if found
            else "has no id: it is empty, not mounted, or another one"
        )
        raise StorageMismatch(
            f"storage {storage.uri} {has}, and the database belongs to the storage with the id "
            f"{known}. {REMEDY}"
        )


@dataclass(frozen=True)
class Known:
    """What a service's database knows of its storage and of one run, for that run's driver."""

    storage: str | None = None
    """Id of the storage; None where nobody knows it."""
    journal: int = 0
    """Newest submission with an event in its journal; 0 for none."""
    checkpoint: str | None = None
    """Name of the run's newest checkpoint."""

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str | None) -> Known:
        """Parse what ``to_text`` returned; fields of a newer service are ignored. Raises
        ValueError."""
        found = json.loads(text) if text else {}
        return Known(found.get("storage"), int(found.get("journal", 0)), found.get("checkpoint"))


def check_known(run_dir: RunDir, known: Known) -> None:
    """Check that the storage holds at least what the database knows of a run.

    A checkpoint that a journal names may be missing: restoring reports that, and takes the one
    before it.

    Raises:
        StorageMismatch: it holds less; the error says what is missing.
        StorageError: it could not be read.
    """
    if known.storage is not None:
        check_identity(run_dir.storage, known.storage)
    if known.journal and not read_journal(run_dir, known.journal, None, 1)[0]:
        raise StorageMismatch(
            f"the database knows the journal of submission {known.journal} of run "
            f"{run_dir.run_id}, which is not in "
            f"{run_dir.uri}. {REMEDY}"
        )
    name = CheckpointName.parse(known.checkpoint or "")
    if name is None:
        return
    newest = max((manifest.step for manifest in CheckpointStore(run_dir).list()), default=-1)
    if newest < 0 or (newest < name.step and name not in told_checkpoints(run_dir)):
        there = (
            f"its newest checkpoint is of step {newest}"
            if newest >= 0
            else "it holds no checkpoint"
        )
        raise StorageMismatch(
            f"the database knows checkpoint {name} of run {run_dir.run_id}; {there}, in "
            f"{run_dir.uri}. {REMEDY}"
        )
