"""Sweeps in the database, and what is known of their runs. Every method is one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    and_,
    delete,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import IntegrityError

from everstep.spec.run_spec import RunSpec
from everstep.spec.sweep import SweepSpec
from everstep.spec.trials import SweepTrial
from everstep.wire import RunStatus
from everstep.wire.sweep import SweepReason, SweepReasonCode, SweepStatus
from service.db.audit import note_target
from service.db.checkpoints import hold_origin
from service.db.engine import Database, DatabaseError, StateConflict, Store
from service.db.events import SeriesStore
from service.db.lease import IdempotencyKey, check_same_body, new_id
from service.db.projects import ensure_project
from service.db.run_lookup import Place
from service.db.runs import PlaceTaken
from service.db.tables import RUN_ID, metadata, runs
from service.model.rows import StoredRow
from storage.run_control import Stop

# ---------------------------------------------------------------- tables

# The tables of sweeps, and their rows. Times are unix seconds.

sweeps = Table(
    "sweeps",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("project", String(64), nullable=False),
    Column("status", String(16), nullable=False),
    Column("reason_code", String(64)),
    Column("reason_message", Text),
    Column("spec", JSON, nullable=False),
    Column("created_by", String(32), nullable=False),  # token id
    Column("created_at", Double, nullable=False),
    Column("finished_at", Double),
    Column("idempotency_key", String(255)),
    Column("body_sha256", String(64)),
    UniqueConstraint("created_by", "idempotency_key"),
    Index(None, "created_at", "id"),
    Index(None, "project", "created_at", "id"),
    Index(None, "status"),
)

UNENDED: Final = sweeps.c.status.in_(
    sorted(status.value for status in SweepStatus if not status.terminal)
)
"""Condition on ``sweeps``: it submits runs, or stops them."""

sweep_runs = Table(
    "sweep_runs",
    metadata,
    Column("sweep_id", String(32), ForeignKey("sweeps.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("params", JSON, nullable=False),
    Column("spec", JSON, nullable=False),  # of the run, as resolved
    Column("run_id", RUN_ID),  # not a foreign key: outlives the run
    Column("rung", Integer, nullable=False),
    Column("results", JSON, nullable=False),
    Column("best_value", Double),
    Column("best_step", Integer),
    Column("seen_step", Integer),
)


@dataclass(frozen=True, slots=True)
class SweepRow(StoredRow):
    """A sweep."""

    id: str
    name: str
    project: str
    status: str
    reason_code: str | None
    reason_message: str | None
    spec: dict[str, Any]
    """The SweepSpec, with name, mode and seed filled in."""
    created_by: str
    """Token id."""
    created_at: float
    finished_at: float | None

    @property
    def state(self) -> SweepStatus:
        return SweepStatus(self.status)

    @property
    def sweep_spec(self) -> SweepSpec:
        """Return the spec as stored: checks that were added later do not refuse it."""
        return SweepSpec.model_validate(self.spec)


@dataclass(frozen=True, slots=True)
class TrialRow(StoredRow):
    """A run of a sweep, with what its own row says now."""

    sweep_id: str
    number: int
    params: dict[str, Any]
    run_id: str | None
    """None before it is submitted; the id stays when the run is deleted."""
    rung: int
    """Rungs of successive halving from which it went on."""
    results: list[list[Any]]
    """[step, value | None] for each rung that it has reached."""
    best_value: float | None
    best_step: int | None
    seen_step: int | None
    """Last step of the metric that ``best_value`` counts; None if the run never reported it."""
    status: RunStatus | None
    """None before it is submitted, and once its run is deleted."""
    step: int | None
    total_steps: int | None
    stop_requested: Stop | None
    row_version: int | None

    def __post_init__(self) -> None:
        if self.status is not None:
            object.__setattr__(self, "status", RunStatus(self.status))

    @property
    def is_deleted(self) -> bool:
        return self.run_id is not None and self.status is None


_CREATE_ATTEMPTS: Final = 5
_OF_RUN: Final = {
    name: runs.c[name]
    for name in ("status", "step", "total_steps", "stop_requested", "row_version")
}
_TRIALS: Final = (
    select(
        *(
            _OF_RUN[name] if name in _OF_RUN else sweep_runs.c[name]
            for name in TrialRow.__dataclass_fields__
        )
    )
    .outerjoin(runs, runs.c.id == sweep_runs.c.run_id)
    .order_by(sweep_runs.c.sweep_id, sweep_runs.c.number)
)
_CANCELLED: Final = SweepReason(
    code=SweepReasonCode.CANCELLED_BY_USER, message="Cancelled through the API."
)


class SweepConflict(StateConflict):
    """The sweep is in a status that does not allow the request."""


SPECS_TO_COME: Final = (
    select(sweep_runs.c.spec).join(sweeps).where(UNENDED, sweep_runs.c.run_id.is_(None))
)
"""Specs of runs that sweeps will submit."""


class SweepStore(Store):
    """Sweeps."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        super().__init__(database, clock)
        self.series = SeriesStore(database)

    def create(
        self,
        spec: SweepSpec,
        trials: Sequence[SweepTrial],
        created_by: str,
        idempotency: IdempotencyKey | None = None,
        *,
        create_project: bool = True,
    ) -> tuple[SweepRow, bool]:
        """Record a sweep with its runs, none of which is submitted yet.

        Args:
            spec: validated spec with name and seed.
            trials: its runs.
            created_by: token id.
            idempotency: the request's key, if it has one.
            create_project: create the project if it does not exist.

        Returns:
            The sweep, and whether it is new: False for a repeated request.

        Raises IdempotencyConflict, UnknownProject, OriginGone.
        """
        project = trials[0].spec.project
        for _ in range(_CREATE_ATTEMPTS):
            try:
                with self._database.write() as connection:
                    known = _known(connection, idempotency)
                    if known is not None:
                        note_target(known.id)
                        return known, False
                    for trial in trials:
                        hold_origin(connection, trial.spec)
                    now = self._clock()
                    ensure_project(connection, project, now, create=create_project)
                    sweep = _new_row(new_id("sweep", now), spec, project, created_by, now)
                    key = idempotency and {
                        "idempotency_key": idempotency.key,
                        "body_sha256": idempotency.body_sha256,
                    }
                    connection.execute(insert(sweeps), sweep.columns() | (key or {}))
                    rows = [
                        _new_trial(sweep.id, number, each) for number, each in enumerate(trials)
                    ]
                    connection.execute(insert(sweep_runs), rows)
                    note_target(sweep.id)
                    return sweep, True
            except IntegrityError:
                # Another replica used the key first, or the id is taken: try again.
                continue
        raise DatabaseError("found no free sweep id or idempotency key; try again")

    def get(self, sweep_id: str) -> SweepRow | None:
        with self._database.autocommit() as connection:
            return _find(connection, sweep_id)

    def page(
        self, project: str | None, statuses: Sequence[str], limit: int, before: Place | None
    ) -> list[SweepRow]:
        """Return sweeps, newest first. ``before`` is (created_at, id) of the last one of the
        previous page."""
        query = SweepRow.select(sweeps).order_by(sweeps.c.created_at.desc(), sweeps.c.id.desc())
        if project is not None:
            query = query.where(sweeps.c.project == project)
        if statuses:
            query = query.where(sweeps.c.status.in_(statuses))
        if before is not None:
            query = query.where(tuple_(sweeps.c.created_at, sweeps.c.id) < tuple_(*before))
        return self._rows(SweepRow, query.limit(limit))

    def live(self) -> list[SweepRow]:
        """Return every sweep that has not ended, oldest first."""
        query = SweepRow.select(sweeps).where(UNENDED)
        return self._rows(SweepRow, query.order_by(sweeps.c.created_at, sweeps.c.id))

    def trials(self, sweep_ids: Sequence[str]) -> dict[str, list[TrialRow]]:
        """Return the runs of each sweep, in the order of their numbers."""
        found: dict[str, list[TrialRow]] = {sweep_id: [] for sweep_id in sweep_ids}
        query = _TRIALS.where(sweep_runs.c.sweep_id.in_(sweep_ids))
        with self._database.read() as connection:
            for row in connection.execute(query):
                found[row.sweep_id].append(TrialRow(*row))
        return found

    def trial_spec(self, sweep_id: str, number: int) -> RunSpec:
        """Return the spec of a run, as it was validated with its sweep."""
        query = select(sweep_runs.c.spec).where(
            sweep_runs.c.sweep_id == sweep_id, sweep_runs.c.number == number
        )
        with self._database.autocommit() as connection:
            return RunSpec.model_validate(connection.execute(query).scalar_one())

    def metric_names(self, run_id: str) -> list[str]:
        """Return the names of the metrics of a run."""
        query = select(runs.c.metrics).where(runs.c.id == run_id)
        with self._database.autocommit() as connection:
            return sorted(connection.execute(query).scalar_one_or_none() or {})

    def record(self, sweep_id: str, changes: Mapping[int, Mapping[str, Any]]) -> None:
        """Set columns of runs of a sweep, by number."""
        with self._database.write() as connection:
            for number, columns in changes.items():
                connection.execute(
                    update(sweep_runs)
                    .where(sweep_runs.c.sweep_id == sweep_id, sweep_runs.c.number == number)
                    .values(**columns)
                )

    def set_reason(self, sweep_id: str, reason: SweepReason | None) -> None:
        """Set or clear what a running sweep waits for or has met. Does nothing once it stops."""
        is_running = sweeps.c.status == SweepStatus.RUNNING.value
        self._change(sweep_id, is_running, _reason_columns(reason))

    def end(self, sweep_id: str, status: SweepStatus, reason: SweepReason | None) -> None:
        """End a sweep. Does nothing if it has ended."""
        values = {"status": status.value, "finished_at": self._clock(), **_reason_columns(reason)}
        self._change(sweep_id, UNENDED, values)

    def _change(
        self, sweep_id: str, condition: ColumnElement[bool], values: Mapping[str, Any]
    ) -> None:
        mine = sweeps.c.id == sweep_id
        with self._database.write() as connection:
            connection.execute(update(sweeps).where(mine, condition).values(**values))

    def request_cancel(self, sweep_id: str) -> SweepRow:
        """Let a sweep stop: it submits no run any more, and cancels those that have not ended.
        Repeating the request changes nothing. Raises SweepConflict once it has ended."""
        note_target(sweep_id)
        with self._database.write() as connection:
            sweep = _locked(connection, sweep_id)
            if sweep.state == SweepStatus.RUNNING:
                values = {"status": SweepStatus.STOPPING.value, **_reason_columns(_CANCELLED)}
                connection.execute(update(sweeps).where(sweeps.c.id == sweep_id).values(**values))
                sweep = _locked(connection, sweep_id)
            elif sweep.state.terminal:
                raise SweepConflict(
                    f"sweep {sweep_id} is {sweep.status}; it has no runs left to cancel"
                )
            return sweep

    def delete(self, sweep_id: str) -> None:
        """Delete a sweep that has ended. Its runs stay. Raises SweepConflict."""
        note_target(sweep_id)
        with self._database.write() as connection:
            sweep = _locked(connection, sweep_id)
            if not sweep.state.terminal:
                raise SweepConflict(
                    f"sweep {sweep_id} is {sweep.status}; only a sweep that has ended can be "
                    "deleted, cancel it first"
                )
            connection.execute(delete(sweeps).where(sweeps.c.id == sweep_id))


