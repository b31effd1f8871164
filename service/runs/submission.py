"""Submit a run: check the spec and all that it refers to, then record it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Depends, Query, Request

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.code import CodeSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.wire import CodeArchive
from service.annex import Annexes
from service.api.answers import JsonObject
from service.api.auth import Submitter
from service.api.blocking import db_read, db_write, storage_call
from service.api.bodies import ApiRouter, content_sha256, validated
from service.api.callers import Principal
from service.api.dependencies import Archives, Events, Gate, Projects, TheSettings, TheStorage
from service.api.openapi import CreateProject, problem_answers
from service.api.problems import ApiProblem, invalid_request
from service.db.checkpoints import CodeArchives
from service.db.events import EventStore
from service.db.ids import IdempotencyKey
from service.db.projects import DEFAULT_PROJECT, ProjectStore, UnknownProject
from service.db.runs import first_transition
from service.model.run_rows import RunRow
from service.parts import ServiceParts, parts_of
from service.runs.origins import with_origin
from service.runs.views import RunViews, Views
from service.settings import Settings
from service.submission_rules.allowed import StorageRoots
from service.submission_rules.user_code import faults_of
from storage.code import CodeStore, look_at, read_members
from storage.errors import StorageNotFound
from storage.filesystem import Storage

ANNEXED_FIELDS: Final = ("notify", "replay")
"""Fields of a spec that annexes serve. A service without the annex refuses them."""


@dataclass(frozen=True)
class Submissions:
    """Checks specs, and records runs."""

    views: RunViews
    events: EventStore
    projects: ProjectStore
    archives: CodeArchives
    storage: Storage
    settings: Settings
    parts: ServiceParts
    """For the checks of annexes."""

    async def submit(
        self,
        caller: Principal,
        raw: object,
        idempotency_key: str | None,
        *,
        create_project: bool = False,
    ) -> tuple[JsonObject, bool]:
        """Submit a run; return it, and whether it is new.

        Args:
            caller: who submits.
            raw: the spec as received.
            idempotency_key: the client's key for the request.
            create_project: create a missing project; a caller's own project is always created.
        """
        spec, idempotency = await self._checked(caller, raw, idempotency_key)
        make = partial(
            self.views.runs.create,
            spec,
            caller.token_id,
            idempotency,
            create_project=create_project or caller.project is not None,
            owner=caller.owner or caller.name,
        )
        try:
            return await db_write(self._made, make)
        except UnknownProject as exc:
            raise InvalidSpec((FieldError(("project",), str(exc)),)) from exc

    async def validated(
        self, caller: Principal, raw: object, *, create_project: bool = False
    ) -> RunSpec:
        """Return the spec as it would be submitted. Nothing is recorded, and no checkpoint is
        kept."""
        spec, _ = await self._checked(caller, raw, keep=False)
        if not create_project and caller.project is None:
            try:
                await db_read(self.projects.require, spec.project)
            except UnknownProject as exc:
                raise InvalidSpec((FieldError(("project",), str(exc)),)) from exc
        return spec

    async def _checked(
        self,
        caller: Principal,
        raw: object,
        idempotency_key: str | None = None,
        *,
        keep: bool = True,
    ) -> tuple[RunSpec, IdempotencyKey | None]:
        """Return the spec in a request and its key, after every check but that of its project.

        Args:
            caller: who submits.
            raw: the spec as received; without a project it gets the caller's.
            idempotency_key: the client's key for the request; the checkpoint that a known one
                starts from is not looked for again.
            keep: keep the checkpoint that the run starts from.

        Raises InvalidSpec with every fault.
        """
        caller.require("submitter")
        given = (
            {"project": caller.project, **raw} if caller.project and isinstance(raw, dict) else raw
        )
        spec = await validated(parse_spec, given)
        check_reaches(caller, spec.project)
        idempotency = idempotency_of(idempotency_key, caller, raw)
        is_known = spec.origin is not None and await db_read(self.views.runs.knows, idempotency)
        return await self._allowed(caller, spec, keep=keep, find_origin=not is_known), idempotency

    async def _allowed(
        self, caller: Principal, spec: RunSpec, *, keep: bool, find_origin: bool
    ) -> RunSpec:
        """Return a valid spec with the checkpoint that it starts from, after the checks of what
        this service allows and has. Raises InvalidSpec with every fault."""
        faults: list[FieldError] = []
        with _gathered(faults):
            self.settings.pip_rule.check(spec)
        with _gathered(faults):
            StorageRoots(self.settings.storage_roots).check_data(spec)
        if spec.code is not None:
            with _gathered(faults):
                await self._check_code(caller, spec.project, spec.code)
        for name in ANNEXED_FIELDS:
            if getattr(spec, name) is not None:
                with _gathered(faults):
                    await self._check_annexed(spec, name)
        if spec.origin is not None and find_origin:
            with _gathered(faults):
                spec = await with_origin(
                    self.views.runs, self.events, self.storage, spec, keep=keep and not faults
                )
        if faults:
            raise InvalidSpec(tuple(faults))
        return spec

    async def _check_annexed(self, spec: RunSpec, name: str) -> None:
        """Check a field that only an annex serves. Raises InvalidSpec."""
        checks = [
            each.spec_checks[name] for each in self.parts[Annexes] if name in each.spec_checks
        ]
        if not checks:
            msg = f"this service does not serve {name}; leave the field out"
            raise InvalidSpec((FieldError((name,), msg),))
        for check in checks:
            await check(self.parts, spec)

    async def _check_code(self, caller: Principal, project: str, code: CodeSpec) -> None:
        """Check the code that a run of a project brings, without running any of it.

        An archive is one of the project's own; administrators, who reach all projects, may take
        any. Raises InvalidSpec with every fault that can be seen.
        """
        if caller.project is not None and not await db_read(
            self.archives.holds, project, code.archive
        ):
            raise InvalidSpec((_missing(project),))
        faults = await storage_call(_archive_faults, CodeStore(self.storage), project, code)
        if faults:
            raise InvalidSpec(tuple(faults))
        # members of the project may then use what an administrator submitted
        if caller.project is None:
            await db_write(self.archives.share, project, code.archive, caller.token_id)

    def _made(self, make: Callable[[], tuple[RunRow, bool]]) -> tuple[JsonObject, bool]:
        run, is_new = make()
        changes = (
            [first_transition(run)] if is_new else self.views.runs.transitions([run.id])[run.id]
        )
        return self.views.json(run, changes), is_new


async def submissions(
    request: Request,
    views: Views,
    events: Events,
    projects: Projects,
    archives: Archives,
    storage: TheStorage,
    settings: TheSettings,
) -> Submissions:
    return Submissions(views, events, projects, archives, storage, settings, parts_of(request))


TheSubmissions = Annotated[Submissions, Depends(submissions)]


def check_reaches(caller: Principal, project: str) -> None:
    """Raise 403 if the caller's token belongs to another project."""
    if not caller.reaches(project):
        raise ApiProblem(
            403,
            "forbidden",
            f"token {caller.name!r} belongs to project {caller.project!r}, not {project!r}",
        )


@contextmanager
def _gathered(faults: list[FieldError]) -> Iterator[None]:
    """Collect faults, so that all are reported at once."""
    try:
        yield
    except InvalidSpec as exc:
        faults += exc.errors


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
    archives: Archives,
    storage: TheStorage,
    gate: Gate,
    settings: TheSettings,
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
    await storage_call(gate.require)
    found = await storage_call(look_at, data)
    # Record first: an upload above the limit leaves nothing behind, and an interrupted one is
    # simply repeated.
    await db_write(
        archives.record,
        owner,
        found.digest,
        found.size_bytes,
        caller.token_id,
        settings.max_code_bytes,
        create_project=create_project or caller.project is not None,
    )
    await storage_call(CodeStore(storage).keep, found, data)
    return CodeArchive(digest=found.digest, size_bytes=found.size_bytes, modules=found.modules)


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
