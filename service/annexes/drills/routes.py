"""Routes for what is asked of the ranks of a run: drills, profiles, stacks."""

from __future__ import annotations

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
from service.api.bodies import ApiRouter, Parsed, begun, blocks_of, download, example
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.api.problems import ApiProblem, invalid_request, not_found
from service.db.engine import Database
from service.db.ids import new_id
from service.db.tables import events
from service.db.writer import RunWriter
from service.model.rows import EventRow, past
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from storage.run_control import DrillOrder, ProfileOrder, StackOrder
from storage.run_dir import RunDir

DrillBody = Annotated[DrillRequest, Parsed(), example({"kind": "kill_worker", "rank": 1})]
ProfileBody = Annotated[ProfileRequest, Parsed(), example({"rank": 0, "steps": 10})]

router: Final = ApiRouter("/v1/runs/{run_id}/drills", "drills")


async def drillable_run(run: VisibleRun, caller: Caller, context: Context) -> RunRow:
    """Return the run in the path, for a drill. Raises 403 for other callers than admins, and if
    drills are disabled."""
    caller.require("admin")
    if not context.settings.drills:
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
    wanted: DrillBody, run: DrillableRun, context: Context, caller: Caller
) -> Drill:
    """Only for runs that are RUNNING, one drill at a time. The run's driver takes it up within a
    second; the list shows the result."""
    now = context.clock()
    data = {
        "id": new_id("drill", now),
        "kind": wanted.kind.value,
        "rank": wanted.rank,
        "by": caller.name,
    }
    event = await recorded(context, run, DRILL, now, data)
    order = DrillOrder(event.data["id"], wanted.kind, wanted.rank, run.attempt)
    await context.storage_call(RunDir(context.storage, run.id).order_drill, run.submission, order)
    return drills.drill(drills.Story(event), ())


@router.get("", summary="Drills of a run", responses=problem_answers(404))
async def list_drills(run: VisibleRun, context: Context) -> Page[Drill]:
    """Every drill with its report, oldest first."""
    return Page(
        items=tuple([await _answer(context, run, story) for story in await _stories(context, run)]),
        next_cursor=None,
    )


@router.get("/{drill_id}", summary="One drill", responses=problem_answers(404))
async def get_drill(
    run: VisibleRun,
    context: Context,
    drill_id: Annotated[str, Path(max_length=32, description="Id of the drill: `drill_…`.")],
) -> Drill:
    for story in await _stories(context, run):
        if story.id == drill_id:
            return await _answer(context, run, story)
    raise not_found(f"run {run.id} has no drill {drill_id[:40]!r}")


async def _stories(context: ApiContext, run: RunRow) -> list[drills.Story]:
    events = await context.database_call(context.events.of_kinds, run.id, drills.DRILL_KINDS)
    return await context.folded(drills.stories, events)


async def _answer(context: ApiContext, run: RunRow, story: drills.Story) -> Drill:
    metrics: list[EventRow] = []
    if story.recovered is not None:
        after = max(0, story.requested.seq - drills.METRICS_BEFORE)
        metrics = await context.database_call(
            context.events.after, run.id, after, drills.METRICS_MOST, frozenset({EventKind.METRICS})
        )
    return await context.folded(partial(drills.drill, story), metrics)


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
async def request_profile(wanted: ProfileBody, run: ControlledRun, context: Context) -> Profile:
    """Only for runs that are RUNNING. The rank records its next steps with torch's profiler; other
    ranks and all results are unaffected. The list shows when the trace is ready."""
    return await order_profile(run, context, wanted)


async def order_profile(run: RunRow, context: ApiContext, wanted: ProfileRequest) -> Profile:
    """Request a profile. Raises 409 if the run is not training, 422 if it has no such rank."""
    now = context.clock()
    data = {"id": new_id("prof", now), "rank": wanted.rank, "steps": wanted.steps}
    event = await recorded(context, run, PROFILE, now, data)
    order = ProfileOrder(event.data["id"], wanted.rank, wanted.steps, run.attempt)
    await context.storage_call(RunDir(context.storage, run.id).order_profile, run.submission, order)
    return drills.profiles([event])[0]


