"""Users' code: taken in as an archive, and looked at when a run names it."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.types import Message

from everstep.code.rules import MAX_ARCHIVE_BYTES
from everstep.errors import FieldError, InvalidSpec
from everstep.spec.user_code import CodeSpec
from everstep.wire import CodeArchive
from service.api.auth import Caller, Principal
from service.api.context import ApiContext, Context
from service.api.openapi import CreateProject, problem_answers
from service.api.problems import ProblemError, invalid_request
from service.db.projects import DEFAULT_PROJECT
from service.submission_rules.user_code import faults_of
from storage.code.archive import read_members
from storage.code.store import CodeStore, look_at
from storage.errors import StorageNotFound

router: Final = APIRouter(prefix="/v1/code", tags=["code"])

_one_look: Final = threading.Lock()
"""One archive is looked at at a time: the parser holds the interpreter for most of it."""
FORM_BYTES: Final = 64 << 10
"""Room for what a multipart body says around its file."""

ARCHIVE_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "A zip or tar.gz archive.",
                        }
                    },
                }
            }
        },
    }
}


@router.post(
    "",
    status_code=201,
    summary="Upload code",
    responses=problem_answers(400, 403, 409, 413, 415, 422),
    openapi_extra=ARCHIVE_BODY,
)
async def upload_code(
    request: Request,
    context: Context,
    caller: Caller,
    project: Annotated[
        str | None,
        Query(
            max_length=64,
            description=(
                "Whose runs may use it; by default the token's own project, `default` for an admin."
            ),
        ),
    ] = None,
    create_project: CreateProject = False,
) -> CodeArchive:
    """Takes a zip or tar.gz with a Python module or package, for the runs of one project. The same
    bytes have the same digest, and count once, however often they are sent; beyond what a project
    may have the answer is 409. Refused with 422 are links, paths that lead elsewhere, archives that
    unpack to too much, and modules whose names belong to Everstep, torch, Ray or Python."""
    caller.require("submitter")
    owner = project or caller.project or DEFAULT_PROJECT
    if not caller.reaches(owner):
        raise ProblemError(
            403,
            "forbidden",
            f"token {caller.name!r} belongs to project {caller.project!r}, not {owner!r}",
        )
    data = await _read_file(request)
    await context.storage_call(context.storage_gate.require)
    found = await context.storage_call(look_at, data)
    # The record first: an upload that is over the limit leaves nothing behind, and one that breaks
    # off is simply sent again.
    await context.database_call(
        context.code_archives.record,
        owner,
        found.digest,
        found.size_bytes,
        caller.token_id,
        context.max_code_bytes,
        create_project=create_project or caller.project is not None,
    )
    await context.storage_call(CodeStore(context.storage).keep, found, data)
    return CodeArchive(digest=found.digest, size_bytes=found.size_bytes, modules=found.modules)


async def check_code(context: ApiContext, caller: Principal, project: str, code: CodeSpec) -> None:
    """Look at the code that a run of a project brings, without running any of it.

    An archive is one of the project's own; administrators, who reach all projects, may take any.
    Raises InvalidSpec with every fault that can be seen.
    """
    if caller.project is not None and not await context.database_look(
        context.code_archives.holds, project, code.archive
    ):
        raise InvalidSpec((_missing(project),))
    faults = await context.storage_call(_look, CodeStore(context.storage), project, code)
    if faults:
        raise InvalidSpec(tuple(faults))
    # the project's own people may then use what an administrator gave it
    if caller.project is None:
        await context.database_call(
            context.code_archives.share, project, code.archive, caller.token_id
        )


def _missing(project: str) -> FieldError:
    words = (
        f"no such archive in project {project!r}; upload the code first (client.code.upload, POST "
        "/v1/code)"
    )
    return FieldError(("code", "archive"), words)


def _look(store: CodeStore, project: str, code: CodeSpec) -> list[FieldError]:
    try:
        data = store.read(code.archive)
    except StorageNotFound:
        return [_missing(project)]
    with _one_look:
        return faults_of(code, {member.path: member.data for member in read_members(data)})


async def _read_file(request: Request) -> bytes:
    """The form's ``file``, of which no more than the limit is ever taken. Raises 400, 413, 415 or
    422."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise ProblemError(
            415,
            "unsupported_media_type",
            f"send the archive as multipart/form-data, field 'file', not {media_type[:80]!r}",
        )
    async with _Limited(request).request.form(max_files=1, max_fields=8) as form:
        upload = form.get("file")
        if upload is None or isinstance(upload, str):
            raise invalid_request(
                "file", msg="is required: a zip or tar.gz archive as a file of the form"
            )
        return await upload.read()


class _Limited:
    """A request whose body ends with 413 once it is larger than an archive may be."""

    def __init__(self, request: Request) -> None:
        self._original = request
        self._num_bytes = 0
        self.request = Request(request.scope, self._receive)

    async def _receive(self) -> Message:
        message = await self._original.receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > MAX_ARCHIVE_BYTES + FORM_BYTES:
            raise ProblemError(
                413,
                "body_too_large",
                (
                    f"the archive is larger than {MAX_ARCHIVE_BYTES >> 20} MiB; leave data and "
                    "weights out of it (.everstepignore)"
                ),
            )
        return message
