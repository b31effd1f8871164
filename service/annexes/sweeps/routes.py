"""Routes of sweeps: submit, list, show, cancel, delete, and their runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

from fastapi import Depends, Header, Path, Query, Response

from everstep.spec.sweep import SweepSpec
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
from service.annexes.sweeps.store import SweepRow, SweepStore, TrialRow
from service.annexes.sweeps.submission import submitted_sweep, validated_sweep
from service.api.answers import (
    Cursor,
    Limit,
    answer_of,
    as_json,
    encode_place,
    page_of,
    parse_place,
)
from service.api.auth import Caller, Principal, Submitter, visible_run
from service.api.bodies import ApiRouter, AsWritten, example
from service.api.context import ApiContext, Context
from service.api.openapi import CreateProject, followed_by, problem_answers
from service.api.problems import not_found
from service.db.lease import SWEEP_ID_PATTERN
from service.model.states import LIVE
from service.runs.routes import delete_run, statuses

router: Final = ApiRouter("/v1/sweeps", "sweeps")

SweepBody = Annotated[
    SweepSpec,
    AsWritten(),
    example(
        {
            "spec": {
                "name": "digits",
                "task": {
                    "name": "image_classification",
                    "model": {"name": "mini_resnet"},
                    "data": {"name": "digits"},
                },
                "train": {"epochs": 9},
            },
            "metric": "val_accuracy",
            "grid": {"optimizer.lr": [0.001, 0.003]},
            "random": {"optimizer.weight_decay": {"name": "log", "low": 0.0001, "high": 0.1}},
            "max_runs": 20,
            "scheduler": {"name": "asha"},
        },
    ),
]

SweepPath = Annotated[str, Path(description="The sweep's id: `sweep_…`.")]


def store_of(context: ApiContext) -> SweepStore:
    return SweepStore(context.database, context.clock)


async def visible_sweep(sweep_id: SweepPath, context: Context, caller: Caller) -> SweepRow:
    """Return the sweep in the path. Sweeps of other projects do not exist for this caller: 404."""
    sweep = await context.database_call(store_of(context).get, sweep_id)
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
        201: followed_by(
            *("sweep_id", "id", "get_sweep", "get_sweep_spec", "list_sweep_runs"),
            *("cancel_sweep", "delete_sweep"),
        ),
        **problem_answers(400, 403, 409, 413, 415, 422),
    },
)
async def create_sweep(
    context: Context,
    caller: Submitter,
    raw: SweepBody,
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
    sweep, is_new = await submitted_sweep(
        context, caller, raw, idempotency_key, create_project=create_project
    )
    [answer] = await sweep_answers(context, [sweep])
    return as_json(answer, 201 if is_new else 200, {"Location": f"/v1/sweeps/{sweep.id}"})


@router.post(
    "/validate",
    summary="Check a sweep",
    responses=problem_answers(400, 403, 413, 415, 422),
)
async def validate_sweep(
    context: Context,
    caller: Submitter,
    raw: SweepBody,
    create_project: CreateProject = False,
) -> SweepSpec:
    """Checks a sweep with all of its runs as a submission does, and responds with it, and with the
    seed that it drew. Nothing is recorded. Submitted, the response makes the runs that were
    checked."""
    return await validated_sweep(context, caller, raw, create_project=create_project)


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
    stopped = await context.database_call(store_of(context).request_cancel, sweep.id)
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
    await context.database_call(store_of(context).delete, sweep.id)


async def page_of_sweeps(
    context: ApiContext,
    caller: Principal,
    project: str | None,
    status: Sequence[str],
    limit: int,
    cursor: str | None,
) -> tuple[list[Sweep], str | None]:
    """Return a page of the sweeps that the caller may see, and the cursor after it."""
    before = None if cursor is None else parse_place(cursor, SWEEP_ID_PATTERN)
    wanted_statuses = statuses(status, SweepStatus)
    if caller.project is not None and project not in (None, caller.project):
        return [], None
    wanted = caller.project or project
    rows = await context.database_call(
        store_of(context).page, wanted, wanted_statuses, limit + 1, before
    )
    last = rows[limit - 1] if len(rows) > limit else None
    after = None if last is None else encode_place((last.created_at, last.id))
    return await sweep_answers(context, rows[:limit]), after


async def sweep_answers(context: ApiContext, rows: Sequence[SweepRow]) -> list[Sweep]:
    """Return sweeps as clients see them, in the same order."""
    trials = await context.database_call(store_of(context).trials, [row.id for row in rows])
    return [sweep_answer(row, trials[row.id], context.public_url) for row in rows]


async def trials_of_sweep(context: ApiContext, sweep_id: str) -> list[TrialRow]:
    """Return the runs of a sweep, by number."""
    return (await context.database_call(store_of(context).trials, [sweep_id]))[sweep_id]


# ---------------------------------------------------------------- sweep answers

# Sweeps and their runs as clients read them.


def sweep_answer(sweep: SweepRow, trials: Sequence[TrialRow], public_url: str | None) -> Sweep:
    """Return the sweep. ``public_url`` is the base URL of this service for browsers."""
    spec = sweep.sweep_spec
    return answer_of(
        Sweep,
        sweep,
        status=sweep.state,
        reason=_reason(sweep),
        metric=spec.metric,
        mode=spec.mode,
        scheduler=spec.scheduler.name,
        seed=spec.seed if spec.random else None,
        max_parallel=spec.max_parallel,
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
    return answer_of(
        SweepRun,
        trial,
        step=trial.step or 0,
        value=trial.best_value,
        value_step=trial.best_step,
        results=tuple(RungResult(step=step, value=value) for step, value in trial.results),
    )
