"""Routes of a run's TensorBoard files: list them, download them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from everstep.wire import Page
from everstep.wire.history import EventFileInfo
from service.api.auth import Caller, VisibleRun
from service.api.byte_stream import begun, download
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from storage.run_dir import RunDir

router: Final = APIRouter(prefix="/v1/runs/{run_id}/tensorboard", tags=["runs"])

BINARY: Final = "application/octet-stream"
_CHUNK_BYTES: Final = 1 << 20

FileName = Annotated[
    str,
    Path(
        max_length=128,
        pattern=r"^events\.out\.tfevents\.[0-9A-Za-z.]+$",
        description="A name of the list.",
    ),
]


@router.get("", summary="TensorBoard files", responses=problem_answers(404, 422))
async def list_event_files(run: VisibleRun, context: Context) -> Page[EventFileInfo]:
    """One or more for each submission, which grow while the run trains: what was read stays as it
    is. All are on one page."""
    run_dir = RunDir(context.storage, run.id)
    directory = run_dir.tensorboard_path("").rstrip("/")
    found = await context.storage_call(run_dir.files.list, directory)
    names = [each.name for each in found if not each.is_dir and "tfevents" in each.name]
    return Page(items=tuple(EventFileInfo(name=name) for name in names), next_cursor=None)


@router.get(
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
    context: Context,
    caller: Caller,
    name: FileName,
    offset: Annotated[int, Query(ge=0, le=2**53, description="Bytes to leave out.")] = 0,
) -> StreamingResponse:
    """Empty at the end of the file, if ``offset`` is its size."""
    context.followers.require_room(caller)
    found = await context.storage_call(begun, _chunks(context, run.id, name, offset))
    return download(context, caller, found, BINARY)


def _chunks(context: ApiContext, run_id: str, name: str, offset: int) -> Iterator[bytes]:
    run_dir = RunDir(context.storage, run_id)
    with run_dir.files.open_read(run_dir.tensorboard_path(name), offset) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
