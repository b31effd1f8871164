"""Runs: made, listed, looked at, stopped, resumed, deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Query, Response
from pydantic_core import to_json

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.wire import Page, Run, RunStatus
from service.api.answers import JsonObject, as_json, run_answer, run_json
from service.api.auth import (
    CallerToConfirm,
    Claimant,
    ControlledRun,
    Principal,
    SeenRunOfPath,
    VisibleRun,
)
from service.api.code import check_code
from service.api.context import ApiContext, Context
from service.api.openapi import SPEC_BODY, CreateProject, problem_answers
from service.api.origins import with_origin
from service.api.paging import Cursor, Limit, parse_run_cursor, run_cursor
from service.api.problems import ProblemError, invalid_request
from service.api.spec_body import content_sha256, read_json, validated
from service.db.engine import Guard
from service.db.idempotency import IdempotencyKey
from service.db.new_run import first_transition
from service.db.projects import UnknownProject
from service.db.run_lookup import Place, RunFilter
from service.model.rows import TransitionRow
from service.model.run_rows import RunHead, RunRow
from service.model.states import TransitionConflict
from storage.run_dir import RunDir

router: Final = APIRouter(prefix="/v1/runs", tags=["runs"])

_SHORT_PAGE: Final = 50


@router.post(
    "",
    status_code=201,
    summary="Submit a run",
    response_model=Run,
    responses={
        200: {"model": Run, "description": "This Idempotency-Key made this run before."},
        **problem_answers(400, 403, 409, 413, 415, 422),
    },
    openapi_extra=SPEC_BODY,
)
async def create_run(
    context: Context,
    caller: CallerToConfirm,
    raw: Annotated[Any, Depends(read_json)],
    idempotency_key: Annotated[
        str | None,
        Header(
            description=(
                "1 to 255 printable ASCII characters. The same key and body give the same "
                "run again with 200."
            )
        ),
    ] = None,
    create_project: CreateProject = False,
) -> Response:
    """Validates the spec completely and records the run as QUEUED; it starts when the cluster has
    room for it."""
    confirm = partial(caller.confirm, context)
    made, is_new = await submitted(
        context, caller, raw, idempotency_key, confirm, create_project=create_project
    )
    return as_json(made, 201 if is_new else 200, {"Location": f"/v1/runs/{made['id']}"})


async def submitted(
    context: ApiContext,
    caller: Principal,
    raw: object,
    idempotency_key: str | None,
    confirm: Guard | None = None,
    *,
    create_project: bool = False,
) -> tuple[JsonObject, bool]:
    """The run that a spec asks for, and whether it is new.

    Args:
        context: The service's.
        caller: Who asks.
        raw: The spec as it came.
        idempotency_key: The client's name for the request.
        confirm: Raises where the caller may not have it after all.
        create_project: Make a project that is missing; a caller's own project is made anyhow.
    """
    caller.require("submitter")
    spec = await validated(parse_spec, raw)
    if not caller.reaches(spec.project):
        raise ProblemError(
            403,
            "forbidden",
            f"token {caller.name!r} belongs to project {caller.project!r}, not {spec.project!r}",
        )
    idempotency = _idempotency(idempotency_key, caller, raw)
    faults: list[FieldError] = []
    with _gathered(faults):
        context.pip_rule.check(spec)
    with _gathered(faults):
        _check_notify(context, spec)
    with _gathered(faults):
        context.storage_roots.check_data(spec)
    # what follows tells of what there is
    if confirm is not None and (spec.code is not None or spec.resume_from is not None):
        await context.database_look(_confirmed, context, confirm)
    if spec.code is not None:
        with _gathered(faults):
            await check_code(context, caller, spec.project, spec.code)
    if spec.resume_from is not None and not await context.database_call(
        context.runs.knows, idempotency
    ):
        with _gathered(faults):
            spec = await with_origin(context, spec, keep=not faults)
    if faults:
        raise InvalidSpec(tuple(faults))
    make = partial(
        context.runs.create,
        spec,
        caller.token_id,
        idempotency,
        confirm,
        create_project=create_project or caller.project is not None,
    )
    try:
        (run, transitions), is_new = await context.database_write(_made, context, make)
    except UnknownProject as exc:
        raise InvalidSpec((FieldError(("project",), str(exc)),)) from exc
    return run_json(
        run, transitions, context.cluster_view.dashboard_url, context.clock(), context.public_url
    ), is_new


@contextmanager
def _gathered(faults: list[FieldError]) -> Iterator[None]:
    """All that is wrong with a spec is told at once."""
    try:
        yield
    except InvalidSpec as exc:
        faults += exc.errors


def _check_notify(context: ApiContext, spec: RunSpec) -> None:
    """Raises InvalidSpec where this service calls no such URL."""
    if spec.notify is not None and not context.notify.allows(spec.notify.url):
        allowed = ", ".join(sorted(context.notify.origins)) or "none"
        msg = f"its origin is not allowed; allowed by this service's operator: {allowed}"
        raise InvalidSpec((FieldError(("notify", "url"), msg),))


def _confirmed(context: ApiContext, confirm: Guard) -> None:
    with context.database.look() as connection:
        confirm(connection)


def _made(
    context: ApiContext, make: Callable[[], tuple[RunRow, bool]]
) -> tuple[tuple[RunRow, Sequence[TransitionRow]], bool]:
    run, is_new = make()
    return (
        run,
        [first_transition(run)] if is_new else context.runs.transitions([run.id])[run.id],
    ), is_new


def _idempotency(key: str | None, caller: Principal, raw: object) -> IdempotencyKey | None:
    if key is None:
        return None
    if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        raise invalid_request("Idempotency-Key", msg="must be 1 to 255 printable ASCII characters")
    return IdempotencyKey(caller.token_id, key, content_sha256(raw))


@router.get("", summary="List runs", response_model=Page[Run], responses=problem_answers(422))
async def list_runs(
    context: Context,
    caller: CallerToConfirm,
    project: Annotated[
        str | None, Query(max_length=64, description="Runs of this project only.")
    ] = None,
    status: Annotated[
        list[str] | None,
        Query(
            description=(
                "Runs in one of these statuses only; repeat it, or separate several by commas."
            )
        ),
    ] = None,
    name: Annotated[
        str | None, Query(max_length=128, description="Runs of exactly this name only.")
    ] = None,
    search: Annotated[
        str | None,
        Query(
            max_length=128,
            description="Runs whose id, name, or a tag's key or value holds this text.",
        ),
    ] = None,
    tag: Annotated[
        list[str] | None,
        Query(description="`key=value` or `key`; runs with every one of these tags only."),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    """Newest first; those of the token's project."""
    wanted = RunFilter(
        project, _statuses(status or ()), name, search, tuple(parse_tag(text) for text in tag or ())
    )
    before = parse_run_cursor(cursor)
    # A search reads run after run, and many take long to tell of: meanwhile the event loop serves
    # others.
    ask = context.database_call if search or limit > _SHORT_PAGE else context.database_look
    answer = await ask(_confirmed_page, context, caller, wanted, limit, before)
    return Response(answer, media_type="application/json")


