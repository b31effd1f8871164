"""Submit a run: check the spec and all that it refers to, then record it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Query, Request

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.code import CodeSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.wire import CodeArchive
from service.api.answers import JsonObject, run_json
from service.api.auth import Submitter
from service.api.bodies import ApiRouter, content_sha256, validated
from service.api.callers import Principal
from service.api.context import ApiContext, Context
from service.api.openapi import CreateProject, problem_answers
from service.api.problems import ApiProblem, invalid_request
from service.db.ids import IdempotencyKey
from service.db.projects import DEFAULT_PROJECT, UnknownProject
from service.db.runs import first_transition
from service.model.rows import TransitionRow
from service.model.run_rows import RunRow
from service.runs.origins import with_origin
from service.submission_rules.allowed import StorageRoots
from service.submission_rules.user_code import faults_of
from storage.code import CodeStore, look_at, read_members
from storage.errors import StorageNotFound

ANNEXED_FIELDS: Final = ("replay",)
"""Fields of a spec that annexes serve. A service without the annex refuses them."""


async def submitted(
    context: ApiContext,
    caller: Principal,
    raw: object,
    idempotency_key: str | None,
    *,
    create_project: bool = False,
) -> tuple[JsonObject, bool]:
    """Submit a run; return it, and whether it is new.

    Args:
        context: the service's context.
        caller: who submits.
        raw: the spec as received.
        idempotency_key: the client's key for the request.
        create_project: create a missing project; a caller's own project is always created.
    """
    spec, idempotency = await checked(context, caller, raw, idempotency_key)
    make = partial(
        context.runs.create,
        spec,
        caller.token_id,
        idempotency,
        create_project=create_project or caller.project is not None,
        owner=caller.owner or caller.name,
    )
    try:
        (run, transitions), is_new = await context.database_write(_made, context, make)
    except UnknownProject as exc:
        raise InvalidSpec((FieldError(("project",), str(exc)),)) from exc
    answer = run_json(
        run,
        transitions,
        context.ray_url,
        context.clock(),
        context.public_url,
        context.settings.prices,
    )
    return answer, is_new


async def checked(
    context: ApiContext,
    caller: Principal,
    raw: object,
    idempotency_key: str | None = None,
    *,
    keep: bool = True,
) -> tuple[RunSpec, IdempotencyKey | None]:
    """Return the spec in a request and its key, after every check but that of its project.

    Args:
        context: the service's context.
        caller: who submits.
        raw: the spec as received; without a project it gets the caller's.
        idempotency_key: the client's key for the request; the checkpoint that a known one starts
            from is not looked for again.
        keep: keep the checkpoint that the run starts from.

    Raises InvalidSpec with every fault.
    """
    caller.require("submitter")
    given = {"project": caller.project, **raw} if caller.project and isinstance(raw, dict) else raw
    spec = await validated(parse_spec, given)
    check_reaches(caller, spec.project)
    idempotency = idempotency_of(idempotency_key, caller, raw)
    is_known = spec.origin is not None and await context.database_call(
        context.runs.knows, idempotency
    )
    return await allowed(context, caller, spec, keep=keep, find_origin=not is_known), idempotency


async def allowed(
    context: ApiContext,
    caller: Principal,
    spec: RunSpec,
    *,
    keep: bool,
    find_origin: bool = True,
) -> RunSpec:
    """Return a valid spec with the checkpoint that it starts from, after the checks of what this
    service allows and has.

    Args:
        context: the service's context.
        caller: who submits.
        spec: the spec.
        keep: keep the checkpoint that the run starts from.
        find_origin: look for that checkpoint.

    Raises InvalidSpec with every fault.
    """
    faults: list[FieldError] = []
    with _gathered(faults):
        context.settings.pip_rule.check(spec)
    with _gathered(faults):
        _check_notify(context, spec)
    with _gathered(faults):
        StorageRoots(context.settings.storage_roots).check_data(spec)
    if spec.code is not None:
        with _gathered(faults):
            await check_code(context, caller, spec.project, spec.code)
    with _gathered(faults):
        await _check_annexed(context, spec)
    if spec.origin is not None and find_origin:
        with _gathered(faults):
            spec = await with_origin(context, spec, keep=keep and not faults)
    if faults:
        raise InvalidSpec(tuple(faults))
    return spec


def check_reaches(caller: Principal, project: str) -> None:
    """Raise 403 if the caller's token belongs to another project."""
    if not caller.reaches(project):
        raise ApiProblem(
            403,
            "forbidden",
            f"token {caller.name!r} belongs to project {caller.project!r}, not {project!r}",
        )


