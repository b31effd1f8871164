"""Checkpoints of a run: listed, checked, downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Final

from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from everstep.wire import Checkpoint, Page
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.auth import ControlledRun, VisibleRun
from service.db.rows import RunRow
from service.problems import ProblemError, invalid_request, not_found
from service.projections import checkpoints
from storage.errors import CorruptCheckpoint, StorageNotFound

router: Final = APIRouter(prefix="/v1/runs/{run_id}/checkpoints", tags=["checkpoints"])

Which = Annotated[str, Path(max_length=32, description="A step, `latest` or `best`.")]


@router.get("", summary="Checkpoints of a run", responses=problem_answers(404))
async def list_checkpoints(run: VisibleRun, context: Context) -> Page[Checkpoint]:
    """Every checkpoint of the committed lineage, oldest first; those that retention deleted are listed as `deleted`."""
    return Page(items=tuple(await _all(context, run)), next_cursor=None)


@router.get("/{step}", summary="One checkpoint", responses=problem_answers(404, 422))
async def get_checkpoint(run: VisibleRun, context: Context, step: Which) -> Checkpoint:
    return await _find(context, run, step)


@router.get(
    "/{step}/archive",
    summary="Download a checkpoint",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}},
        **problem_answers(404, 409, 422),
    },
)
async def get_archive(run: VisibleRun, context: Context, step: Which) -> StreamingResponse:
    """An uncompressed tar stream: `manifest.json` first, then every file. Each file is verified as it is sent; the connection
    breaks off before the archive's end where one is not what the manifest says."""
    checkpoint = await _find(context, run, step)
    if checkpoint.state == "deleted":
        raise not_found(f"checkpoint {checkpoint.name} of run {run.id} was deleted; its step is no longer kept")
    first, rest = await context.storage_call(_open_archive, context, run.id, checkpoint.name)
    return StreamingResponse(
        chain((first,), rest),
        media_type="application/x-tar",
        headers={
            "Content-Disposition": f'attachment; filename="{run.id}-{checkpoint.name}.tar"',
            "X-Everstep-Checkpoint": checkpoint.name,
            "X-Everstep-Digest": f"sha256:{checkpoint.digest}",
        },
    )


def _open_archive(context: ApiContext, run_id: str, name: str) -> tuple[bytes, Iterator[bytes]]:
    """The first block too, so that a checkpoint that is not there is a 404 and not a broken download."""
    blocks = context.storage.run_dir(run_id).checkpoints.archive(name)
    return next(blocks), blocks


@router.post("/{step}/verify", summary="Read a checkpoint back", responses=problem_answers(403, 404, 409, 422))
async def verify_checkpoint(run: ControlledRun, context: Context, step: Which) -> Checkpoint:
    """Re-reads and re-hashes every file. The answer's `state` is `corrupt` where one is not what the manifest says, and
    `problem` says which."""
    checkpoint = await _find(context, run, step)
    if checkpoint.state == "deleted":
        raise ProblemError(409, "checkpoint_deleted", f"checkpoint {checkpoint.name} was deleted; there is nothing to verify")
    problem = await context.storage_call(_verify, context, run.id, checkpoint.name)
    await context.database_call(context.events.record_check, run.id, checkpoint.name, problem)
    return await _find(context, run, str(checkpoint.step))


def _verify(context: ApiContext, run_id: str, name: str) -> str | None:
    """What is wrong with a checkpoint; None where every file has its size and digest. Raises StorageError for other trouble."""
    try:
        context.storage.run_dir(run_id).checkpoints.verify(name)
    except (CorruptCheckpoint, StorageNotFound) as exc:
        return str(exc)
    return None


async def _all(context: ApiContext, run: RunRow) -> list[Checkpoint]:
    events = await context.database_call(context.events.of_kinds, run.id, checkpoints.KINDS)
    checks = await context.database_call(context.events.checkpoint_checks, run.id)
    return checkpoints.checkpoints(events, checks)


async def _find(context: ApiContext, run: RunRow, which: str) -> Checkpoint:
    """Raises 404 for a checkpoint that never was, 422 for what names none."""
    found = await _all(context, run)
    if which == "latest":
        checkpoint = checkpoints.newest(found)
        missing = f"run {run.id} has no committed checkpoint yet"
    elif which == "best":
        metric = run.spec["checkpoint"]["best_metric"]
        checkpoint = checkpoints.best(found, metric, run.spec["checkpoint"]["best_mode"])
        missing = (
            f"run {run.id} has no committed checkpoint with the metric {metric!r} yet"
            if metric
            else f"run {run.id} keeps no best checkpoint: its spec sets no checkpoint.best_metric; ask for latest"
        )
    elif which.isascii() and which.isdigit() and len(which) <= 18:
        checkpoint = checkpoints.at_step(found, int(which))
        missing = f"run {run.id} has no checkpoint of step {int(which)}"
    else:
        raise invalid_request("step", msg=f"{which!r} is not a step, latest or best")
    if checkpoint is None:
        raise not_found(missing)
    return checkpoint
