"""Routes of runs: submit, list, show, cancel, pause, resume, delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, TypeVar

from fastapi import Depends, Header, Query, Response

from everstep.spec.run_spec import RunSpec
from everstep.wire import Page, Run, RunChange, RunStatus
from service.api.answers import Cursor, Limit, as_json
from service.api.auth import Caller, ControlledRun, Submitter, VisibleRun
from service.api.blocking import db_write, long_storage_call, storage_call
from service.api.bodies import ApiRouter, AsWritten, Parsed, example
from service.api.dependencies import Gate, Logs, TheStorage
from service.api.log_views import LogViews
from service.api.openapi import CreateProject, followed_by, problem_answers
from service.api.problems import invalid_request
from service.db.run_lookup import RunFilter, RunOrder
from service.model.run_rows import RunRow
from service.runs.submission import TheSubmissions
from service.runs.views import RunViews, Views
from service.storage_identity import StorageGate
from storage.filesystem import Storage
from storage.run_dir import RunDir


@dataclass(frozen=True)
class RunActions:
    """Changes runs at their users' requests. Raises TransitionConflict for what a run's state does
    not allow."""

    views: RunViews
    storage: Storage
    gate: StorageGate
    logs: LogViews

    async def cancel(self, run: RunRow) -> Run:
        return await self._seen(await db_write(self.views.runs.request_stop, run.id, "cancel"))

    async def pause(self, run: RunRow) -> Run:
        return await self._seen(await db_write(self.views.runs.request_stop, run.id, "pause"))

    async def resume(self, run: RunRow) -> Run:
        return await self._seen(await db_write(self.views.runs.resume, run.id))

    async def change(self, run: RunRow, change: RunChange) -> Run:
        """Replace the notes of a run."""
        notes = (change.notes or "").strip() or None
        return await self._seen(await db_write(self.views.runs.set_notes, run.id, notes))

    async def delete(self, run: RunRow) -> None:
        """Delete a run's directory, then its history."""
        # with another storage mounted, its directory would be left behind
        await storage_call(self.gate.require)
        await db_write(self.views.runs.begin_delete, run.id)
        # The directory first: after a crash in between, the run can be deleted again, and no
        # orphaned files are left.
        await long_storage_call(RunDir(self.storage, run.id).delete)
        await db_write(self.views.runs.delete, run.id)
        self.logs.forget(run.id)

    async def _seen(self, run: RunRow) -> Run:
        return (await self.views.of([run]))[0]


async def run_control(views: Views, storage: TheStorage, gate: Gate, logs: Logs) -> RunActions:
    return RunActions(views, storage, gate, logs)


Control = Annotated[RunActions, Depends(run_control)]


# ---------------------------------------------------------------- routes

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
    submissions: TheSubmissions,
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
    made, is_new = await submissions.submit(
        caller, raw, idempotency_key, create_project=create_project
    )
    return as_json(made, 201 if is_new else 200, {"Location": f"/v1/runs/{made['id']}"})


@checks.post(
    "/validate",
    summary="Check a spec",
    responses=problem_answers(400, 403, 413, 415, 422),
)
async def validate_spec(
    submissions: TheSubmissions,
    caller: Submitter,
    raw: SpecBody,
    create_project: CreateProject = False,
) -> RunSpec:
    """Checks a spec as a submission does, and responds with it as resolved. Nothing is recorded."""
    return await submissions.validated(caller, raw, create_project=create_project)


@router.get("", summary="List runs", response_model=Page[Run], responses=problem_answers(422))
async def list_runs(
    views: Views,
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
    answer = await views.page(caller, wanted, limit, cursor, parse_order(sort))
    return Response(answer, media_type="application/json")


@router.get("/{run_id}", summary="One run", response_model=Run, responses=problem_answers(404))
async def get_run(run: VisibleRun, views: Views) -> Response:
    """Status, progress, and the failures that the run would survive."""
    return as_json(await views.one(run.id))


@router.patch(
    "/{run_id}",
    summary="Change the notes of a run",
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
)
async def change_run(change: ChangeBody, run: ControlledRun, control: Control) -> Run:
    """Replaces the notes; nothing else of a run can be changed. The last change wins."""
    return await control.change(run, change)


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
async def cancel_run(run: ControlledRun, control: Control) -> Run:
    """A run that is training commits a last checkpoint first. Repeating the request while it stops
    changes nothing."""
    return await control.cancel(run)


@router.post(
    "/{run_id}/pause",
    status_code=202,
    summary="Pause a run",
    responses={
        202: followed_by("run_id", "id", "resume_run", "cancel_run"),
        **problem_answers(403, 404, 409),
    },
)
async def pause_run(run: ControlledRun, control: Control) -> Run:
    """A run that is training commits a checkpoint first, and releases its resources."""
    return await control.pause(run)


@router.post(
    "/{run_id}/resume",
    status_code=202,
    summary="Resume a paused run",
    responses=problem_answers(403, 404, 409),
)
async def resume_run(run: ControlledRun, control: Control) -> Run:
    """The run queues again, and continues from its last checkpoint."""
    return await control.resume(run)


@router.delete(
    "/{run_id}", status_code=204, summary="Delete a run", responses=problem_answers(403, 404, 409)
)
async def delete_run(run: ControlledRun, control: Control) -> None:
    """Only runs that have ended. Deletes the run's directory with every checkpoint and log, then
    its history."""
    await control.delete(run)


# ---------------------------------------------------------------- filters

# Filters of lists of runs, as queries have them.

Status = TypeVar("Status", bound=StrEnum)


def parse_order(sort: str | None) -> RunOrder | None:
    """Parse ``KEY`` or ``-KEY``; None is newest first. Raises 422."""
    if not sort or sort == "-created_at":
        return None
    try:
        return RunOrder.parse(sort)
    except ValueError as exc:
        raise invalid_request("sort", msg=f"cannot sort by this: {exc}") from exc


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
