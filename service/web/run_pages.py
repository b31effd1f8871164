"""Pages of one run: overview, curves, checkpoints, history and actions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from pydantic import ValidationError

from everstep.spec.plain_text import is_sayable
from everstep.text import failure as failure_words
from everstep.wire import MOST_NOTES_CHARS, Failure, Run, RunChange, RunStatus
from everstep.wire.profiles import MOST_STEPS, ProfileRequest
from service.api import checkpoints, histories, profiles, runs, sse, stacks
from service.api.auth import Principal
from service.api.context import ApiContext, Context
from service.api.problems import invalid_request
from service.api.series import thinned
from service.model.run_rows import RunRow
from service.model.states import is_legal
from service.projections.checkpoints import choose
from service.web import curves
from service.web.formatting import bucket_shares, progress_share
from service.web.lanes import ACTIVITY_WORDS, KINDS, MOST_RANKS, lanes
from service.web.rendering import PageRoute, page
from service.web.session import CheckedForm, ControlledWebRun, WebCaller, WebRun
from service.web.wandb_link import wandb_place

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

_POINTS: Final = 1500
_CHARTS: Final = 6
_MOST_FAILURES: Final = 50
_MOST_CHECKPOINTS: Final = 500
_MOST_PROFILES: Final = 10
_MOST_REPLAYS: Final = 10


async def run_page(
    request: Request,
    template: str,
    context: ApiContext,
    caller: Principal,
    row: RunRow,
    /,
    **values: Any,
) -> Response:
    """Render a page with the head that all pages of a run have: name, status, actions."""
    [run] = await runs.run_answers(context, [row])
    return page(
        request,
        template,
        caller,
        run=run,
        actions=_actions(run, caller),
        ray_job=f"/ray/#/jobs/{row.ray_job_id}"
        if row.ray_job_id and caller.project is None
        else None,
        progress_share=progress_share,
        most_notes_chars=MOST_NOTES_CHARS,
        wandb=await wandb_place(context, row),
        **values,
    )


def _actions(run: Run, caller: Principal) -> list[str]:
    """Return the actions that this caller may take on the run now."""
    if not caller.may("submitter"):
        return []
    possible = {
        "pause": run.status != RunStatus.STOPPING and is_legal(run.status, RunStatus.PAUSED),
        "resume": is_legal(run.status, RunStatus.QUEUED),
        "cancel": is_legal(run.status, RunStatus.CANCELLED),
        "delete": run.status.terminal,
    }
    return [name for name, is_possible in possible.items() if is_possible]


@router.get("")
async def get_run(request: Request, run: WebRun, context: Context, caller: WebCaller) -> Response:
    failures = await histories.get_failures(run, context)
    goodput = await histories.get_goodput(run, context)
    times = await histories.get_stragglers(run, context)
    drawn = lanes(
        await context.database_call(context.events.of_kinds, run.id, KINDS), context.clock()
    )
    return await run_page(
        request,
        "run.html",
        context,
        caller,
        run,
        failures=[_failure_view(failure) for failure in reversed(failures.items[-_MOST_FAILURES:])],
        num_older_failures=max(0, len(failures.items) - _MOST_FAILURES),
        goodput=goodput,
        buckets=bucket_shares(goodput.buckets, goodput.wall_s),
        lanes=drawn,
        activity_words=ACTIVITY_WORDS,
        workers={worker["rank"]: worker for worker in run.workers},
        times=times,
        gpus={gpu.rank: gpu for gpu in times.gpus} if run.workers else {},
        profiles=(await profiles.list_profiles(run, context)).items[: -_MOST_PROFILES - 1 : -1],
        stacks=next(iter(await stacks.newest_stacks(run, context)), None),
        most_steps=MOST_STEPS,
        most_ranks=MOST_RANKS,
        replays=(await context.database_call(context.runs.replays_of, run.id))[:_MOST_REPLAYS],
        last_seq=run.last_seq,
    )


def _blocks(lines: list[str]) -> list[tuple[str, str]]:
    """Return lines as (tag, text): indented lines that follow each other are one ``pre``."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if not line.startswith("  "):
            found.append(("p", line))
        elif found and found[-1][0] == "pre":
            found[-1] = ("pre", f"{found[-1][1]}\n{line[2:]}")
        else:
            found.append(("pre", line[2:]))
    return found


def _failure_view(failure: Failure) -> dict[str, Any]:
    """Return a failure with its headline and the lines that follow."""
    headline = failure_words.headline(failure)
    return {
        "fault": failure,
        "headline": headline[:1].upper() + headline[1:],
        "rest": _blocks(failure_words.story(failure)),
        "exception": failure_words.plain(failure.exception or ""),
        "sentence": failure_words.sentence(failure),
        "evidence": failure_words.evidence_items(failure),
    }


