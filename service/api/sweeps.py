"""Routes of sweeps: submit, list, show, cancel, delete, and their runs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Path, Query, Response
from pydantic import ValidationError

from everstep.errors import FieldError, InvalidSpec
from everstep.spec import plain_text
from everstep.spec.code import CodeSpec
from everstep.spec.parsing import few, field_errors
from everstep.spec.sweep import AshaSpec, SweepSpec
from everstep.spec.trials import Trial, trials_of, words_of
from everstep.wire import Page, RunStatus
from everstep.wire.sweep import (
    RungResult,
    Sweep,
    SweepBest,
    SweepLinks,
    SweepProgress,
    SweepReason,
    SweepReasonCode,
    SweepRun,
    SweepStatus,
)
from service.api.answers import (
    Cursor,
    Limit,
    as_json,
    maybe_time,
    page_of,
    parse_sweep_cursor,
    sweep_cursor,
    to_time,
)
from service.api.auth import Caller, Principal, SubmitterToConfirm, visible_run
from service.api.bodies import check_shape, read_json, validated
from service.api.context import ApiContext, Context
from service.api.guard import Origins
from service.api.openapi import SWEEP_BODY, CreateProject, problem_answers
from service.api.problems import not_found
from service.api.runs import delete_run, statuses
from service.api.submission import allowed, check_reaches, confirmed, idempotency_of
from service.db.engine import Guard
from service.db.projects import UnknownProject
from service.model.rows import SweepRow, TrialRow
from service.model.states import LIVE

router: Final = APIRouter(prefix="/v1/sweeps", tags=["sweeps"])

SweepPath = Annotated[str, Path(description="The sweep's id: `sweep_…`.")]


async def visible_sweep(sweep_id: SweepPath, context: Context, caller: Caller) -> SweepRow:
    """Return the sweep in the path. Sweeps of other projects do not exist for this caller: 404."""
    sweep = await context.database_lookup(context.sweeps.get, sweep_id)
    if sweep is None or not caller.reaches(sweep.project):
        raise not_found(f"sweep {sweep_id} does not exist")
    return sweep


VisibleSweep = Annotated[SweepRow, Depends(visible_sweep)]


async def controlled_sweep(sweep: VisibleSweep, caller: Caller) -> SweepRow:
    """Return the sweep in the path, for an action on it. Raises 403 for viewers."""
    caller.require("submitter")
    return sweep


ControlledSweep = Annotated[SweepRow, Depends(controlled_sweep)]


@router.post(
    "",
    status_code=201,
    summary="Submit a sweep",
    response_model=Sweep,
    responses={
        200: {"model": Sweep, "description": "This Idempotency-Key has already made this sweep."},
        **problem_answers(400, 403, 409, 413, 415, 422),
    },
    openapi_extra=SWEEP_BODY,
)
async def create_sweep(
    context: Context,
    caller: SubmitterToConfirm,
    raw: Annotated[Any, Depends(read_json)],
    idempotency_key: Annotated[
        str | None,
        Header(
            description=(
                "1 to 255 printable ASCII characters. The same key and body return the same sweep "
                "with 200."
            )
        ),
    ] = None,
    create_project: CreateProject = False,
) -> Response:
    """Validates every run of the sweep before the first is submitted. A fault names the value of
    the sweep that it comes from."""
    confirm = partial(caller.confirm, context)
    sweep, is_new = await submitted_sweep(
        context, caller, raw, idempotency_key, confirm, create_project=create_project
    )
    [answer] = await sweep_answers(context, [sweep])
    return as_json(answer, 201 if is_new else 200, {"Location": f"/v1/sweeps/{sweep.id}"})


@router.post(
    "/validate",
    summary="Check a sweep",
    responses=problem_answers(400, 403, 413, 415, 422),
    openapi_extra=SWEEP_BODY,
)
async def validate_sweep(
    context: Context,
    caller: SubmitterToConfirm,
    raw: Annotated[Any, Depends(read_json)],
    create_project: CreateProject = False,
) -> SweepSpec:
    """Checks a sweep with all of its runs as a submission does, and responds with it, and with the
    seed that it drew. Nothing is recorded. Submitted, the response makes the runs that were
    checked."""
    confirm = partial(caller.confirm, context)
    return await validated_sweep(context, caller, raw, confirm, create_project=create_project)


@router.get("", summary="List sweeps", responses=problem_answers(422))
async def list_sweeps(
    context: Context,
    caller: Caller,
    project: Annotated[
        str | None, Query(max_length=64, description="Only sweeps of this project.")
    ] = None,
    status: Annotated[
        list[str] | None,
        Query(description="Only sweeps in one of these statuses; repeat it for several."),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Sweep]:
    """Newest first; only sweeps of the token's project."""
    found = await page_of_sweeps(context, caller, project, status or (), limit, cursor)
    return Page[Sweep](items=tuple(found[0]), next_cursor=found[1])


