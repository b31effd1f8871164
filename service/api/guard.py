"""Who may enter: limits of a request, sessions of browsers, and the origins that may use them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import structlog
from fastapi import APIRouter, HTTPException, Path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import ResumeFrom
from everstep.wire import Checkpoint, Page
from everstep.wire.team import Session
from service.api.answers import Cursor, Limit, page_of, to_time
from service.api.auth import Caller, Principal
from service.api.bodies import MAX_BODY_BYTES
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.api.problems import ProblemError, not_found, problem_response
from service.db.audit import AuditEntry, begin_entry
from service.db.errors import DatabaseError
from service.db.sessions import Holder
from service.model.rows import SessionRow
from service.model.run_rows import RunRow
from service.projections import checkpoints
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint, StorageNotFound
from storage.run_dir import RunDir

logger = structlog.get_logger(__name__)

UPLOAD_PATHS: Final = frozenset({"/v1/code"})
"""Routes for uploads, which have their own limit."""
_HOST: Final = re.compile(rb"([A-Za-z0-9._~%-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{0,5})?")
_FAULTS_OF_OURS: Final = 500
"""Statuses from here on are faults of the service."""
_LOOKS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_CHECKS: Final = frozenset({"/new/check", "/new/field"})
"""Paths of the page's editor, which asks with every pause in typing and changes nothing."""


class AddressMiddleware:
    """Responds 400 to a request with an invalid Host header or query.

    Starlette parses both wherever it needs the URL, for example for a redirect, and raises
    ValueError for unbalanced brackets or invalid bytes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = _address_problem(scope) if scope["type"] == "http" else None
        if problem is not None:
            await problem_response(problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _address_problem(scope: Scope) -> ProblemError | None:
    if any(name == b"host" and not _HOST.fullmatch(value) for name, value in scope["headers"]):
        return ProblemError(
            400, "malformed_host", "the Host header is invalid; send HOST or HOST:PORT"
        )
    if not scope["query_string"].isascii():
        return ProblemError(
            400, "malformed_query", "the query contains bytes beyond ASCII; write them as %XX"
        )
    return None


class BodyLimitMiddleware:
    """Reads no body beyond its limit, whatever the headers say."""

    def __init__(self, app: ASGIApp, max_upload_bytes: int) -> None:
        self._app = app
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = (
            self._max_upload_bytes if scope["path"].rstrip("/") in UPLOAD_PATHS else MAX_BODY_BYTES
        )
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                # the only kind of error that FastAPI passes on while it reads a body
                raise HTTPException(413, f"the body is larger than {limit} bytes; send less")
            return message

        await self._app(scope, limited_receive, send)


class AuditMiddleware:
    """Adds every call that may change something to the audit log.

    A change writes its entry in the same transaction. A call without a change, mostly a refused
    one, gets its entry before its response, and an entry whose target or status came out otherwise
    is corrected before it: whoever has a response finds it in the log. Failures of the service
    itself, such as an unavailable database, are answered first. Calls without a valid token or
    above the rate limit only go to the service's own log: anybody could fill the audit log with
    them.
    """

    def __init__(self, app: ASGIApp, context: ApiContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_look = scope["type"] == "http" and (
            scope["method"] in _LOOKS or scope["path"] in _CHECKS
        )
        if scope["type"] != "http" or is_look:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        entry = AuditEntry(scope["method"], scope["path"], client[0] if client else None)
        recorded = False

        def is_unrecorded() -> bool:
            return entry.seq is None or entry.written_as != (entry.target, entry.status)

        async def noting_send(message: Message) -> None:
            nonlocal recorded
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                if entry.status < _FAULTS_OF_OURS and is_unrecorded():
                    recorded = True
                    await self._record(entry)
            await send(message)

        begin_entry(entry)
        try:
            await self._app(scope, receive, noting_send)
        except BaseException:
            entry.status = 500
            raise
        finally:
            begin_entry(None)
            if not recorded and is_unrecorded():
                await self._record(entry)

    async def _record(self, entry: AuditEntry) -> None:
        begin_entry(None)  # the following write is the log's own
        words = {
            "method": entry.method,
            "path": entry.path,
            "address": entry.address,
            "status": entry.status,
        }
        if entry.token_id is None:
            logger.info("call refused", **words)
            return
        try:
            await self._context.database_call(self._context.audit.complete, entry)
        except DatabaseError as exc:
            logger.warning(
                "audit entry lost",
                token=entry.token_id,
                problem=str(exc),
                **words,
            )


# ---------------------------------------------------------------- sessions

# Routes of browser sessions: a caller's own, and for administrators everybody's.

router: Final = APIRouter(prefix="/v1", tags=["administration"])

SessionPath = Annotated[str, Path(max_length=32, description="The session's id: `ses_…`.")]


def _reached(caller: Principal) -> Holder | None:
    """Return whose sessions the caller reaches; None for everybody's."""
    return None if caller.may("admin") else caller.holder


