"""Routes of a run's replays: submit one, list them."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from everstep.spec.run_spec import RunSpec
from everstep.wire import Page, Run
from everstep.wire.replays import ReplayRequest
from service.api.answers import as_json
from service.api.auth import CallerToConfirm, ControlledRun, VisibleRun
from service.api.context import Context
from service.api.openapi import REPLAY_BODY, problem_answers
from service.api.replay_rules import trained_by
from service.api.runs import run_answers
from service.api.spec_body import read_model
from service.api.submission import submitted
from service.model.run_rows import RunRow
from service.projections.replays import Stretch, begun_at

router: Final = APIRouter(prefix="/v1/runs/{run_id}/replays", tags=["replays"])

_NAME_CHARS: Final = 128


@router.post(
    "",
    status_code=201,
    summary="Train steps of a run again, and compare them",
    response_model=Run,
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
    openapi_extra=REPLAY_BODY,
)
async def create_replay(
    request: Request, run: ControlledRun, context: Context, caller: CallerToConfirm
) -> Response:
    """Submits a run that begins from a checkpoint of this one and trains the same steps. It changes
    nothing of this run. `replay_of` of the new run has the result once it has ended."""
    wanted = await read_model(ReplayRequest, request)
    raw = replay_spec(run, wanted, await trained_by(context, run))
    made, _ = await submitted(context, caller, raw, None, partial(caller.confirm, context))
    return as_json(made, 201, {"Location": f"/v1/runs/{made['id']}"})


@router.get("", summary="Replays of a run", responses=problem_answers(404))
async def list_replays(run: VisibleRun, context: Context) -> Page[Run]:
    """The newest hundred, newest first."""
    found = await context.database_call(context.runs.replays_of, run.id)
    return Page(items=tuple(await run_answers(context, found)), next_cursor=None)


def replay_spec(run: RunRow, wanted: ReplayRequest, trained: list[Stretch]) -> dict[str, Any]:
    """Return the spec of a replay: that of the run, but for what names, places and reports it."""
    spec = RunSpec.model_validate(run.spec)
    sizes = {each.world_size for each in trained if each.meets(wanted.from_step, wanted.to_step)}
    workers = wanted.workers or max(sizes, default=spec.scaling.max_workers)
    raw = spec.model_dump(mode="json")
    raw["name"] = f"{spec.name[: _NAME_CHARS - 7]}-replay"
    raw["replay"] = {
        "run_id": run.id,
        "from_step": wanted.from_step,
        "to_step": wanted.to_step,
        "max_workers": spec.full_size,
    }
    if wanted.from_step != begun_at(run):
        raw["resume_from"] = None
    # ``auto`` depends on the number of ranks, and decides the order in which gradients are summed.
    raw["train"]["micro_batch_size"] = spec.micro_batch_size
    raw["scaling"] |= {"min_workers": workers, "max_workers": workers}
    raw["notify"] = None
    return raw