def _new_row(sweep_id: str, spec: SweepSpec, project: str, created_by: str, now: float) -> SweepRow:
    return SweepRow(
        id=sweep_id,
        name=spec.name or sweep_id,
        project=project,
        status=SweepStatus.RUNNING.value,
        reason_code=None,
        reason_message=None,
        spec=spec.model_dump(mode="json"),
        created_by=created_by,
        created_at=now,
        finished_at=None,
    )


def _new_trial(sweep_id: str, number: int, trial: SweepTrial) -> dict[str, Any]:
    return {
        "sweep_id": sweep_id,
        "number": number,
        "params": dict(trial.params),
        "spec": trial.spec.model_dump(mode="json"),
        "rung": 0,
        "results": [],
    }


def _known(connection: Connection, idempotency: IdempotencyKey | None) -> SweepRow | None:
    """Return the sweep that was created with this key, or None. Raise IdempotencyConflict."""
    if idempotency is None:
        return None
    query = select(sweeps.c.id, sweeps.c.body_sha256).where(
        sweeps.c.created_by == idempotency.scope, sweeps.c.idempotency_key == idempotency.key
    )
    found = connection.execute(query).one_or_none()
    if found is None:
        return None
    check_same_body(idempotency, found.body_sha256)
    return _find(connection, found.id)