@router.get("/sessions", summary="Log-ins of browsers", responses=problem_answers(422))
async def list_sessions(
    caller: Caller, context: Context, limit: Limit = 50, cursor: Cursor = None
) -> Page[Session]:
    """Sessions that have not ended, newest first: the caller's own, or everybody's for an
    administrator. A user's own are those of all their log-ins."""
    found = await context.database_call(context.sessions.valid, _reached(caller))
    shown, behind = page_of(found, lambda row: (-row.created_at, row.sha256), cursor, limit)
    return Page(items=tuple(map(_session_answer, shown)), next_cursor=behind)


@router.delete(
    "/sessions/{session_id}",
    status_code=204,
    summary="End a session",
    responses=problem_answers(404, 422),
)
async def revoke_session(caller: Caller, session_id: SessionPath, context: Context) -> None:
    """Effective on every replica as soon as this returns."""
    if not await context.database_call(context.sessions.end_by_id, session_id, _reached(caller)):
        raise not_found(f"session {session_id} does not exist, or has ended")


def _session_answer(row: SessionRow) -> Session:
    return Session(
        id=row.id,
        name=row.name,
        role=row.role,
        project=row.project,
        created_at=to_time(row.created_at),
        expires_at=to_time(row.expires_at),
        address=row.address,
        browser=row.browser,
    )


# ---------------------------------------------------------------- origins

# ``resume_from``: resolve and hold the checkpoint of another run before the new run is
# recorded.

_SAME: Final = (
    ("train", "global_batch_size"),
    ("train", "seed"),
    ("optimizer", "name"),
    ("task", "data", "name"),
)
"""Fields that must be equal in both specs, so that the position in the data and the optimizer's
moments stay valid."""


@dataclass
class Origins:
    """Checkpoints that the runs of one request begin from. Each is looked up and held once, so
    that the runs of a sweep begin from the same ``latest``."""

    found: dict[tuple[str, ResumeFrom], tuple[RunRow, Checkpoint] | InvalidSpec] = field(
        default_factory=dict
    )
    """The run and its checkpoint, or the error, for each project and ``resume_from``."""
    held: set[tuple[str, int]] = field(default_factory=set)
    """Runs and steps."""


async def with_origin(
    context: ApiContext, spec: RunSpec, origins: Origins, *, keep: bool
) -> RunSpec:
    """Return the spec with ``latest`` or ``best`` resolved, and protect the checkpoint from
    retention until the run has its own.

    Args:
        context: the service's context.
        spec: the spec.
        origins: what was looked up for other runs of the request.
        keep: False does not protect it, because the run will be refused.

    Whether the model fits is only known when a rank builds it. Raises InvalidSpec with the field,
    StorageError.
    """
    wanted = spec.origin
    if wanted is None:
        return spec
    place = ("resume_from", "step") if spec.resume_from is not None else ("replay", "from_step")
    key = (spec.project, wanted)
    if key not in origins.found:
        try:
            origins.found[key] = await _found(context, spec.project, wanted, place)
        except InvalidSpec as exc:
            origins.found[key] = exc
    found = origins.found[key]
    if isinstance(found, InvalidSpec):
        raise found
    parent, checkpoint = found
    faults = [*_differences(spec, parent), *_nothing_left(spec, parent, checkpoint.step)]
    if faults:
        raise InvalidSpec(tuple(faults))
    if keep and (parent.id, checkpoint.step) not in origins.held:
        await context.storage_call(_hold, place, context, parent.id, checkpoint)
        origins.held.add((parent.id, checkpoint.step))
    if spec.resume_from is None:
        return spec
    exact = wanted.model_copy(update={"step": checkpoint.step})
    return spec.model_copy(update={"resume_from": exact})


