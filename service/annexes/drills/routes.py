"""Routes for what is asked of the ranks of a run: drills, profiles, stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Depends, Path
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection, select

from everstep.wire import Page, RunStatus
from everstep.wire.drills import (
    Drill,
    DrillRequest,
    Profile,
    ProfileRequest,
    ProfileState,
    StackReport,
)
from everstep.wire.events import EventKind
from service.annexes.drills import history as drills
from service.annexes.drills.history import STACK_KINDS, stack_reports
from service.api.auth import Caller, ControlledRun, VisibleRun
from service.api.blocking import db_read, db_write, folded, of_history, storage_call
from service.api.bodies import ApiRouter, Parsed, begun, blocks_of, download, example
from service.api.dependencies import Events, Streams, TheDatabase, TheSettings, TheStorage
from service.api.openapi import problem_answers
from service.api.problems import ApiProblem, invalid_request, not_found
from service.db.engine import Database
from service.db.events import EventStore
from service.db.ids import new_id
from service.db.tables import events
from service.db.writer import RunWriter
from service.model.rows import EventRow, past
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from storage.filesystem import Storage
from storage.run_control import DrillOrder, ProfileOrder, StackOrder
from storage.run_dir import RunDir

DrillBody = Annotated[DrillRequest, Parsed(), example({"kind": "kill_worker", "rank": 1})]
ProfileBody = Annotated[ProfileRequest, Parsed(), example({"rank": 0, "steps": 10})]

# ---------------------------------------------------------------- orders

# Requests to the ranks of a run (drills, profiles, stacks): events of its history, without a
# table of their own.

TAKE_UP_S: Final = 15.0
"""How long a request blocks another of its kind. A driver takes it up within about a second."""


@dataclass(frozen=True)
class RankOrder:
    """A kind of request: its name, the event that records it, and the events that show that it was
    taken up."""

    name: str
    requested: EventKind
    taken_up: tuple[EventKind, ...]


DRILL: Final = RankOrder(
    "drill", EventKind.DRILL_REQUESTED, (EventKind.DRILL_STARTED, EventKind.DRILL_FAILED)
)

PROFILE: Final = RankOrder(
    "profile",
    EventKind.PROFILE_REQUESTED,
    (
        EventKind.PROFILE_ORDERED,
        EventKind.PROFILE_STARTED,
        EventKind.PROFILE_DONE,
        EventKind.PROFILE_FAILED,
    ),
)

STACKS: Final = RankOrder(
    "look at the stacks",
    EventKind.STACKS_REQUESTED,
    (EventKind.STACKS_ORDERED, EventKind.STACKS),
)


def record(
    database: Database, run: RunRow, order: RankOrder, data: dict[str, Any], now: float
) -> EventRow:
    """Record a request to the ranks of ``run``, before it is sent.

    Args:
        database: the database.
        run: the run as the caller saw it.
        order: kind of request.
        data: data of the event; its ``id`` names the request.
        now: unix seconds.

    Raises:
        TransitionConflict: the run is not training, its ranks have changed, or its driver has not
            yet taken up another request of the kind.
    """
    with database.write() as connection:
        writer = RunWriter.lock(connection, run.id, now, database.hooks)
        found = writer.run
        if found.status != RunStatus.RUNNING or found.world_size is None:
            raise not_training(found, order)
        if (found.submission, found.attempt) != (run.submission, run.attempt):
            raise TransitionConflict(run.id, found.status, "its ranks have just changed; try again")
        waiting = _waiting(connection, run.id, order, now)
        if waiting is not None:
            raise TransitionConflict(
                run.id,
                found.status,
                f"{order.name} {waiting} has not been taken up yet; wait for it",
            )
        event = writer.append(order.requested, now, data, attempt=found.attempt)
        writer.save()
    return event


def not_training(run: RunRow, order: RankOrder) -> TransitionConflict:
    """Return the error for a run that has no ranks."""
    return TransitionConflict(run.id, run.status, f"a {order.name} needs a run that is RUNNING")


def _waiting(connection: Connection, run_id: str, order: RankOrder, now: float) -> str | None:
    """Return the id of the last request, if it was not taken up yet and may still be."""
    mine = events.c.run_id == run_id
    requested = (
        select(events.c.seq, events.c.at, events.c.data)
        .where(mine, events.c.kind == order.requested)
        .order_by(events.c.seq.desc())
        .limit(1)
    )
    newest = connection.execute(requested).one_or_none()
    if newest is None or now - past(newest.at, now) >= TAKE_UP_S:
        return None
    later = select(events.c.data).where(
        mine, events.c.kind.in_(order.taken_up), events.c.seq > newest.seq
    )
    wanted = str(newest.data.get("id"))
    taken = any(str(data.get("id")) == wanted for data in connection.execute(later).scalars())
    return None if taken else wanted


@dataclass(frozen=True)
class RankOrders:
    """Sends requests to the ranks of a run: records each, then writes it for the run's driver.

    Raises TransitionConflict as ``record``, 422 for a rank that the run does not have.
    """

    database: Database
    storage: Storage
    clock: Callable[[], float]

    async def drill(self, run: RunRow, wanted: DrillRequest, by: str) -> Drill:
        data = {"kind": wanted.kind.value, "rank": wanted.rank, "by": by}
        event = await self._recorded(run, DRILL, "drill", data)
        order = DrillOrder(event.data["id"], wanted.kind, wanted.rank, run.attempt)
        await storage_call(RunDir(self.storage, run.id).order_drill, run.submission, order)
        return drills.drill(drills.Story(event), ())

    async def profile(self, run: RunRow, wanted: ProfileRequest) -> Profile:
        data = {"rank": wanted.rank, "steps": wanted.steps}
        event = await self._recorded(run, PROFILE, "prof", data)
        order = ProfileOrder(event.data["id"], wanted.rank, wanted.steps, run.attempt)
        await storage_call(RunDir(self.storage, run.id).order_profile, run.submission, order)
        return drills.profiles([event])[0]

    async def stacks(self, run: RunRow) -> StackReport:
        event = await self._recorded(run, STACKS, "stk", {})
        order = StackOrder(event.data["id"], run.attempt)
        await storage_call(RunDir(self.storage, run.id).order_stacks, run.submission, order)
        return stack_reports([event])[0]

    async def _recorded(
        self, run: RunRow, order: RankOrder, kind: str, data: dict[str, Any]
    ) -> EventRow:
        if run.world_size is None:
            raise not_training(run, order)
        if data.get("rank", 0) >= run.world_size:
            raise invalid_request(
                "rank", msg=f"run {run.id} has ranks 0 to {run.world_size - 1}, not {data['rank']}"
            )
        now = self.clock()
        data = {"id": new_id(kind, now), **data}
        return await db_write(record, self.database, run, order, data, now)


async def rank_orders(database: TheDatabase, storage: TheStorage, events: Events) -> RankOrders:
    return RankOrders(database, storage, events.clock)


Orders = Annotated[RankOrders, Depends(rank_orders)]


# ---------------------------------------------------------------- drills

router: Final = ApiRouter("/v1/runs/{run_id}/drills", "drills")


async def drillable_run(run: VisibleRun, caller: Caller, settings: TheSettings) -> RunRow:
    """Return the run in the path, for a drill. Raises 403 for other callers than admins, and if
    drills are disabled."""
    caller.require("admin")
    if not settings.drills:
        detail = "drills are disabled; start the service with --drills or EVERSTEP_DRILLS=1"
        raise ApiProblem(403, "drills_disabled", detail)
    return run


DrillableRun = Annotated[RunRow, Depends(drillable_run)]


@router.post(
    "",
    status_code=202,
    summary="Inject a failure into a run",
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
)
async def request_drill(
    wanted: DrillBody, run: DrillableRun, orders: Orders, caller: Caller
) -> Drill:
    """Only for runs that are RUNNING, one drill at a time. The run's driver takes it up within a
    second; the list shows the result."""
    return await orders.drill(run, wanted, caller.name)


@router.get("", summary="Drills of a run", responses=problem_answers(404))
async def list_drills(run: VisibleRun, events: Events) -> Page[Drill]:
    """Every drill with its report, oldest first."""
    return Page(
        items=tuple([await _answer(events, run, story) for story in await _stories(events, run)]),
        next_cursor=None,
    )


@router.get("/{drill_id}", summary="One drill", responses=problem_answers(404))
async def get_drill(
    run: VisibleRun,
    events: Events,
    drill_id: Annotated[str, Path(max_length=32, description="Id of the drill: `drill_…`.")],
) -> Drill:
    for story in await _stories(events, run):
        if story.id == drill_id:
            return await _answer(events, run, story)
    raise not_found(f"run {run.id} has no drill {drill_id[:40]!r}")


async def _stories(events: EventStore, run: RunRow) -> list[drills.Story]:
    return await of_history(events, run.id, drills.DRILL_KINDS, drills.stories)


async def _answer(events: EventStore, run: RunRow, story: drills.Story) -> Drill:
    metrics: list[EventRow] = []
    if story.recovered is not None:
        after = max(0, story.requested.seq - drills.METRICS_BEFORE)
        metrics = await db_read(
            events.after, run.id, after, drills.METRICS_MOST, frozenset({EventKind.METRICS})
        )
    return await folded(partial(drills.drill, story), metrics)


# ---------------------------------------------------------------- profiles

# Routes of a run's profiles: request one, list them, download traces.

profiles_router: Final = ApiRouter("/v1/runs/{run_id}/profiles", "profiles")

GZIP: Final = "application/gzip"

ProfileId = Annotated[str, Path(max_length=32, description="Id of the profile: `prof_…`.")]


@profiles_router.post(
    "",
    status_code=202,
    summary="Record some steps of a rank",
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
)
async def request_profile(wanted: ProfileBody, run: ControlledRun, orders: Orders) -> Profile:
    """Only for runs that are RUNNING. The rank records its next steps with torch's profiler; other
    ranks and all results are unaffected. The list shows when the trace is ready."""
    return await orders.profile(run, wanted)


@profiles_router.get("", summary="Profiles of a run", responses=problem_answers(404))
async def list_profiles(run: VisibleRun, events: Events) -> Page[Profile]:
    """Oldest first."""
    return Page(items=tuple(await _all(events, run)), next_cursor=None)


@profiles_router.get("/{profile_id}", summary="One profile", responses=problem_answers(404))
async def get_profile(run: VisibleRun, events: Events, profile_id: ProfileId) -> Profile:
    for profile in await _all(events, run):
        if profile.id == profile_id:
            return profile
    raise not_found(f"run {run.id} has no profile {profile_id[:40]!r}")


@profiles_router.get(
    "/{profile_id}/trace",
    summary="Download a profile's trace",
    response_class=StreamingResponse,
    responses={
        200: {"content": {GZIP: {"schema": {"type": "string", "format": "binary"}}}},
        **problem_answers(404),
    },
)
async def get_trace(
    run: VisibleRun,
    events: Events,
    storage: TheStorage,
    streamed: Streams,
    caller: Caller,
    profile_id: ProfileId,
) -> StreamingResponse:
    """Gzipped JSON in Chrome's trace format, which https://ui.perfetto.dev opens."""
    streamed.require_room(caller)
    profile = await get_profile(run, events, profile_id)
    if profile.state is not ProfileState.DONE:
        why = profile.problem or f"the profile is {profile.state}"
        raise not_found(f"profile {profile.id} of run {run.id} has no trace: {why}")
    run_dir = RunDir(storage, run.id)
    blocks = blocks_of(run_dir, run_dir.trace_path(profile.id))
    trace = await storage_call(begun, blocks)
    headers = {
        "Content-Disposition": (
            f'attachment; filename="{run.id}-rank-{profile.rank}-{profile.id}.json.gz"'
        )
    }
    return download(streamed, caller, trace, GZIP, headers)


