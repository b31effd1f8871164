"""Routes of runs: submit, list, show, cancel, pause, resume, delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Final, TypeVar

from fastapi import Header, Query, Response
from pydantic_core import to_json

from everstep.spec.run_spec import RunSpec
from everstep.wire import Page, Run, RunChange, RunStatus
from service.api.answers import (
    Cursor,
    Limit,
    as_json,
    order_cursor,
    parse_order_cursor,
    parse_run_cursor,
    run_answer,
    run_cursor,
    run_json,
)
from service.api.auth import Caller, ControlledRun, Submitter, VisibleRun
from service.api.bodies import ApiRouter, AsWritten, Parsed, example
from service.api.callers import Principal
from service.api.context import ApiContext, Context
from service.api.openapi import CreateProject, followed_by, problem_answers
from service.api.problems import invalid_request, not_found
from service.db.run_lookup import OrderPlace, RunFilter, RunOrder
from service.db.run_lookup import Place as AgePlace
from service.model.run_rows import RunHead, RunRow
from service.runs.submission import submitted, validated_spec
from storage.run_dir import RunDir

router: Final = ApiRouter("/v1/runs", "runs")
checks: Final = ApiRouter("/v1", "runs")

SpecBody = Annotated[
    RunSpec,
    AsWritten(),
    example(
        {
            "name": "digits-resnet",
            "task": {
                "name": "image_classification",
                "model": {"name": "mini_resnet", "args": {"width": 16}},
                "data": {"name": "digits", "args": {}},
            },
            "train": {"epochs": 5},
            "scaling": {"min_workers": 1, "max_workers": 2},
        }
    ),
]
ChangeBody = Annotated[RunChange, Parsed(), example({"notes": "diverges with warmup below 100"})]


@router.post(
    "",
    status_code=201,
    summary="Submit a run",
    response_model=Run,
    responses={
        200: {"model": Run, "description": "This Idempotency-Key has already created this run."},
        201: followed_by(
            *("run_id", "id", "get_run", "get_spec", "get_events", "get_goodput"),
            *("cancel_run", "pause_run", "delete_run"),
        ),
        **problem_answers(400, 403, 409, 413, 415, 422),
    },
)
async def create_run(
    context: Context,
    caller: Submitter,
    raw: SpecBody,
    idempotency_key: Annotated[
        str | None,
        Header(
            description=(
                "1 to 255 printable ASCII characters. The same key and body return the same run "
                "with 200."
            )
        ),
    ] = None,
    create_project: CreateProject = False,
) -> Response:
    """Validates the spec completely and records the run as QUEUED. It starts when the cluster has
    room for it."""
    made, is_new = await submitted(
        context, caller, raw, idempotency_key, create_project=create_project
    )
    return as_json(made, 201 if is_new else 200, {"Location": f"/v1/runs/{made['id']}"})


@checks.post(
    "/validate",
    summary="Check a spec",
    responses=problem_answers(400, 403, 413, 415, 422),
)
async def validate_spec(
    context: Context,
    caller: Submitter,
    raw: SpecBody,
    create_project: CreateProject = False,
) -> RunSpec:
    """Checks a spec as a submission does, and responds with it as resolved. Nothing is recorded."""
    return await validated_spec(context, caller, raw, create_project=create_project)


@router.get("", summary="List runs", response_model=Page[Run], responses=problem_answers(422))
async def list_runs(
    context: Context,
    caller: Caller,
    project: Annotated[
        str | None, Query(max_length=64, description="Only runs of this project.")
    ] = None,
    status: Annotated[
        list[str] | None,
        Query(
            description=(
                "Only runs in one of these statuses; repeat it, or separate several by commas."
            )
        ),
    ] = None,
    name: Annotated[
        str | None, Query(max_length=128, description="Only runs with exactly this name.")
    ] = None,
    search: Annotated[
        str | None,
        Query(
            max_length=128,
            description="Only runs whose id, name, or a tag's key or value contains this text.",
        ),
    ] = None,
    tag: Annotated[
        list[str] | None,
        Query(description="`key=value` or `key`; only runs with all of these tags."),
    ] = None,
    sort: Annotated[
        str | None,
        Query(
            max_length=400,
            description=(
                "Instead of newest first, by this value, the largest first with a minus: a field "
                "such as `name` or `-duration`, a metric (`-metrics.val_accuracy`), or a field of "
                "the spec (`spec.optimizer.lr`). Runs without it are last."
            ),
            examples=["-metrics.val_accuracy"],
        ),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    """Newest first, or by `sort`; only runs of the token's project."""
    wanted = RunFilter(
        project,
        statuses(status or (), RunStatus),
        name,
        search,
        tuple(parse_tag(text) for text in tag or ()),
    )
    order = parse_order(sort)
    if order is not None:
        after = parse_order_cursor(order, cursor)
        answer = await context.database_call(
            ordered_page, context, caller, wanted, limit, order, after
        )
        return Response(answer, media_type="application/json")
    before = parse_run_cursor(cursor)
    answer = await context.database_call(_page, context, caller, wanted, limit, before)
    return Response(answer, media_type="application/json")


