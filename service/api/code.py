"""Users' code: taken in as an archive, and looked at when a run names it."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.types import Message

from everstep.code_rules import MAX_ARCHIVE_BYTES
from everstep.errors import FieldError, InvalidSpec
from everstep.spec import CodeSpec
from everstep.wire import CodeArchive
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.auth import Caller
from service.code_look import faults_of
from service.problems import ProblemError, invalid_request
from storage.code_archive import read_members
from storage.code_store import CodeStore
from storage.errors import StorageNotFound

router: Final = APIRouter(prefix="/v1/code", tags=["code"])

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
                    "properties": {"file": {"type": "string", "format": "binary", "description": "A zip or tar.gz archive."}},
                }
            }
        },
    }
}


@router.post(
    "",
    status_code=201,
    summary="Upload code",
    responses=problem_answers(400, 403, 413, 415, 422),
    openapi_extra=ARCHIVE_BODY,
)
async def upload_code(request: Request, context: Context, caller: Caller) -> CodeArchive:
    """Takes a zip or tar.gz with a Python module or package. The same bytes are stored once, and have the same digest, however
    often they are sent. Refused with 422 are links, paths that lead elsewhere, archives that unpack to too much, and modules whose
    names belong to Everstep, torch, Ray or Python itself."""
    caller.require("submitter")
    data = await _read_file(request)
    await context.storage_call(context.storage_gate.require)
    stored = await context.storage_call(CodeStore(context.storage).put, data)
    return CodeArchive(digest=stored.digest, size_bytes=stored.size_bytes, modules=stored.modules)


async def check_code(context: ApiContext, code: CodeSpec) -> None:
    """Look at the code that a run brings, without running any of it. Raises InvalidSpec with every fault that can be seen."""
    faults = await context.storage_call(_look, CodeStore(context.storage), code)
    if faults:
        raise InvalidSpec(tuple(faults))


def _look(store: CodeStore, code: CodeSpec) -> list[FieldError]:
    try:
        data = store.read(code.archive)
    except StorageNotFound:
        return [FieldError(("code", "archive"), "no such archive; upload the code first (client.code.upload, POST /v1/code)")]
    return faults_of(code, {member.path: member.data for member in read_members(data)})


async def _read_file(request: Request) -> bytes:
    """The form's ``file``, of which no more than the limit is ever taken. Raises 400, 413, 415 or 422."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise ProblemError(
            415, "unsupported_media_type", f"send the archive as multipart/form-data, field 'file', not {media_type[:80]!r}"
        )
    async with _Limited(request).request.form(max_files=1, max_fields=8) as form:
        upload = form.get("file")
        if upload is None or isinstance(upload, str):
            raise invalid_request("file", msg="is required: a zip or tar.gz archive as a file of the form")
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
                f"the archive is larger than {MAX_ARCHIVE_BYTES >> 20} MiB; leave data and weights out of it (.everstepignore)",
            )
        return message