async def validated_spec(
    context: ApiContext, caller: Principal, raw: object, *, create_project: bool = False
) -> RunSpec:
    """Return the spec as it would be submitted. Nothing is recorded, and no checkpoint is kept."""
    spec, _ = await checked(context, caller, raw, keep=False)
    if not create_project and caller.project is None:
        try:
            await context.database_call(context.projects.require, spec.project)
        except UnknownProject as exc:
            raise InvalidSpec((FieldError(("project",), str(exc)),)) from exc
    return spec


@contextmanager
def _gathered(faults: list[FieldError]) -> Iterator[None]:
    """Collect faults, so that all are reported at once."""
    try:
        yield
    except InvalidSpec as exc:
        faults += exc.errors


async def _check_annexed(context: ApiContext, spec: RunSpec) -> None:
    """Check the fields that only annexes serve. Raises InvalidSpec."""
    checks = {name: check for annex in context.annexes for name, check in annex.spec_checks.items()}
    for name in ANNEXED_FIELDS:
        if getattr(spec, name) is None:
            continue
        if name not in checks:
            msg = f"this service has no {name}s; leave the field out"
            raise InvalidSpec((FieldError((name,), msg),))
        await checks[name](context, spec)


def _check_notify(context: ApiContext, spec: RunSpec) -> None:
    """Raise InvalidSpec if this service does not call the URL."""
    if spec.notify is not None and not context.settings.notify.allows(spec.notify.url):
        allowed = ", ".join(sorted(context.settings.notify.origins)) or "none"
        msg = f"its origin is not allowed; use one that the operator allows: {allowed}"
        raise InvalidSpec((FieldError(("notify", "url"), msg),))


def _made(
    context: ApiContext, make: Callable[[], tuple[RunRow, bool]]
) -> tuple[tuple[RunRow, Sequence[TransitionRow]], bool]:
    run, is_new = make()
    return (
        run,
        [first_transition(run)] if is_new else context.runs.transitions([run.id])[run.id],
    ), is_new


def idempotency_of(key: str | None, caller: Principal, raw: object) -> IdempotencyKey | None:
    """Return the identity of a request with a key. Raises 422 for a key that is not printable."""
    if key is None:
        return None
    if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        raise invalid_request("Idempotency-Key", msg="must be 1 to 255 printable ASCII characters")
    return IdempotencyKey(caller.token_id, key, content_sha256(raw))


# ---------------------------------------------------------------- code

# User code: uploads, and the checks when a run refers to one.

router: Final = ApiRouter("/v1/code", "code")

_one_check: Final = threading.Lock()
"""Check one archive at a time: the parser holds the interpreter lock most of the time."""

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
    check_reaches(caller, owner)
    data = await _read_file(request)
    await context.storage_call(context.storage_gate.require)
    found = await context.storage_call(look_at, data)
    # Record first: an upload above the limit leaves nothing behind, and an interrupted one is
    # simply repeated.
    await context.database_write(
        context.code_archives.record,
        owner,
        found.digest,
        found.size_bytes,
        caller.token_id,
        context.settings.max_code_bytes,
        create_project=create_project or caller.project is not None,
    )
    await context.storage_call(CodeStore(context.storage).keep, found, data)
    return CodeArchive(digest=found.digest, size_bytes=found.size_bytes, modules=found.modules)


async def check_code(context: ApiContext, caller: Principal, project: str, code: CodeSpec) -> None:
    """Check the code that a run of a project brings, without running any of it.

    An archive is one of the project's own; administrators, who reach all projects, may take any.
    Raises InvalidSpec with every fault that can be seen.
    """
    if caller.project is not None and not await context.database_call(
        context.code_archives.holds, project, code.archive
    ):
        raise InvalidSpec((_missing(project),))
    faults = await context.storage_call(_archive_faults, CodeStore(context.storage), project, code)
    if faults:
        raise InvalidSpec(tuple(faults))
    # members of the project may then use what an administrator submitted
    if caller.project is None:
        await context.database_write(
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
    """Return the form's ``file``. Raises 400, 415 or 422; ``BodyLimitMiddleware`` 413."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise ApiProblem(
            415,
            "unsupported_media_type",
            f"send the archive as multipart/form-data, field 'file', not {media_type[:80]!r}",
        )
    async with request.form(max_files=1, max_fields=8) as form:
        upload = form.get("file")
        if upload is None or isinstance(upload, str):
            raise invalid_request(
                "file", msg="is required: a zip or tar.gz archive as a file of the form"
            )
        return await upload.read()