@router.get("/{run_id}", summary="One run", response_model=Run, responses=problem_answers(404))
async def get_run(run: VisibleRun, context: Context) -> Response:
    """Status, progress, and the failures that the run would survive."""
    seen = await context.database_call(context.runs.listed, [run.id])
    if run.id not in seen:
        raise not_found(f"run {run.id} does not exist")
    found, transitions = seen[run.id]
    return as_json(
        run_json(
            found,
            transitions,
            context.ray_url,
            context.clock(),
            context.public_url,
            context.settings.prices,
        )
    )


@router.patch(
    "/{run_id}",
    summary="Change the notes of a run",
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
)
async def change_run(change: ChangeBody, run: ControlledRun, context: Context) -> Run:
    """Replaces the notes; nothing else of a run can be changed. The last change wins."""
    return await changed_run(run, context, change)


async def changed_run(run: RunRow, context: ApiContext, change: RunChange) -> Run:
    """Replace the notes of a run; return it."""
    notes = (change.notes or "").strip() or None
    changed = await context.database_write(context.runs.set_notes, run.id, notes)
    return (await run_answers(context, [changed]))[0]


@router.get("/{run_id}/spec", summary="The spec as resolved", responses=problem_answers(404))
async def get_spec(run: VisibleRun) -> RunSpec:
    """With every default filled in."""
    return RunSpec.model_validate(run.spec)


@router.post(
    "/{run_id}/cancel",
    status_code=202,
    summary="Cancel a run",
    responses={
        202: followed_by("run_id", "id", "delete_run", "resume_run"),
        **problem_answers(403, 404, 409),
    },
)
async def cancel_run(run: ControlledRun, context: Context) -> Run:
    """A run that is training commits a last checkpoint first. Repeating the request while it stops
    changes nothing."""
    stopped = await context.database_write(context.runs.request_stop, run.id, "cancel")
    return (await run_answers(context, [stopped]))[0]


@router.post(
    "/{run_id}/pause",
    status_code=202,
    summary="Pause a run",
    responses={
        202: followed_by("run_id", "id", "resume_run", "cancel_run"),
        **problem_answers(403, 404, 409),
    },
)
async def pause_run(run: ControlledRun, context: Context) -> Run:
    """A run that is training commits a checkpoint first, and releases its resources."""
    stopped = await context.database_write(context.runs.request_stop, run.id, "pause")
    return (await run_answers(context, [stopped]))[0]


@router.post(
    "/{run_id}/resume",
    status_code=202,
    summary="Resume a paused run",
    responses=problem_answers(403, 404, 409),
)
async def resume_run(run: ControlledRun, context: Context) -> Run:
    """The run queues again, and continues from its last checkpoint."""
    resumed = await context.database_write(context.runs.resume, run.id)
    return (await run_answers(context, [resumed]))[0]


@router.delete(
    "/{run_id}", status_code=204, summary="Delete a run", responses=problem_answers(403, 404, 409)
)
async def delete_run(run: ControlledRun, context: Context) -> None:
    """Only runs that have ended. Deletes the run's directory with every checkpoint and log, then
    its history."""
    # with another storage mounted, its directory would be left behind
    await context.storage_call(context.storage_gate.require)
    await context.database_write(context.runs.begin_delete, run.id)
    # The directory first: after a crash in between, the run can be deleted again, and no orphaned
    # files are left.
    await context.long_storage_call(RunDir(context.storage, run.id).delete)
    await context.database_write(context.runs.delete, run.id)
    context.logs.forget(run.id)


async def run_answers(context: ApiContext, runs: Sequence[RunRow]) -> list[Run]:
    """Return the runs as clients see them, in the same order."""
    transitions = await context.database_call(context.runs.transitions, [run.id for run in runs])
    now, dashboard_url = context.clock(), context.ray_url
    return [
        run_answer(
            run,
            transitions[run.id],
            dashboard_url,
            now,
            context.public_url,
            context.settings.prices,
        )
        for run in runs
    ]