@profiles_router.get("", summary="Profiles of a run", responses=problem_answers(404))
async def list_profiles(run: VisibleRun, context: Context) -> Page[Profile]:
    """Oldest first."""
    return Page(items=tuple(await _all(context, run)), next_cursor=None)


@profiles_router.get("/{profile_id}", summary="One profile", responses=problem_answers(404))
async def get_profile(run: VisibleRun, context: Context, profile_id: ProfileId) -> Profile:
    for profile in await _all(context, run):
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
    run: VisibleRun, context: Context, caller: Caller, profile_id: ProfileId
) -> StreamingResponse:
    """Gzipped JSON in Chrome's trace format, which https://ui.perfetto.dev opens."""
    context.followers.require_room(caller)
    profile = await get_profile(run, context, profile_id)
    if profile.state is not ProfileState.DONE:
        why = profile.problem or f"the profile is {profile.state}"
        raise not_found(f"profile {profile.id} of run {run.id} has no trace: {why}")
    run_dir = RunDir(context.storage, run.id)
    blocks = blocks_of(run_dir, run_dir.trace_path(profile.id))
    trace = await context.storage_call(begun, blocks)
    headers = {
        "Content-Disposition": (
            f'attachment; filename="{run.id}-rank-{profile.rank}-{profile.id}.json.gz"'
        )
    }
    return download(context, caller, trace, GZIP, headers)


async def _all(context: ApiContext, run: RunRow) -> list[Profile]:
    events = await context.database_call(context.events.of_kinds, run.id, drills.PROFILE_KINDS)
    return await context.folded(drills.profiles, events)


# ---------------------------------------------------------------- rank orders

# Requests to a rank (drills, profiles): check the rank and record the request.


async def recorded(
    context: ApiContext, run: RunRow, order: RankOrder, now: float, data: dict[str, Any]
) -> EventRow:
    """Record a request with its ``id`` and ``rank`` in ``data``. Raises TransitionConflict as
    ``record``; 422 for an unknown rank."""
    if run.world_size is None:
        raise not_training(run, order)
    if data["rank"] >= run.world_size:
        raise invalid_request(
            "rank", msg=f"run {run.id} has ranks 0 to {run.world_size - 1}, not {data['rank']}"
        )
    return await context.database_write(record, context.database, run, order, data, now)


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
async def request_stacks(run: ControlledRun, context: Context) -> StackReport:
    """Only for runs that are RUNNING. Their ranks are not interrupted. The list has the stacks a
    moment later."""
    return await order_stacks(run, context)


async def order_stacks(run: RunRow, context: ApiContext) -> StackReport:
    """Request the stacks of a run's ranks. Raises 409 if it is not training."""
    now = context.clock()
    data = {"id": new_id("stk", now)}
    event = await context.database_write(record, context.database, run, STACKS, data, now)
    order = StackOrder(event.data["id"], run.attempt)
    await context.storage_call(RunDir(context.storage, run.id).order_stacks, run.submission, order)
    return stack_reports([event])[0]


@stacks_router.get("", summary="What the ranks did", responses=problem_answers(404))
async def list_stacks(run: VisibleRun, context: Context) -> Page[StackReport]:
    """The newest reports, newest first. The service adds one by itself when nothing has moved for a
    minute."""
    return Page(items=tuple(await newest_stacks(run, context)), next_cursor=None)


async def newest_stacks(run: RunRow, context: ApiContext) -> list[StackReport]:
    """Return the newest reports on what a run's ranks did, newest first."""
    events = await context.database_call(context.events.of_kinds, run.id, STACK_KINDS)
    return (await context.folded(stack_reports, events))[: -MOST_REPORTS - 1 : -1]


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