@router.get("/{sweep_id}", summary="One sweep", responses=problem_answers(404))
async def get_sweep(sweep: VisibleSweep, context: Context) -> Sweep:
    """Its status, how its runs do, and the best of them."""
    return (await sweep_answers(context, [sweep]))[0]


@router.get("/{sweep_id}/spec", summary="The sweep as submitted", responses=problem_answers(404))
async def get_sweep_spec(sweep: VisibleSweep) -> SweepSpec:
    """With its seed and every default of the sweep: submitted again, it draws the same values."""
    return sweep.sweep_spec


@router.get("/{sweep_id}/runs", summary="Runs of a sweep", responses=problem_answers(404, 422))
async def list_sweep_runs(
    sweep: VisibleSweep, context: Context, limit: Limit = 50, cursor: Cursor = None
) -> Page[SweepRun]:
    """By number, those that are not submitted yet, too: the values that each sets, its status, and
    its best value of the metric."""
    trials = await trials_of_sweep(context, sweep.id)
    items, after = page_of(
        [run_of_sweep(trial) for trial in trials], lambda run: (run.number,), cursor, limit
    )
    return Page[SweepRun](items=tuple(items), next_cursor=after)


@router.post(
    "/{sweep_id}/cancel",
    status_code=202,
    summary="Cancel a sweep",
    responses=problem_answers(403, 404, 409),
)
async def cancel_sweep(sweep: ControlledSweep, context: Context) -> Sweep:
    """Submits no further run, and cancels those that have not ended, each after a last checkpoint.
    Repeating the request while the sweep stops changes nothing."""
    stopped = await context.database_call(context.sweeps.request_cancel, sweep.id)
    return (await sweep_answers(context, [stopped]))[0]


@router.delete(
    "/{sweep_id}",
    status_code=204,
    summary="Delete a sweep",
    responses=problem_answers(403, 404, 409, 422),
)
async def delete_sweep(
    sweep: ControlledSweep,
    context: Context,
    caller: Caller,
    runs: Annotated[
        bool,
        Query(description="Delete its runs first, with every checkpoint and log. Else they stay."),
    ] = False,
) -> None:
    """Only sweeps that have ended."""
    if runs and sweep.state.terminal:
        for trial in await trials_of_sweep(context, sweep.id):
            if trial.run_id is not None and not trial.is_deleted:
                await delete_run(await visible_run(trial.run_id, context, caller), context)
    await context.database_call(context.sweeps.delete, sweep.id)


async def page_of_sweeps(
    context: ApiContext,
    caller: Principal,
    project: str | None,
    status: Sequence[str],
    limit: int,
    cursor: str | None,
) -> tuple[list[Sweep], str | None]:
    """Return a page of the sweeps that the caller may see, and the cursor after it."""
    before = parse_sweep_cursor(cursor)
    wanted_statuses = statuses(status, SweepStatus)
    if caller.project is not None and project not in (None, caller.project):
        return [], None
    wanted = caller.project or project
    rows = await context.database_call(
        context.sweeps.page, wanted, wanted_statuses, limit + 1, before
    )
    last = rows[limit - 1] if len(rows) > limit else None
    after = None if last is None else sweep_cursor(last.created_at, last.id)
    return await sweep_answers(context, rows[:limit]), after


async def sweep_answers(context: ApiContext, rows: Sequence[SweepRow]) -> list[Sweep]:
    """Return sweeps as clients see them, in the same order."""
    trials = await context.database_call(context.sweeps.trials, [row.id for row in rows])
    return [sweep_answer(row, trials[row.id], context.public_url) for row in rows]


async def trials_of_sweep(context: ApiContext, sweep_id: str) -> list[TrialRow]:
    """Return the runs of a sweep, by number."""
    return (await context.database_call(context.sweeps.trials, [sweep_id]))[sweep_id]


