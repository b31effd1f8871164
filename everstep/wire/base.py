"""Types that all answers share: times, pages and problems."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema


def format_time(value: datetime) -> str:
    """Return a time as RFC 3339 in UTC with milliseconds: ``2026-01-02T03:04:05.678Z``."""
    return (
        (value if value.tzinfo is UTC else value.astimezone(UTC))
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


Time = Annotated[
    AwareDatetime,
    PlainSerializer(format_time, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class Answer(BaseModel):
    """Base of all answers. Immutable; unknown fields are ignored, so that an older client can read
    a newer service."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


T = TypeVar("T")


class ReadsNewer:
    """Marks an enumeration in an answer: see ``Open``."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(partial(_newer, kind), handler(kind))


def _newer(kind: Any, value: object, known: ValidatorFunctionWrapHandler) -> object:
    try:
        return known(value)
    except ValidationError:
        if type(value) is not str:
            raise
    if not (isinstance(kind, type) and issubclass(kind, StrEnum)):
        return value
    other = str.__new__(kind, value)
    other._name_ = other._value_ = value
    return other


Open = Annotated[T, ReadsNewer()]
"""An enumeration in an answer, ``Open[RunStatus]``. A value that only a newer service knows is
read as it is, so that an older client can read the rest. Requests stay strict."""


class ProblemError(Answer):
    loc: tuple[str | int, ...]
    msg: str


class Problem(Answer):
    """RFC 9457 answer to a request that failed."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: tuple[ProblemError, ...] = ()


class Page(Answer, Generic[T]):
    items: tuple[T, ...]
    next_cursor: str | None
    """Pass it as ``cursor`` for the next page; null on the last."""


# ---------------------------------------------------------------- relative names

# Check relative file names: one rule for manifests, code archives and downloads.

_MAX_PATH_BYTES = 1024
_MAX_PART_BYTES = 255


def fault_of(name: str) -> str | None:
    """Return what is wrong with a relative file name that uses ``/``; None if it is safe.

    >>> fault_of("ranks/model-0.pt")
    >>> fault_of("../../other/spec.json")
    "leads out of its directory: use a relative name without '.' and '..'"
    """
    parts = name.split("/")
    if name.startswith("/") or ".." in name.replace("\\", "/").split("/"):
        return "leads out of its directory: use a relative name without '.' and '..'"
    if "" in parts or "." in parts:
        return "is not a plain relative name: use one without '.', '//' and a trailing '/'"
    if "\\" in name or "\0" in name:
        return "contains a backslash or a NUL: use a name without"
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "cannot be encoded as UTF-8: use another name"
    if max(sizes) > _MAX_PART_BYTES or sum(sizes) + len(sizes) - 1 > _MAX_PATH_BYTES:
        return (
            f"exceeds {_MAX_PATH_BYTES} bytes, or one of its parts {_MAX_PART_BYTES}: use a "
            "shorter name"
        )
    return None