async def _all(events: EventStore, run: RunRow) -> list[Profile]:
    return await of_history(events, run.id, drills.PROFILE_KINDS, drills.profiles)


# ---------------------------------------------------------------- stacks

# Routes for what a run's ranks do now: ask for their stacks, and read them.

MOST_REPORTS: Final = 20

stacks_router: Final = ApiRouter("/v1/runs/{run_id}/stacks", "stacks")


@stacks_router.post(
    "",
    status_code=202,
    summary="Ask what the ranks do now",
    responses=problem_answers(400, 403, 404, 409),
)
async def request_stacks(run: ControlledRun, orders: Orders) -> StackReport:
    """Only for runs that are RUNNING. Their ranks are not interrupted. The list has the stacks a
    moment later."""
    return await orders.stacks(run)


@stacks_router.get("", summary="What the ranks did", responses=problem_answers(404))
async def list_stacks(run: VisibleRun, events: Events) -> Page[StackReport]:
    """The newest reports, newest first. The service adds one by itself when nothing has moved for a
    minute."""
    return Page(items=tuple(await newest_stacks(run, events)), next_cursor=None)


async def newest_stacks(run: RunRow, events: EventStore) -> list[StackReport]:
    """Return the newest reports on what a run's ranks did, newest first."""
    found = await of_history(events, run.id, STACK_KINDS, stack_reports)
    return found[: -MOST_REPORTS - 1 : -1]
