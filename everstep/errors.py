"""Errors of SDK and CLI, and the table that maps the service's codes to them.

EverstepError
├── InvalidSpec          422  the request is invalid; .errors lists every fault
├── AuthError            401, 403
├── NotFound             404
├── Conflict             409  idempotency_conflict, invalid_transition, quota_exceeded
├── RateLimited          429
├── Unavailable          503, or the service cannot be reached
├── CorruptDownload      received bytes do not match size or digest
├── RunFailed            a run that was waited for ended FAILED or CANCELLED
├── WaitTimeout          a run did not end in time
├── UsageError           an unusable URL, token, file or option
└── ServiceError         any other response of the service
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.wire import Failure, Run


@dataclass(frozen=True)
class FieldError:
    """One fault of a request: ``loc`` is the path of keys and indices, ``msg`` the problem and the
    fix."""

    loc: tuple[str | int, ...]
    msg: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.loc)) or 'spec'}: {self.msg}"


class KeptWhole:
    """Of an error: it survives pickling with its attributes, whatever its constructor takes."""

    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[KeptWhole], args: tuple[Any, ...], state: dict[str, Any]) -> KeptWhole:
    """Unpickle without calling subclasses' constructors, whose arguments differ."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class EverstepError(KeptWhole, Exception):
    """Base class of every error that this package raises."""

    code = "error"
    status: int | None = None

    def __init__(self, message: str, *, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.status = status if status is not None else type(self).status


class InvalidSpec(EverstepError):
    code, status = "invalid_spec", 422

    def __init__(self, errors: tuple[FieldError, ...], message: str | None = None) -> None:
        super().__init__(message or "\n".join(map(str, errors)))
        self.errors = errors


class AuthError(EverstepError):
    code, status = "unauthorized", 401


class NotFound(EverstepError):
    code, status = "not_found", 404


class Conflict(EverstepError):
    code, status = "conflict", 409


class RateLimited(EverstepError):
    code, status = "rate_limited", 429


class Unavailable(EverstepError):
    code, status = "unavailable", 503


class CorruptDownload(EverstepError):
    code = "corrupt_download"


class ServiceError(EverstepError):
    code = "service_error"


class WaitTimeout(EverstepError):
    code = "wait_timeout"


class UsageError(EverstepError):
    code = "usage"


class RunFailed(EverstepError):
    """A run ended FAILED or CANCELLED. ``failure`` is its last recorded failure, if any."""

    code = "run_failed"

    def __init__(self, run: Run, failure: Failure | None = None) -> None:
        reason = f"{run.reason.code}: {run.reason.message}" if run.reason else "no reason given"
        super().__init__(f"run {run.id} ended {run.status}: {reason}")
        self.run = run
        self.failure = failure


CODES: Mapping[str, tuple[int, type[EverstepError]]] = MappingProxyType(
    {
        "unauthorized": (401, AuthError),
        "forbidden": (403, AuthError),
        "drills_disabled": (403, AuthError),
        "not_found": (404, NotFound),
        "conflict": (409, Conflict),
        "idempotency_conflict": (409, Conflict),
        "invalid_transition": (409, Conflict),
        "quota_exceeded": (409, Conflict),
        "checkpoint_deleted": (409, Conflict),
        "corrupt_checkpoint": (409, CorruptDownload),
        "range_not_satisfiable": (416, ServiceError),
        "invalid_spec": (422, InvalidSpec),
        "invalid_request": (422, InvalidSpec),
        "invalid_archive": (422, InvalidSpec),
        "rate_limited": (429, RateLimited),
        "internal_error": (500, ServiceError),
        "unavailable": (503, Unavailable),
        "database_unavailable": (503, Unavailable),
        "storage_unavailable": (503, Unavailable),
    }
)
"""Maps a problem's ``code`` to its HTTP status and to the error that the SDK raises."""

ERROR_BY_STATUS: Mapping[int, type[EverstepError]] = MappingProxyType(
    {
        401: AuthError,
        403: AuthError,
        404: NotFound,
        409: Conflict,
        422: InvalidSpec,
        429: RateLimited,
        502: Unavailable,
        503: Unavailable,
        504: Unavailable,
    }
)
"""Maps a status to an error, for codes that are not in CODES: from a newer service, or a proxy."""


def error_from_answer(
    status: int, code: str | None, message: str, errors: Iterable[FieldError] = ()
) -> EverstepError:
    """Return the error for a response of the service, by its code, else by its status."""
    _, kind = CODES.get(code or "", (status, ERROR_BY_STATUS.get(status, ServiceError)))
    if issubclass(kind, InvalidSpec):
        error: EverstepError = InvalidSpec(tuple(errors) or (FieldError((), message),))
        error.code, error.status = code or error.code, status
        return error
    return kind(message, code=code, status=status)
