"""Routes of a run's checkpoints: list, verify, download."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Final

from fastapi import Header, Path, Query
from fastapi.responses import StreamingResponse

from everstep.wire import Checkpoint, Page
from everstep.wire.events import EventFileInfo
from service.api.auth import Caller, ControlledRun, VisibleRun
from service.api.blocking import (
    db_read,
    db_write,
    long_storage_call,
    of_history,
    storage_call,
)
from service.api.bodies import ApiRouter, begun, blocks_of, download, requested_range
from service.api.dependencies import Events, Gate, Streams, TheStorage
from service.api.openapi import problem_answers
from service.api.problems import ApiProblem, invalid_request, not_found
from service.db.events import EventStore
from service.model.run_rows import RunRow
from service.projections import checkpoints
from storage.checkpoints.retention import CheckpointHold
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint, StorageNotFound
from storage.run_dir import RunDir

router: Final = ApiRouter("/v1/runs/{run_id}/checkpoints", "checkpoints")

TAR: Final = "application/x-tar"

Which = Annotated[str, Path(max_length=32, description="A step, `latest` or `best`.")]


@router.get("", summary="Checkpoints of a run", responses=problem_answers(404))
async def list_checkpoints(run: VisibleRun, events: Events) -> Page[Checkpoint]:
    """Every checkpoint of the committed lineage, oldest first. Those that retention deleted have
    the state `deleted`."""
    return Page(items=tuple(await all_checkpoints(events, run.id)), next_cursor=None)


@router.get("/{step}", summary="One checkpoint", responses=problem_answers(404, 422))
async def get_checkpoint(run: VisibleRun, events: Events, step: Which) -> Checkpoint:
    return await _find(events, run, step)


@router.get(
    "/{step}/archive",
    summary="Download a checkpoint",
    response_class=StreamingResponse,
    responses={
        200: {"content": {TAR: {"schema": {"type": "string", "format": "binary"}}}},
        206: {
            "content": {TAR: {"schema": {"type": "string", "format": "binary"}}},
            "description": "The part that `Range` requests.",
        },
        **problem_answers(404, 409, 416, 422),
    },
)
async def get_archive(
    run: VisibleRun,
    events: Events,
    storage: TheStorage,
    streamed: Streams,
    caller: Caller,
    step: Which,
    range_: Annotated[
        str | None,
        Header(alias="Range", description="`bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-COUNT`."),
    ] = None,
    if_range: Annotated[
        str | None,
        Header(description="The `ETag` of the earlier part; if it differs, everything is sent."),
    ] = None,
) -> StreamingResponse:
    """An uncompressed tar file: `manifest.json` first, then every file. Each file that is sent
    whole is verified while it is sent; if one does not match the manifest, the connection is closed
    before the end of the archive.

    The bytes are the same every time, so an interrupted download can be resumed with `Range` and
    `If-Range`. A client that joins parts must compare the digests in the manifest itself.
    """
    streamed.require_room(caller)
    checkpoint = await _find(events, run, step)
    if checkpoint.state == "deleted":
        raise not_found(
            f"checkpoint {checkpoint.name} of run {run.id} was deleted by retention; choose another"
        )
    run_dir = RunDir(storage, run.id)
    hold = (
        None
        if run.status.terminal
        else await storage_call(CheckpointHold, run_dir, checkpoint.name)
    )
    archive = await storage_call(CheckpointStore(run_dir).archive, checkpoint.name)
    etag = f'"{archive.manifest.digest}"'
    wanted = requested_range(range_, archive.size_bytes) if if_range in (None, etag) else None
    begin, end = wanted or (0, archive.size_bytes)
    blocks = await storage_call(begun, archive.stream(begin, end))
    headers = {
        "Content-Disposition": f'attachment; filename="{run.id}-{checkpoint.name}.tar"',
        "Content-Length": str(end - begin),
        "Accept-Ranges": "bytes",
        "ETag": etag,
        "X-Everstep-Checkpoint": checkpoint.name,
        "X-Everstep-Digest": f"sha256:{archive.manifest.digest}",
    }
    if wanted:
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{archive.size_bytes}"
    if hold is not None:
        blocks = _holding(hold, blocks, to_the_end=end == archive.size_bytes)
    return download(streamed, caller, blocks, TAR, headers, 206 if wanted else 200)


def _holding(hold: CheckpointHold, blocks: Iterator[bytes], *, to_the_end: bool) -> Iterator[bytes]:
    """Yield the blocks while renewing the hold. An interrupted download leaves its hold, so that it
    can be resumed."""
    for block in blocks:
        hold.renew()
        yield block
    if to_the_end:
        hold.release()


@router.post(
    "/{step}/verify",
    summary="Read a checkpoint back",
    responses=problem_answers(403, 404, 409, 422),
)
async def verify_checkpoint(
    run: ControlledRun, events: Events, storage: TheStorage, gate: Gate, step: Which
) -> Checkpoint:
    """Re-reads and re-hashes every file. The response's `state` is `corrupt` if one does not match
    the manifest, and `problem` names it."""
    checkpoint = await _find(events, run, step)
    if checkpoint.state == "deleted":
        raise ApiProblem(
            409,
            "checkpoint_deleted",
            f"checkpoint {checkpoint.name} was deleted by retention; verify another one",
        )
    # a checkpoint that another storage lacks is not damaged
    await storage_call(gate.require)
    problem = await long_storage_call(_verify, RunDir(storage, run.id), checkpoint.name)
    await db_write(events.record_check, run.id, checkpoint.name, problem, "verify")
    return await _find(events, run, str(checkpoint.step))


def _verify(run_dir: RunDir, name: str) -> str | None:
    """Return what is wrong with a checkpoint; None if all sizes and digests match. Raises
    StorageError for other problems."""
    try:
        CheckpointStore(run_dir).verify(name)
    except (CorruptCheckpoint, StorageNotFound) as exc:
        return str(exc)
    return None


async def all_checkpoints(events: EventStore, run_id: str) -> list[Checkpoint]:
    """Return every checkpoint of a run's lineage, oldest first."""
    checks = await db_read(events.checkpoint_checks, run_id)
    fold = partial(checkpoints.checkpoints, checks=checks)
    return await of_history(events, run_id, checkpoints.KINDS, fold)


