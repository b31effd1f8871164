"""User code: uploads, and the checks when a run refers to one."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.types import Message

from everstep.code.rules import MAX_ARCHIVE_BYTES
from everstep.errors import FieldError, InvalidSpec
from everstep.spec.user_code import CodeSpec
from everstep.wire import CodeArchive
from service.api.auth import Principal, Submitter
from service.api.context import ApiContext, Context
from service.api.openapi import CreateProject, problem_answers
from service.api.problems import ProblemError, invalid_request
from service.db.projects import DEFAULT_PROJECT
from service.submission_rules.user_code import faults_of
from storage.code.archive import read_members
from storage.code.store import CodeStore, look_at
from storage.errors import StorageNotFound

router: Final = APIRouter(prefix="/v1/code", tags=["code"])

_one_check: Final = threading.Lock()
"""Check one archive at a time: the parser holds the interpreter lock most of the time."""
FORM_BYTES: Final = 64 << 10
"""Size allowed for the parts of a multipart body around its file."""

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
    caller: Submitter,
    project: Annotated[
        str | None,
        Query(
            max_length=64,
            description=(
                "Project whose runs may use it; default the token's project, `default` for an "
                "admin."
            ),
        ),
    ] = None,
    create_project: CreateProject = False,
) -> CodeArchive:
    """Accepts a zip or tar.gz with a Python module or package, for the runs of one project. The
    same bytes have the same digest and count once; above the project's limit the response is 409.
    Refused with 422: links, paths that lead outside, archives that unpack to too much, and modules
    whose names are reserved for Everstep, torch, Ray or Python."""
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
    # Record first: an upload above the limit leaves nothing behind, and an interrupted one is
    # simply repeated.
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
    """Check the code that a run of a project brings, without running any of it.

    An archive is one of the project's own; administrators, who reach all projects, may take any.
    Raises InvalidSpec with every fault that can be seen.
    """
    if caller.project is not None and not await context.database_lookup(
        context.code_archives.holds, project, code.archive
    ):
        raise InvalidSpec((_missing(project),))
    faults = await context.storage_call(_archive_faults, CodeStore(context.storage), project, code)
    if faults:
        raise InvalidSpec(tuple(faults))
    # members of the project may then use what an administrator submitted
    if caller.project is None:
        await context.database_call(
            context.code_archives.share, project, code.archive, caller.token_id
        )


def _missing(project: str) -> FieldError:
    words = (
        f"is not an archive of project {project!r}; upload the code first (client.code.upload, "
        "POST /v1/code)"
    )
    return FieldError(("code", "archive"), words)


def _archive_faults(store: CodeStore, project: str, code: CodeSpec) -> list[FieldError]:
    try:
        data = store.read(code.archive)
    except StorageNotFound:
        return [_missing(project)]
    with _one_check:
        return faults_of(code, {member.path: member.data for member in read_members(data)})


async def _read_file(request: Request) -> bytes:
    """Return the form's ``file``, reading no more than the limit. Raises 400, 413, 415 or 422."""
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
    """A request that raises 413 once its body is larger than an archive may be."""

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
                    f"the archive is larger than {MAX_ARCHIVE_BYTES >> 20} MiB; leave out data "
                    "and weights (.everstepignore)"
                ),
            )
        return message
