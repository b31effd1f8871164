"""Whether the storage is the one that the database belongs to, and adopting another one.

Imports the database and the model. The API, the reconciler and the start of the service ask it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import structlog

from everstep.wire.cluster import RunBehind, StorageAdoption, StorageStatus
from service.db.checkpoints import CheckpointRecords
from service.db.node_marks import KnownStorage, NodeMarks, StorageRecords
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from storage.cluster import (
    Known,
    Owner,
    check_identity,
    check_known,
    new_identity,
    problem_of_owner,
    read_identity,
    read_identity_file,
    read_node_marks,
    write_identity,
    write_owner,
)
from storage.errors import CorruptFile, StorageError, StorageMismatch, StorageOwned
from storage.filesystem import Storage
from storage.run_control import Kept
from storage.run_dir import RunDir

# ---------------------------------------------------------------- gate

# Whether the storage is the one that the database belongs to: asked before anything is begun
# there, or concluded from it.

KEPT_S: Final = 5.0
"""How long an answer of ``problem`` is kept."""

log = structlog.get_logger(__name__)


class StorageGate:
    """One for each process that works with the storage. Any thread may ask; it blocks.

    ``service`` names this service for people: where it is, beside its host.
    """

    def __init__(
        self,
        storage: Storage,
        records: StorageRecords,
        monotonic: Callable[[], float] = time.monotonic,
        service: str = "",
    ) -> None:
        self._service = " ".join(filter(None, (socket.gethostname(), service)))
        self._storage = storage
        self._records = records
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._problem: str | None = None
        self._asked_at = float("-inf")

    def check(self) -> str:
        """Return the storage's id, which is given to a storage that is used for the first time.

        Raises:
            StorageOwned: it belongs to another database, and this one has never used a storage.
            StorageMismatch: it is not the storage that the database belongs to, or no more.
            StorageError: it could not be read.
            DatabaseError: the database does not answer.
        """
        known = self._records.get() or self._first_use()
        if not known.was_seen:
            if write_identity(self._storage, known.storage_id) != known.storage_id:
                raise self._owned()
            self._records.seen(known.storage_id)
        found = check_identity(self._storage, known.storage_id)
        if problem_of_owner(found.owner, known.owner) is None:
            return known.storage_id
        # A replica that started meanwhile has written to the database first.
        known = self._records.get() or known
        if problem := problem_of_owner(found.owner, known.owner):
            raise StorageMismatch(
                f"storage {self._storage.uri} with the id {known.storage_id} {problem}"
            )
        return known.storage_id

    def is_first_use(self) -> bool:
        """Return whether no service with this database has taken a storage. Raises
        DatabaseError."""
        known = self._records.get()
        return known is None or known.owner is None

    def take(self) -> None:
        """Record in the storage that it belongs to this database: once a start, so that whoever
        uses it with another database or an older copy of this one notices. Raises as ``check``."""
        self._write(self.check(), self._records.take())

    def adopt(self) -> str:
        """Have the storage belong to this database from now on, whosever it was. Return its id.
        Raises StorageError, DatabaseError."""
        storage_id = read_identity(self._storage) or write_identity(self._storage, new_identity())
        self._write(storage_id, self._records.replace(storage_id))
        self.forget()
        return storage_id

    def _write(self, storage_id: str, owner: Owner) -> None:
        write_owner(self._storage, storage_id, replace(owner, service=self._service))

    def problem(self) -> str | None:
        """Return why the storage must not be used, as of the last few seconds; None where it may.
        Raises DatabaseError."""
        with self._lock:
            if self._monotonic() - self._asked_at >= KEPT_S:
                try:
                    self.check()
                    found = None
                except StorageError as exc:
                    found = str(exc)
                if found is not None and found != self._problem:
                    log.error("storage_unavailable", problem=found)
                self._problem, self._asked_at = found, self._monotonic()
            return self._problem

    def require(self) -> None:
        """Raises StorageMismatch where ``problem`` says so, DatabaseError."""
        if (problem := self.problem()) is not None:
            raise StorageMismatch(problem)

    def forget(self) -> None:
        """Have the next question asked anew."""
        with self._lock:
            self._asked_at = float("-inf")

    def check_run(self, run: RunRow) -> Known:
        """See that a run may go on here. Returns what its driver is to find.

        Raises StorageMismatch where the storage holds submissions that the database does not know,
        and as ``check``.
        """
        storage_id = self.check()
        newest = max(RunDir(self._storage, run.id).submissions(), default=0)
        if newest > run.submission:
            raise StorageMismatch(
                f"the storage holds submission {newest} of run {run.id}, and the database knows "
                f"{run.submission}: the database is "
                "older than its storage, for instance restored from a backup. End the other "
                "service if there is one, and restore a "
                "newer database; or run `everstep storage --adopt`, which reads what the storage "
                "holds beyond it"
            )
        return known_of(run, storage_id)

    def _first_use(self) -> KnownStorage:
        """The database is new: it knows no storage."""
        if read_identity_file(self._storage) is None:
            return self._records.claim(new_identity())
        known = self._records.get()  # a replica may have been first
        if known is None:
            raise self._owned()
        return known

    def _owned(self) -> StorageOwned:
        found = read_identity_file(self._storage)
        storage_id = found.storage_id if found else None
        by = f" ({found.owner.service})" if found and found.owner else ""
        return StorageOwned(
            f"storage {self._storage.uri} with the id {storage_id} belongs to the database of "
            f"another service{by}, and the database of this one ({self._service}) has never used "
            "it. Give this service a storage of its own, or the other's database. If that database "
            "is lost or retired, end its service and start this one with --adopt-storage "
            f"{storage_id}: it then knows none of the runs there, and keeps the marks of nodes"
        )


def known_of(run: RunRow, storage_id: str | None) -> Known:
    """What the database knows of a run."""
    checkpoint = run.latest_checkpoint["name"] if run.latest_checkpoint else None
    return Known(storage_id, run.journal_submission if run.journal_n else 0, checkpoint)


# ---------------------------------------------------------------- adoption

# What does not fit between database and storage, and how an operator has the service go on with
# the storage that is there.

_MOST_UNKNOWN: Final = 100


def storage_status(storage: Storage, runs: RunStore, gate: StorageGate) -> StorageStatus:
    """Compare the storage with the database. An error of the storage is returned as the problem.

    Raises DatabaseError.
    """
    gate.forget()
    problem, known = gate.problem(), runs.storage.get()
    found: str | None = None
    behind: list[RunBehind] = []
    unknown: list[str] = []
    try:
        found = read_identity(storage)
        behind = [
            RunBehind(run_id=run.id, database_submission=run.submission, storage_submission=newest)
            for run in _unended(runs)
            if (newest := _newest(storage, run)) > run.submission
        ]
        ids = runs.storage.run_ids()
        unknown = [
            entry.name
            for entry in storage.files.list("runs")
            if entry.is_dir and entry.name not in ids
        ]
    except StorageError as exc:
        problem = problem or str(exc)
    return StorageStatus(
        uri=storage.uri,
        known_id=known.storage_id if known else None,
        found_id=found,
        problem=problem,
        behind=tuple(behind),
        unknown_runs=tuple(unknown[:_MOST_UNKNOWN]),
    )


def adopt_storage(storage: Storage, runs: RunStore, gate: StorageGate) -> StorageAdoption:
    """Go on with the storage that is there, which then belongs to this database. Runs that have not
    ended are brought in line with what it holds of them.

    Doing it again changes nothing more. Raises StorageError, DatabaseError.
    """
    before = runs.storage.get()
    unended = [(run, _newest(storage, run), _is_short(storage, run)) for run in _unended(runs)]
    storage_id = gate.adopt()
    caught_up, lost = [], []
    for run, newest, is_short in unended:
        if newest <= run.submission and not is_short:
            continue
        try:
            runs.adopt(run.id, storage_id, newest, is_short=is_short)
        except TransitionConflict:
            continue  # deleted meanwhile
        if newest > run.submission:
            caught_up.append(run.id)
        if is_short:
            lost.append(run.id)
    log.warning(
        "the storage was adopted",
        storage=storage.uri,
        storage_id=storage_id,
        caught_up=caught_up,
        lost=lost,
    )
    previous = before.storage_id if before else None
    return StorageAdoption(
        storage_id=storage_id, previous_id=previous, caught_up=tuple(caught_up), lost=tuple(lost)
    )


def begin_with(gate: StorageGate, storage: Storage, marks: NodeMarks, adopt: str) -> None:
    """Take the storage at a service's start. A database that has never used one keeps the marks of
    nodes which it finds there.

    Args:
        adopt: id of a storage that is taken over if it belongs to another database; "" for none.

    Raises StorageOwned, StorageMismatch, StorageError, DatabaseError.
    """
    is_first, is_owned = gate.is_first_use(), False
    try:
        gate.check()
    except StorageOwned:
        if adopt != read_identity(storage):
            raise
        is_owned = True
    if is_first:
        marks.keep(read_node_marks(storage).values())
    if is_owned:
        gate.adopt()
        log.warning("the storage was adopted", storage=storage.uri, storage_id=adopt)
    else:
        gate.take()


def _unended(runs: RunStore) -> list[RunRow]:
    return list(runs.rows(runs.checkpoints.unended()).values())


def _newest(storage: Storage, run: RunRow) -> int:
    return max(RunDir(storage, run.id).submissions(), default=0)


def _is_short(storage: Storage, run: RunRow) -> bool:
    """Whether the storage lacks what the database knows of a run."""
    try:
        check_known(RunDir(storage, run.id), known_of(run, None))
    except StorageMismatch:
        return True
    return False


# ---------------------------------------------------------------- kept checkpoints

# Copies of database rows in the storage, which drivers read: checkpoints to keep. Imports the
# database. The API and the reconciler import it.


class KeptSteps:
    """Writes the files from the database's rows. Synchronous: call it in a thread."""

    def __init__(self, storage: Storage, records: CheckpointRecords) -> None:
        self._storage = storage
        self._records = records
        self._written: set[str] | None = None
        """Runs whose file may hold something; None before the first look, which goes over all that
        have not ended."""

    def publish(self) -> None:
        """Make the files of runs that have not ended say what the database says. Raises
        StorageError, DatabaseError; the next call heals them.

        A run that has ended deletes no checkpoint, and may itself be deleted meanwhile.
        """
        wanted, unended = self._wanted(), set(self._records.unended())
        candidates = unended if self._written is None else wanted.keys() | self._written
        for run_id in sorted(candidates & unended):
            self._write(run_id, wanted.get(run_id, Kept()))
        self._written = set(wanted)

    def _wanted(self) -> dict[str, Kept]:
        awaited, corrupt = self._records.awaited(), self._records.corrupt()
        none: frozenset[str] = frozenset()
        return {
            run_id: Kept(awaited.get(run_id, frozenset()), corrupt.get(run_id, none))
            for run_id in awaited.keys() | corrupt.keys()
        }

    def _write(self, run_id: str, kept: Kept) -> None:
        run_dir = RunDir(self._storage, run_id)
        try:
            if run_dir.kept() == kept:
                return
        except CorruptFile:
            pass  # written anew
        run_dir.keep_steps(kept.steps, kept.corrupt)