async def _find(events: EventStore, run: RunRow, which: str) -> Checkpoint:
    """Return the checkpoint. Raises 404 for one that never existed, 422 for an invalid name."""
    try:
        found = await all_checkpoints(events, run.id)
        checkpoint, missing = checkpoints.choose(found, run.id, run.stored_spec, which)
    except ValueError as exc:
        raise invalid_request("step", msg=str(exc)) from exc
    if checkpoint is None:
        raise not_found(missing)
    return checkpoint


# ---------------------------------------------------------------- tensorboard

# Routes of a run's TensorBoard files: list them, download them.

tensorboard_router: Final = ApiRouter("/v1/runs/{run_id}/tensorboard", "runs")

BINARY: Final = "application/octet-stream"

FileName = Annotated[
    str,
    Path(
        max_length=128,
        pattern=r"^events\.out\.tfevents\.[0-9A-Za-z.]+$",
        description="A name of the list.",
    ),
]


@tensorboard_router.get("", summary="TensorBoard files", responses=problem_answers(404, 422))
async def list_event_files(run: VisibleRun, storage: TheStorage) -> Page[EventFileInfo]:
    """One or more for each submission, which grow while the run trains: what was read stays as it
    is. All are on one page."""
    run_dir = RunDir(storage, run.id)
    directory = run_dir.tensorboard_path("").rstrip("/")
    found = await storage_call(run_dir.files.list, directory)
    names = [each.name for each in found if not each.is_dir and "tfevents" in each.name]
    return Page(items=tuple(EventFileInfo(name=name) for name in names), next_cursor=None)


@tensorboard_router.get(
    "/{name}",
    summary="Download a TensorBoard file",
    response_class=StreamingResponse,
    responses={
        200: {"content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}},
        **problem_answers(404, 422),
    },
)
async def get_event_file(
    run: VisibleRun,
    storage: TheStorage,
    streamed: Streams,
    caller: Caller,
    name: FileName,
    offset: Annotated[int, Query(ge=0, le=2**53, description="Bytes to leave out.")] = 0,
) -> StreamingResponse:
    """Empty at the end of the file, if ``offset`` is its size."""
    streamed.require_room(caller)
    run_dir = RunDir(storage, run.id)
    blocks = blocks_of(run_dir, run_dir.tensorboard_path(name), offset)
    found = await storage_call(begun, blocks)
    return download(streamed, caller, found, BINARY)