async def found_runs(
    context: ApiContext, caller: Principal, wanted: RunFilter, limit: int, cursor: str | None
) -> Page[Run]:
    """A page of those of the runs that the caller may see."""
    found = await context.database_call(
        _page, context, caller, wanted, limit, parse_run_cursor(cursor)
    )
    return Page[Run].model_validate_json(found)


def _confirmed_page(
    context: ApiContext, caller: Claimant, wanted: RunFilter, limit: int, before: Place | None
) -> bytes:
    """The page in JSON. Raises 401 where the caller's token is worth nothing any more."""
    with context.database.look() as connection:
        if not _reaches_any(caller, wanted):
            caller.confirm(context, connection)
            return _page_of(context, [], limit)
        heads = context.runs.claimed_page(caller.claim, _reached(caller, wanted), limit + 1, before)
        if heads is None:
            raise caller.refused(context)
        return _page_of(context, heads, limit)


def _page(
    context: ApiContext, caller: Principal, wanted: RunFilter, limit: int, before: Place | None
) -> bytes:
    """The page in JSON, for a caller who was confirmed."""
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
    """These runs in JSON, ``limit`` of them at most."""
    answers = _answers_about(context, heads[:limit])
    cursor = run_cursor(heads[limit - 1]) if len(heads) > limit else None
    # one may have been deleted since
    items = b",".join(answers[head.id] for head in heads[:limit] if head.id in answers)
    return b'{"items":[%b],"next_cursor":%b}' % (items, to_json(cursor))