# ---------------------------------------------------------------- run list

# Pages of runs: filters, queries and the response in JSON.

Status = TypeVar("Status", bound=StrEnum)


async def found_runs(
    context: ApiContext,
    caller: Principal,
    wanted: RunFilter,
    limit: int,
    cursor: str | None,
    order: RunOrder | None = None,
) -> Page[Run]:
    """Return a page of the runs that the caller may see, newest first or in another order."""
    if order is None:
        call = partial(_page, context, caller, wanted, limit, parse_run_cursor(cursor))
    else:
        after = parse_order_cursor(order, cursor)
        call = partial(ordered_page, context, caller, wanted, limit, order, after)
    return Page[Run].model_validate_json(await context.database_call(call))


def parse_order(sort: str | None) -> RunOrder | None:
    """Parse ``KEY`` or ``-KEY``; None is newest first. Raises 422."""
    if not sort or sort == "-created_at":
        return None
    try:
        return RunOrder.parse(sort)
    except ValueError as exc:
        raise invalid_request("sort", msg=f"cannot sort by this: {exc}") from exc


def ordered_page(
    context: ApiContext,
    caller: Principal,
    wanted: RunFilter,
    limit: int,
    order: RunOrder,
    after: OrderPlace | None,
) -> bytes:
    """Return a page in an order as JSON."""
    if not _reaches_any(caller, wanted):
        return _json_of(context, [], None)
    heads, last = context.runs.ordered(_reached(caller, wanted), order, limit, after)
    return _json_of(context, heads, order_cursor(order, last))


def _page(
    context: ApiContext, caller: Principal, wanted: RunFilter, limit: int, before: AgePlace | None
) -> bytes:
    """Return a page, newest first, as JSON."""
    heads = (
        context.runs.page(_reached(caller, wanted), limit + 1, before)
        if _reaches_any(caller, wanted)
        else []
    )
    return _page_of(context, heads, limit)


def _reaches_any(caller: Principal, wanted: RunFilter) -> bool:
    return caller.project is None or wanted.project in (None, caller.project)


def _reached(caller: Principal, wanted: RunFilter) -> RunFilter:
    return replace(wanted, project=caller.project or wanted.project)


def _page_of(context: ApiContext, heads: Sequence[RunHead], limit: int) -> bytes:
    """Return these runs as JSON, at most ``limit``."""
    cursor = run_cursor(heads[limit - 1]) if len(heads) > limit else None
    return _json_of(context, heads[:limit], cursor)


def _json_of(context: ApiContext, heads: Sequence[RunHead], cursor: str | None) -> bytes:
    answers = _answers_about(context, heads)
    # one may have been deleted since
    items = b",".join(answers[head.id] for head in heads if head.id in answers)
    return b'{"items":[%b],"next_cursor":%b}' % (items, to_json(cursor))


def _answers_about(context: ApiContext, heads: Sequence[RunHead]) -> dict[str, bytes]:
    """Return the JSON of each run. The JSON of a run that has ended is cached."""
    about = dashboard_url, public_url = context.ray_url, context.public_url
    prices = context.settings.prices
    kept = {head.id: context.kept_answers.get(head, about) for head in heads}
    found = {run_id: answer for run_id, answer in kept.items() if answer is not None}
    now, fresh = (
        context.clock(),
        context.runs.listed([run_id for run_id in kept if run_id not in found]),
    )
    for head in heads:
        if head.id in fresh:
            run, transitions = fresh[head.id]
            answer = run_json(run, transitions, dashboard_url, now, public_url, prices)
            found[head.id] = to_json(answer)
            if run.status.terminal:
                context.kept_answers.keep(head, about, found[head.id])
    return found


def statuses(given: Sequence[str], kind: type[Status]) -> tuple[Status, ...]:
    """Return the statuses of a filter, which may be separated by commas. Raises 422."""
    names = [name.strip().upper() for text in given for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(kind)]
    if unknown:
        raise invalid_request(
            "status",
            msg=f"{unknown[0][:40]!r} is not a status; the statuses are {', '.join(kind)}",
        )
    return tuple(kind(name) for name in names)


def parse_tag(text: str) -> tuple[str, str | None]:
    """Parse ``key=value`` or ``key`` for a filter."""
    key, separator, value = text.partition("=")
    if not separator:
        key, separator, value = text.partition(":")
    return key, value if separator else None