@router.get("/curves.json")
async def get_curves(
    run: WebRun,
    context: Context,
    all: Annotated[bool, Query()] = False,
    system: Annotated[bool, Query()] = True,
    max_points: Annotated[int, Query(ge=4, le=5000)] = _POINTS,
) -> Response:
    """Return charts, their series, the restarts, and the event after which the stream continues.
    Only with ``system`` there are charts of the hosts."""
    grouped = curves.charts(run.metrics)
    shown = grouped if all else grouped[:_CHARTS]
    if system:
        names = await context.database_call(context.series.names, run.id)
        shown = [*shown, *curves.system_charts(names)]
    series = await thinned(
        context, run.id, [name for chart in shown for name in chart["names"]], max_points
    )
    marks = curves.marks(
        await context.database_call(context.events.of_kinds, run.id, curves.MARK_KINDS)
    )
    return JSONResponse(
        {
            "run": {"id": run.id, "name": run.name},
            "charts": shown,
            "num_charts": len(grouped),
            "series": series,
            "marks": marks,
            "seq": run.last_seq,
        }
    )


@router.get("/stream")
async def get_stream(
    run: WebRun,
    context: Context,
    caller: WebCaller,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    last_event_id: sse.LastEventId = None,
) -> StreamingResponse:
    return sse.response(
        context, caller, context.feed.follow(run.id, sse.resume_after(last_event_id, after))
    )


@router.get("/checkpoints")
async def get_checkpoints(
    request: Request, run: WebRun, context: Context, caller: WebCaller
) -> Response:
    """Show the checkpoints that there are, the best one marked; those that retention deleted are
    folded away."""
    found = (await checkpoints.list_checkpoints(run, context)).items
    deleted = [each for each in found if each.state == "deleted"]
    kept = [each for each in found if each.state != "deleted"]
    best, _ = choose(kept, run.id, run.stored_spec.checkpoint, "best")
    return await run_page(
        request,
        "checkpoints.html",
        context,
        caller,
        run,
        checkpoints=tuple(reversed(kept[-_MOST_CHECKPOINTS:])),
        deleted=tuple(reversed(deleted[-_MOST_CHECKPOINTS:])),
        best=best,
        best_metric=run.stored_spec.checkpoint.best_metric,
        num_older=sum(max(0, len(each) - _MOST_CHECKPOINTS) for each in (kept, deleted)),
        may_verify=caller.may("submitter"),
    )


@router.get("/checkpoints/{step}/archive")
async def get_archive(
    run: WebRun, context: Context, caller: WebCaller, step: checkpoints.Which
) -> StreamingResponse:
    return await checkpoints.get_archive(run, context, caller, step)


@router.post("/checkpoints/{step}/verify")
async def post_verify(
    run: ControlledWebRun, context: Context, step: checkpoints.Which, _form: CheckedForm
) -> Response:
    checkpoint = await checkpoints.verify_checkpoint(run, context, step)
    return RedirectResponse(f"/runs/{run.id}/checkpoints#step-{checkpoint.step}", 303)


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
    await profiles.order_profile(run, context, wanted)
    return RedirectResponse(f"/runs/{run.id}#times-title", 303)


@router.post("/stacks")
async def post_stacks(run: ControlledWebRun, context: Context, _form: CheckedForm) -> Response:
    await stacks.order_stacks(run, context)
    return RedirectResponse(f"/runs/{run.id}#stacks", 303)


@router.get("/profiles/{profile_id}/trace")
async def get_trace(
    run: WebRun, context: Context, caller: WebCaller, profile_id: profiles.ProfileId
) -> StreamingResponse:
    return await profiles.get_trace(run, context, caller, profile_id)


@router.post("/notes")
async def post_notes(run: ControlledWebRun, context: Context, form: CheckedForm) -> Response:
    text = form.get("notes", "").replace("\r\n", "\n")
    if not is_sayable(text):
        raise invalid_request("notes", msg="contain a character that cannot be stored; remove it")
    try:
        change = RunChange(notes=text)
    except ValidationError as exc:
        raise invalid_request(
            "notes", msg=f"are too long; write at most {MOST_NOTES_CHARS} characters"
        ) from exc
    await runs.changed_run(run, context, change)
    return RedirectResponse(f"/runs/{run.id}", 303)


@router.post("/delete")
async def post_delete(run: ControlledWebRun, context: Context, _form: CheckedForm) -> Response:
    await runs.delete_run(run, context)
    return RedirectResponse("/runs", 303)


_ACTIONS: Final = {"pause": runs.pause_run, "resume": runs.resume_run, "cancel": runs.cancel_run}


@router.post("/{action}")
async def post_action(
    run: ControlledWebRun,
    context: Context,
    action: Literal["pause", "resume", "cancel"],
    _form: CheckedForm,
) -> Response:
    await _ACTIONS[action](run, context)
    return RedirectResponse(f"/runs/{run.id}", 303)
