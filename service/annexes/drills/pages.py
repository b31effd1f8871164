"""What the page of a run shows and asks of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from pydantic import ValidationError

from everstep.wire.drills import MOST_STEPS, ProfileRequest
from service.annexes.drills import routes
from service.api.callers import Principal
from service.api.context import ApiContext, Context
from service.api.problems import invalid_request
from service.model.run_rows import RunRow
from service.web.rendering import PageRoute
from service.web.session import CheckedForm, ControlledWebRun, WebCaller, WebRun

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

_MOST_PROFILES: Final = 10
_MOST_REPLAYS: Final = 10


async def run_values(context: ApiContext, run: RunRow, caller: Principal) -> Mapping[str, Any]:
    """Return what the page of a run shows of its profiles, stacks and replays."""
    return {
        "profiles": (await routes.list_profiles(run, context)).items[: -_MOST_PROFILES - 1 : -1],
        "stacks": next(iter(await routes.newest_stacks(run, context)), None),
        "most_steps": MOST_STEPS,
        "replays": (await context.database_call(context.runs.replays_of, run.id))[:_MOST_REPLAYS],
    }


@router.post("/profiles")
async def post_profile(run: ControlledWebRun, context: Context, form: CheckedForm) -> Response:
    try:
        wanted = ProfileRequest.model_validate(
            {"rank": form.get("rank"), "steps": form.get("steps")}
        )
    except ValidationError as exc:
        raise invalid_request(
            "profile", msg=f"enter a rank from 0, and 1 to {MOST_STEPS} steps"
        ) from exc
    await routes.order_profile(run, context, wanted)
    return RedirectResponse(f"/runs/{run.id}#times-title", 303)


@router.post("/stacks")
async def post_stacks(run: ControlledWebRun, context: Context, _form: CheckedForm) -> Response:
    await routes.order_stacks(run, context)
    return RedirectResponse(f"/runs/{run.id}#stacks", 303)


@router.get("/profiles/{profile_id}/trace")
async def get_trace(
    run: WebRun, context: Context, caller: WebCaller, profile_id: routes.ProfileId
) -> StreamingResponse:
    return await routes.get_trace(run, context, caller, profile_id)
