"""What does not fit between database and storage, and how an operator has the service go on with
the storage that is there."""

from __future__ import annotations

from typing import Final

import structlog

from everstep.wire.storage_status import RunBehind, StorageAdoption, StorageStatus
from service.db.node_marks import NodeMarkStore
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from service.storage_identity.gate import StorageGate, known_of
from storage.cluster.identity import check_known, read_identity
from storage.cluster.node_marks import read_node_marks
from storage.errors import StorageError, StorageMismatch, StorageOwned
from storage.filesystem import Storage
from storage.run_dir import RunDir

_MOST_UNKNOWN: Final = 100

log = structlog.get_logger(__name__)


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


def begin_with(gate: StorageGate, storage: Storage, marks: NodeMarkStore, adopt: str) -> None:
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