async def _found(
    context: ApiContext, project: str, wanted: ResumeFrom, place: tuple[str, str]
) -> tuple[RunRow, Checkpoint]:
    """Return the run and its checkpoint. Raises InvalidSpec at ``place``."""
    parent = await context.database_call(context.runs.get, wanted.run_id)
    if parent is None or parent.project != project:
        raise _fault(
            (place[0], "run_id"), f"run {wanted.run_id} does not exist in project {project!r}"
        )
    events = await context.database_call(context.events.of_kinds, parent.id, checkpoints.KINDS)
    checks = await context.database_call(context.events.checkpoint_checks, parent.id)
    found = checkpoints.checkpoints(events, checks)
    checkpoint, missing = checkpoints.choose(
        found, parent.id, parent.stored_spec.checkpoint, str(wanted.step)
    )
    _check_usable(place, checkpoint, missing, found)
    assert checkpoint is not None
    return parent, checkpoint


def _fault(place: tuple[str, str], msg: str) -> InvalidSpec:
    return InvalidSpec((FieldError(place, msg),))


def _check_usable(
    place: tuple[str, str],
    checkpoint: Checkpoint | None,
    missing: str,
    found: Sequence[Checkpoint],
) -> None:
    """Raise InvalidSpec with the checkpoints that exist, if this one cannot be used."""
    kept = sorted({each.step for each in found if each.state == "committed"})
    instead = (
        f"; choose one of steps {', '.join(map(str, kept[-10:]))}"
        if kept
        else "; the run has no checkpoint to start from"
    )
    if checkpoint is None:
        raise _fault(place, f"{missing}{instead}")
    if checkpoint.state == "deleted":
        raise _fault(
            place, f"the checkpoint of step {checkpoint.step} was deleted by retention{instead}"
        )
    if checkpoint.state == "corrupt":
        raise _fault(
            place,
            f"the checkpoint of step {checkpoint.step} is corrupt: {checkpoint.problem}{instead}",
        )


def _differences(spec: RunSpec, parent: RunRow) -> list[FieldError]:
    """Return the fields that differ between the runs and must not."""
    own = spec.model_dump(mode="json")
    faults = []
    for path in _SAME:
        there, here = _at(parent.spec, path), _at(own, path)
        if there is not None and here is not None and there != here:
            msg = (
                f"must be {there!r}, as in run {parent.id}, whose position in the data and "
                "optimizer state this run continues"
            )
            faults.append(FieldError(path, msg))
    named, wanted = (_patterns(each) for each in (parent.spec, own))
    if named != wanted:
        msg = (
            f"must list {named} in this order, as in run {parent.id}, whose optimizer state this "
            "run continues; other fields may change"
        )
        faults.append(FieldError(("optimizer", "groups"), msg))
    return faults


def _patterns(spec: Any) -> list[str]:
    return [group["parameters"] for group in _at(spec, ("optimizer", "groups")) or ()]


def _at(node: Any, path: Sequence[str]) -> Any:
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _nothing_left(spec: RunSpec, parent: RunRow, step: int) -> list[FieldError]:
    """Return a fault if the run would end before its first step."""
    if not parent.steps_per_epoch:
        return []
    by_epochs = spec.train.epochs * parent.steps_per_epoch
    total = min(by_epochs, spec.train.max_steps or by_epochs)
    if step < total:
        return []
    field = "epochs" if total == by_epochs else "max_steps"
    return [
        FieldError(
            ("train", field),
            f"ends the run at step {total}, but its checkpoint already has {step} steps; raise it",
        )
    ]


def _hold(place: tuple[str, str], context: ApiContext, run_id: str, checkpoint: Checkpoint) -> None:
    """Protect the checkpoint, then check that it exists. In this order retention cannot delete it
    unnoticed."""
    context.kept_steps.hold(run_id, checkpoint.step)
    try:
        CheckpointStore(RunDir(context.storage, run_id)).manifest(checkpoint.name)
    except StorageNotFound:
        raise _fault(
            place,
            (
                f"the checkpoint of step {checkpoint.step} was just deleted by retention; choose a "
                "newer one"
            ),
        ) from None
    except CorruptCheckpoint as exc:
        raise _fault(place, f"the checkpoint of step {checkpoint.step} is corrupt: {exc}") from exc