# ---------------------------------------------------------------- new sweep

# Submit a sweep: check it with every run that it will submit, then record it.

MAX_VALUES = 500_000
"""Maximum number of values in the runs of a sweep together: each run is validated and stored."""
_SEED_BITS = 31


async def submitted_sweep(
    context: ApiContext,
    caller: Principal,
    raw: Any,
    idempotency_key: str | None,
    confirm: Guard,
    *,
    create_project: bool,
) -> tuple[SweepRow, bool]:
    """Record a sweep; return it, and whether it is new.

    Args:
        context: the service's context.
        caller: who submits.
        raw: the sweep as received.
        idempotency_key: the client's key for the request.
        confirm: raises if the caller is no longer allowed to.
        create_project: create a missing project; a caller's own project is always created.

    Raises InvalidSpec with the faults of every run.
    """
    idempotency = idempotency_of(idempotency_key, caller, raw)
    sweep, trials = await _checked(context, caller, raw, confirm, keep=True)
    make = partial(
        context.sweeps.create,
        sweep,
        trials,
        caller.token_id,
        idempotency,
        confirm,
        create_project=create_project or caller.project is not None,
    )
    try:
        return await context.database_write(make)
    except UnknownProject as exc:
        raise InvalidSpec((FieldError(("spec", "project"), str(exc)),)) from exc


def _parsed(raw: Any) -> tuple[SweepSpec, list[Trial]]:
    """Return the sweep with name and seed, and its runs."""
    try:
        sweep = SweepSpec.model_validate(raw)
    except ValidationError as exc:
        raise InvalidSpec(field_errors(SweepSpec, raw, exc)) from exc
    if faults := plain_text.faults(raw):
        raise InvalidSpec(few(faults))
    _check_size(sweep, raw)
    sweep = sweep.model_copy(
        update={
            "seed": secrets.randbits(_SEED_BITS) if sweep.seed is None else sweep.seed,
            "name": sweep.name or sweep.spec.get("name"),
        }
    )
    trials = trials_of(sweep)
    _check_rungs(sweep, trials)
    return sweep, trials


def _check_size(sweep: SweepSpec, raw: Any) -> None:
    """Refuse a sweep whose runs take long to validate: many of them, each with a long spec."""
    num_values = check_shape(raw)
    if num_values * sweep.num_runs > MAX_VALUES:
        message = (
            f"has {num_values} values for each of {sweep.num_runs} runs, more than "
            f"{MAX_VALUES} together; submit fewer runs, or a shorter spec"
        )
        raise InvalidSpec((FieldError(("spec",), message),))


def _check_rungs(sweep: SweepSpec, trials: list[Trial]) -> None:
    """Refuse rungs by the length of a run whose length its own loop does not tell."""
    is_by_length = isinstance(sweep.scheduler, AshaSpec) and sweep.scheduler.min_steps is None
    if is_by_length and any(trial.spec.runs_own_function for trial in trials):
        message = (
            "is required with code.script and code.train_fn, which do not tell how many steps "
            "they train; set the step of the first rung"
        )
        raise InvalidSpec((FieldError(("scheduler", "min_steps"), message),))


async def validated_sweep(
    context: ApiContext, caller: Principal, raw: Any, confirm: Guard, *, create_project: bool
) -> SweepSpec:
    """Return the sweep as it would be submitted, with name and seed. Nothing is recorded, and no
    checkpoint is kept. Raises InvalidSpec with the faults of every run."""
    sweep, trials = await _checked(context, caller, raw, confirm, keep=False)
    if not create_project and caller.project is None:
        try:
            await context.database_call(context.projects.require, trials[0].spec.project)
        except UnknownProject as exc:
            raise InvalidSpec((FieldError(("spec", "project"), str(exc)),)) from exc
    return sweep


async def _checked(
    context: ApiContext, caller: Principal, raw: Any, confirm: Guard, *, keep: bool
) -> tuple[SweepSpec, list[Trial]]:
    """Return the sweep with its runs after every check but that of its project. Raises
    InvalidSpec."""
    caller.require("submitter")
    sweep, trials = await validated(_parsed, raw)
    check_reaches(caller, trials[0].spec.project)
    # before errors can reveal what exists
    await context.database_lookup(confirmed, context, confirm)
    return sweep, await _allowed(context, caller, trials, keep=keep)


