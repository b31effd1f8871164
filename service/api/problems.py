"""Errors as RFC 9457 responses: one place maps every exception to a status, a code and a
message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from everstep.errors import FieldError, InvalidSpec
from service.db.engine import DatabaseError, DatabaseUnavailable, StateConflict, Unstorable
from service.db.ids import IdempotencyConflict
from service.db.projects import ProjectInUse, QuotaExceeded, UnknownProject
from service.model.states import StateError, TransitionConflict
from storage.errors import CorruptCheckpoint, InvalidArchive, StorageError, StorageNotFound

logger = structlog.get_logger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 2
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")


class ApiProblem(Exception):
    """A request that cannot be served, as the client will see it."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})


def not_found(detail: str) -> ApiProblem:
    return ApiProblem(404, "not_found", detail)


def unavailable(code: str, detail: str) -> ApiProblem:
    return ApiProblem(503, code, detail, headers={"Retry-After": str(RETRY_AFTER_S)})


def invalid_request(*loc: str | int, msg: str) -> ApiProblem:
    return ApiProblem(
        422, "invalid_request", f"{'.'.join(map(str, loc))}: {msg}", errors=[FieldError(loc, msg)]
    )


def problem_response(problem: ApiProblem) -> Response:
    """Return the response. It is ASCII: the request may have contained text that UTF-8 cannot
    represent."""
    body: dict[str, Any] = {
        "type": f"urn:everstep:problem:{problem.code}",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
        "errors": [{"loc": list(error.loc), "msg": error.msg} for error in problem.errors],
    }
    return Response(json.dumps(body), problem.status, problem.headers, media_type=MEDIA_TYPE)


def as_problem(exc: Exception) -> ApiProblem:
    """Return the problem for an exception. Internal errors are logged and become
    ``internal_error``."""
    match exc:
        case ApiProblem():
            return exc
        case InvalidSpec(errors=errors):
            return ApiProblem(
                422,
                "invalid_spec",
                f"the spec has {len(errors)} fault(s); fix those in errors",
                errors=errors,
            )
        case TransitionConflict(found=None):
            return not_found(f"run {exc.run_id} does not exist")
        case TransitionConflict() | StateConflict():
            return ApiProblem(409, "invalid_transition", str(exc))
        case QuotaExceeded():
            return ApiProblem(409, "quota_exceeded", str(exc))
        case UnknownProject():
            return invalid_request("project", msg=str(exc))
        case ProjectInUse():
            return ApiProblem(409, "conflict", str(exc))
        case IdempotencyConflict():
            return ApiProblem(409, "idempotency_conflict", str(exc))
        case DatabaseUnavailable():
            logger.error("database_unavailable", error=str(exc))
            return unavailable(
                "database_unavailable",
                "the database does not respond; nothing was changed, try again",
            )
        case Unstorable():
            return ApiProblem(
                422, "invalid_request", f"the request contains a value that cannot be stored: {exc}"
            )
        case StorageNotFound():
            return not_found(str(exc))
        case InvalidArchive():
            return ApiProblem(
                422, "invalid_archive", str(exc), errors=[FieldError(("file",), str(exc))]
            )
        case CorruptCheckpoint():
            return ApiProblem(409, "corrupt_checkpoint", str(exc))
        case StorageError():
            logger.error("storage_unavailable", error=str(exc))
            return unavailable("storage_unavailable", str(exc))
        case RequestValidationError():
            faults = [
                FieldError(tuple(error["loc"][1:]) or tuple(error["loc"]), error["msg"])
                for error in exc.errors()
            ]
            return ApiProblem(422, "invalid_request", "; ".join(map(str, faults)), errors=faults)
        case HTTPException(status_code=413):
            return ApiProblem(413, "body_too_large", str(exc.detail))
        case HTTPException(status_code=400):
            return ApiProblem(400, "malformed_json", str(exc.detail))
        case HTTPException():
            code = HTTPStatus(exc.status_code).phrase.lower().replace(" ", "_").replace("-", "_")
            return ApiProblem(exc.status_code, code, str(exc.detail), headers=exc.headers)
        case ClientDisconnect():
            return ApiProblem(
                400,
                "client_disconnected",
                "the client disconnected before the request was complete",
            )
        case _:
            return ApiProblem(500, "internal_error", "the service failed; read its log")


def problem_of_request(request: Request, exc: Exception) -> ApiProblem:
    """Return the problem for an exception. A path that no route serves is named: it may be one of
    an annex that this service does not have. A method that a path does not take is answered with
    those that it takes, over all routes: the framework names those of one."""
    problem = as_problem(exc)
    if isinstance(exc, HTTPException) and problem.status == HTTPStatus.NOT_FOUND:
        problem.detail = f"this service does not have {request.url.path[:200]}"
    if problem.status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(allowed_methods(request))
        problem.headers["Allow"] = allowed
        problem.detail = f"{request.url.path[:200]} does not take {request.method}; use {allowed}"
    return problem


def allowed_methods(request: Request) -> list[str]:
    """Return the methods that the path of a request takes."""
    found = {
        method
        for method in _METHODS
        for route in request.app.router.routes
        if route.matches({**request.scope, "method": method})[0] is Match.FULL
    }
    return sorted(found | {"HEAD"} if "GET" in found else found)


_HANDLED: Final[tuple[type[Exception], ...]] = (
    ApiProblem,
    InvalidSpec,
    StateError,
    DatabaseError,
    Unstorable,
    StorageError,
    RequestValidationError,
    HTTPException,
    ClientDisconnect,
    Exception,
)


def install(app: FastAPI) -> None:
    """Turn every exception that leaves a handler into a problem response."""

    async def handle(request: Request, exc: Exception) -> Response:
        return problem_response(problem_of_request(request, exc))

    for exception in _HANDLED:
        app.add_exception_handler(exception, handle)