def _answers_about(context: ApiContext, heads: Sequence[RunHead]) -> dict[str, bytes]:
    """Each run in JSON; what was written about one that has ended is taken again."""
    about = dashboard_url, public_url = context.cluster_view.dashboard_url, context.public_url
    kept = {head.id: context.kept_answers.get(head, about) for head in heads}
    found = {run_id: answer for run_id, answer in kept.items() if answer is not None}
    now, fresh = (
        context.clock(),
        context.runs.listed([run_id for run_id in kept if run_id not in found]),
    )
    for head in heads:
        if head.id in fresh:
            run, transitions = fresh[head.id]
            found[head.id] = to_json(run_json(run, transitions, dashboard_url, now, public_url))
            if run.status.terminal:
                context.kept_answers.keep(head, about, found[head.id])
    return found


def _statuses(given: Sequence[str]) -> tuple[RunStatus, ...]:
    names = [name.strip().upper() for text in given for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(RunStatus)]
    if unknown:
        raise invalid_request(
            "status",
            msg=f"{unknown[0][:40]!r} is not a status; the statuses are {', '.join(RunStatus)}",
        )
    return tuple(RunStatus(name) for name in names)


def parse_tag(text: str) -> tuple[str, str | None]:
    """``key=value`` or ``key`` as a filter has it."""
    key, separator, value = text.partition("=")
    if not separator:
        key, separator, value = text.partition(":")
    return key, value if separator else None


@router.get("/{run_id}", summary="One run", response_model=Run, responses=problem_answers(404))
async def get_run(seen: SeenRunOfPath, context: Context) -> Response:
    """Where it is in its life, how far it came, and what it is protected against."""
    run, transitions = seen
    return as_json(
        run_json(
            run,
            transitions,
            context.cluster_view.dashboard_url,
            context.clock(),
            context.public_url,
        )
    )


@router.get("/{run_id}/spec", summary="The spec as resolved", responses=problem_answers(404))
async def get_spec(run: VisibleRun) -> RunSpec:
    """With every default filled in."""
    return RunSpec.model_validate(run.spec)


@router.post(
    "/{run_id}/cancel",
    status_code=202,
    summary="Cancel a run",
    responses=problem_answers(403, 404, 409),
)
async def cancel_run(run: ControlledRun, context: Context) -> Run:
    """A run that trains commits a last checkpoint first. Asking again while it stops changes
    nothing."""
    stopped = await context.database_call(context.runs.request_stop, run.id, "cancel")
    return (await run_answers(context, [stopped]))[0]


@router.post(
    "/{run_id}/pause",
    status_code=202,
    summary="Pause a run",
    responses=problem_answers(403, 404, 409),
)
async def pause_run(run: ControlledRun, context: Context) -> Run:
    """A run that trains commits a checkpoint first, and gives its resources back."""
    stopped = await context.database_call(context.runs.request_stop, run.id, "pause")
    return (await run_answers(context, [stopped]))[0]


@router.post(
    "/{run_id}/resume",
    status_code=202,
    summary="Resume a paused run",
    responses=problem_answers(403, 404, 409),
)
async def resume_run(run: ControlledRun, context: Context) -> Run:
    """It queues again, and goes on from its last checkpoint."""
    resumed = await context.database_call(context.runs.resume, run.id)
    return (await run_answers(context, [resumed]))[0]


@router.delete(
    "/{run_id}", status_code=204, summary="Delete a run", responses=problem_answers(403, 404, 409)
)
async def delete_run(run: ControlledRun, context: Context) -> None:
    """Runs that have ended only. Removes its directory with every checkpoint and log, then its
    history."""
    if not run.status.terminal:
        raise TransitionConflict(
            run.id, run.status, "only a run that has ended can be deleted; cancel it first"
        )
    if run.id in await context.database_call(context.runs.checkpoints.awaited):
        raise TransitionConflict(
            run.id,
            run.status,
            "another run is to begin from its checkpoint; wait until that trains, or cancel that",
        )
    # its directory would stay behind in the other storage
    await context.storage_call(context.storage_gate.require)
    # The directory first: a crash between the two leaves a run that can be deleted again, never
    # bytes that nobody owns.
    await context.storage_call(RunDir(context.storage, run.id).delete)
    await context.database_call(context.runs.delete, run.id)
    context.logs.forget(run.id)


async def run_answers(context: ApiContext, runs: Sequence[RunRow]) -> list[Run]:
    """The runs as clients read them, in the same order."""
    transitions = await context.database_call(context.runs.transitions, [run.id for run in runs])
    now, dashboard_url = context.clock(), context.cluster_view.dashboard_url
    return [
        run_answer(run, transitions[run.id], dashboard_url, now, context.public_url) for run in runs
    ]