async def _allowed(
    context: ApiContext, caller: Principal, trials: list[Trial], *, keep: bool
) -> list[Trial]:
    """Return the runs after the checks of a single submission. Raises InvalidSpec."""
    checked: list[Trial] = []
    faults: dict[FieldError, str] = {}
    seen: set[object] = set()
    origins = Origins()
    for number, trial in enumerate(trials):
        shape = _shape(trial.spec.code)
        try:
            spec = await allowed(
                context,
                caller,
                trial.spec,
                keep=keep and not faults,
                origins=origins,
                look_at_code=shape not in seen,
            )
            checked.append(Trial(trial.params, spec))
        except InvalidSpec as exc:
            for error in exc.errors:
                faults.setdefault(error, f"run {number}: {words_of(trial.params)}")
        seen.add(shape)
    if faults:
        found = [
            FieldError(("spec", *error.loc), f"{error.msg} ({where})")
            for error, where in faults.items()
        ]
        raise InvalidSpec(few(found))
    return checked


def _shape(code: CodeSpec | None) -> object:
    """Return what the check of a user's code depends on: equal shapes are checked once."""
    if code is None:
        return None
    names = (tuple(sorted(code.args or {})), tuple(sorted(code.config or {})))
    return (code.archive, code.task, code.train_fn, code.script, names)


# ---------------------------------------------------------------- sweep answers

# Sweeps and their runs as clients read them.


def sweep_answer(sweep: SweepRow, trials: Sequence[TrialRow], public_url: str | None) -> Sweep:
    """Return the sweep. ``public_url`` is the base URL of this service for browsers."""
    spec = sweep.sweep_spec
    return Sweep(
        id=sweep.id,
        name=sweep.name,
        project=sweep.project,
        status=sweep.state,
        reason=_reason(sweep),
        metric=spec.metric,
        mode=spec.mode,
        scheduler=spec.scheduler.name,
        seed=spec.seed if spec.random else None,
        max_parallel=spec.max_parallel,
        created_at=to_time(sweep.created_at),
        finished_at=maybe_time(sweep.finished_at),
        progress=_progress(trials),
        best=best_of(trials, spec.mode == "max"),
        links=SweepLinks(dashboard=f"{public_url}/sweeps/{sweep.id}" if public_url else None),
    )


def _reason(sweep: SweepRow) -> SweepReason | None:
    if sweep.reason_code is None:
        return None
    return SweepReason(code=SweepReasonCode(sweep.reason_code), message=sweep.reason_message or "")


def _progress(trials: Sequence[TrialRow]) -> SweepProgress:
    statuses = [trial.status for trial in trials]
    return SweepProgress(
        total=len(trials),
        waiting=sum(trial.run_id is None for trial in trials),
        active=sum(status in LIVE for status in statuses),
        paused=statuses.count(RunStatus.PAUSED),
        succeeded=statuses.count(RunStatus.SUCCEEDED),
        failed=statuses.count(RunStatus.FAILED),
        cancelled=statuses.count(RunStatus.CANCELLED) + sum(trial.is_deleted for trial in trials),
    )


def best_of(trials: Sequence[TrialRow], larger_is_better: bool) -> SweepBest | None:
    """Return the run with the best value; of equal ones the first. Deleted runs do not count."""
    sign = -1.0 if larger_is_better else 1.0
    found = [
        (sign * trial.best_value, trial.number, trial)
        for trial in trials
        if trial.best_value is not None and trial.status is not None
    ]
    if not found:
        return None
    _, _, trial = min(found, key=lambda each: each[:2])
    assert trial.run_id and trial.best_value is not None and trial.best_step is not None
    return SweepBest(
        run_id=trial.run_id,
        number=trial.number,
        value=trial.best_value,
        step=trial.best_step,
        params=trial.params,
    )


def run_of_sweep(trial: TrialRow) -> SweepRun:
    return SweepRun(
        number=trial.number,
        params=trial.params,
        run_id=trial.run_id,
        is_deleted=trial.is_deleted,
        status=trial.status,
        step=trial.step or 0,
        total_steps=trial.total_steps,
        value=trial.best_value,
        value_step=trial.best_step,
        rung=trial.rung,
        results=tuple(RungResult(step=step, value=value) for step, value in trial.results),
    )
