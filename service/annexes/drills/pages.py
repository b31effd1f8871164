"""What the page of a run shows and asks of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from pydantic import ValidationError

from everstep.wire.drills import MOST_STEPS, ProfileRequest
from service.annexes.drills import routes
from service.api.blocking import db_read
from service.api.dependencies import Events, Streams, TheStorage
from service.api.problems import invalid_request
from service.db.events import EventStore
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.parts import ServiceParts
from service.web.rendering import PageRoute
from service.web.session import CheckedForm, ControlledWebRun, WebCaller, WebRun

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

_MOST_PROFILES: Final = 10
_MOST_REPLAYS: Final = 10


async def run_values(parts: ServiceParts, run: RunRow) -> Mapping[str, Any]:
    """Return what the page of a run shows of its profiles, stacks and replays."""
    events = parts[EventStore]
    return {
        "profiles": (await routes.list_profiles(run, events)).items[: -_MOST_PROFILES - 1 : -1],
        "stacks": next(iter(await routes.newest_stacks(run, events)), None),
        "most_steps": MOST_STEPS,
        "replays": (await db_read(parts[RunStore].replays_of, run.id))[:_MOST_REPLAYS],
    }


@router.post("/profiles")
async def post_profile(run: ControlledWebRun, orders: routes.Orders, form: CheckedForm) -> Response:
    try:
        wanted = ProfileRequest.model_validate(
            {"rank": form.get("rank"), "steps": form.get("steps")}
        )
    except ValidationError as exc:
        raise invalid_request(
            "profile", msg=f"enter a rank from 0, and 1 to {MOST_STEPS} steps"
        ) from exc
    await orders.profile(run, wanted)
    return RedirectResponse(f"/runs/{run.id}#times-title", 303)


@router.post("/stacks")
async def post_stacks(run: ControlledWebRun, orders: routes.Orders, _form: CheckedForm) -> Response:
    await orders.stacks(run)
    return RedirectResponse(f"/runs/{run.id}#stacks", 303)


@router.get("/profiles/{profile_id}/trace")
async def get_trace(
    run: WebRun,
    events: Events,
    storage: TheStorage,
    streamed: Streams,
    caller: WebCaller,
    profile_id: routes.ProfileId,
) -> StreamingResponse:
    return await routes.get_trace(run, events, storage, streamed, caller, profile_id)
