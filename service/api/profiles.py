"""Routes of a run's profiles: request one, list them, download traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request
from fastapi.responses import StreamingResponse

from everstep.wire import Page
from everstep.wire.profiles import Profile, ProfileRequest, ProfileState
from service.api import rank_orders
from service.api.auth import Caller, ControlledRun, VisibleRun
from service.api.byte_stream import begun, download
from service.api.context import ApiContext, Context
from service.api.openapi import PROFILE_BODY, problem_answers
from service.api.problems import not_found
from service.api.spec_body import read_model
from service.db import orders
from service.db.ids import new_profile_id
from service.model.run_rows import RunRow
from service.projections import profiles
from storage.run_control import ProfileOrder
from storage.run_dir import RunDir

router: Final = APIRouter(prefix="/v1/runs/{run_id}/profiles", tags=["profiles"])

GZIP: Final = "application/gzip"
_CHUNK_BYTES: Final = 1 << 20

ProfileId = Annotated[str, Path(max_length=32, description="Id of the profile: `prof_…`.")]


@router.post(
    "",
    status_code=202,
    summary="Record some steps of a rank",
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
    openapi_extra=PROFILE_BODY,
)
async def request_profile(request: Request, run: ControlledRun, context: Context) -> Profile:
    """Only for runs that are RUNNING. The rank records its next steps with torch's profiler; other
    ranks and all results are unaffected. The list shows when the trace is ready."""
    return await order_profile(run, context, await read_model(ProfileRequest, request))


async def order_profile(run: RunRow, context: ApiContext, wanted: ProfileRequest) -> Profile:
    """Request a profile. Raises 409 if the run is not training, 422 if it has no such rank."""
    now = context.clock()
    data = {"id": new_profile_id(now), "rank": wanted.rank, "steps": wanted.steps}
    event = await rank_orders.record(context, run, orders.PROFILE, now, data)
    order = ProfileOrder(event.data["id"], wanted.rank, wanted.steps, run.attempt)
    await context.storage_call(RunDir(context.storage, run.id).order_profile, run.submission, order)
    return profiles.profiles([event])[0]


@router.get("", summary="Profiles of a run", responses=problem_answers(404))
async def list_profiles(run: VisibleRun, context: Context) -> Page[Profile]:
    """Oldest first."""
    return Page(items=tuple(await _all(context, run)), next_cursor=None)


@router.get("/{profile_id}", summary="One profile", responses=problem_answers(404))
async def get_profile(run: VisibleRun, context: Context, profile_id: ProfileId) -> Profile:
    for profile in await _all(context, run):
        if profile.id == profile_id:
            return profile
    raise not_found(f"run {run.id} has no profile {profile_id[:40]!r}")


@router.get(
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
    trace = await context.storage_call(begun, _chunks(context, run.id, profile.id))
    headers = {
        "Content-Disposition": (
            f'attachment; filename="{run.id}-rank-{profile.rank}-{profile.id}.json.gz"'
        )
    }
    return download(context, caller, trace, GZIP, headers)


def _chunks(context: ApiContext, run_id: str, profile_id: str) -> Iterator[bytes]:
    run_dir = RunDir(context.storage, run_id)
    with run_dir.files.open_read(run_dir.trace_path(profile_id)) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


async def _all(context: ApiContext, run: RunRow) -> list[Profile]:
    return profiles.profiles(
        await context.database_call(context.events.of_kinds, run.id, profiles.KINDS)
    )