def _find(connection: Connection, sweep_id: str) -> SweepRow | None:
    row = connection.execute(SweepRow.select(sweeps).where(sweeps.c.id == sweep_id)).one_or_none()
    return None if row is None else SweepRow(*row)


def _locked(connection: Connection, sweep_id: str) -> SweepRow:
    query = SweepRow.select(sweeps).where(sweeps.c.id == sweep_id).with_for_update()
    row = connection.execute(query).one_or_none()
    if row is None:
        raise SweepConflict(f"sweep {sweep_id} was deleted")
    return SweepRow(*row)


def _reason_columns(reason: SweepReason | None) -> dict[str, str | None]:
    return {
        "reason_code": reason.code.value if reason else None,
        "reason_message": reason.message if reason else None,
    }


# ---------------------------------------------------------------- sweep places

# The place of a run in its sweep: taken in the transaction that records the run, so that no place
# gets two.


class SweepPlace(NamedTuple):
    """A run's place: its sweep, and its number in it."""

    sweep_id: str
    number: int

    def check(self, connection: Connection) -> None:
        """Hold the sweep until the transaction ends. Raises PlaceTaken."""
        sweep = select(sweeps.c.status).where(sweeps.c.id == self.sweep_id).with_for_update()
        status = connection.execute(sweep).scalar_one_or_none()
        run_id = select(sweep_runs.c.run_id).where(self._row)
        if status != SweepStatus.RUNNING or connection.execute(run_id).scalar_one() is not None:
            raise PlaceTaken(f"run {self.number} of sweep {self.sweep_id} is not to be submitted")

    def fill(self, connection: Connection, run_id: str) -> None:
        """Record the run of this place."""
        connection.execute(update(sweep_runs).where(self._row).values(run_id=run_id))

    @property
    def _row(self) -> ColumnElement[bool]:
        return and_(sweep_runs.c.sweep_id == self.sweep_id, sweep_runs.c.number == self.number)
