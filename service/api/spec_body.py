"""Request bodies: read with limits, parsed strictly, and hashed for idempotency."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from everstep.errors import FieldError
from everstep.spec import plain_text
from everstep.spec.field_errors import few, field_errors
from service.api.problems import ProblemError

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

MAX_BODY_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 20_000
"""Maximum number of values in a body, including those in lists and mappings."""
_SMALL_BYTES: Final = 16 << 10
_validators: Final = ThreadPoolExecutor(2, "validate")
"""Few threads: validation holds the interpreter lock much of the time."""


async def validated(parse: Callable[[Any], T], raw: Any) -> T:
    """Run ``parse`` on a body in a thread and return its result: a large body takes time."""
    return await asyncio.get_running_loop().run_in_executor(_validators, parse, raw)


async def read_model(model: type[M], request: Request) -> M:
    """Return the request's body as ``model``. Raises 422 with one entry for each fault, and as
    ``read_json``."""
    return await validated(partial(parse_model, model), await read_json(request))


def optional_body(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a dependency that reads the request's body as ``read_model``; without a body, or
    with ``null``, it is the model's defaults.

    FastAPI would parse a body that is a parameter before it looks at the caller.
    """

    async def read(request: Request) -> M:
        body = await _read_limited(request)
        if not body.strip():
            return model()
        _check_content_type(request.headers.get("content-type"))
        raw = await _json_value(body)
        return await validated(partial(parse_model, model), {} if raw is None else raw)

    return read


def parse_model(model: type[M], raw: Any) -> M:
    """Return a JSON value as ``model``. Raises 422 with one entry for each fault."""
    try:
        found = model.model_validate(raw)
    except ValidationError as exc:
        raise _invalid(field_errors(model, raw, exc)) from exc
    if faults := plain_text.faults(raw):
        raise _invalid(few(faults))
    return found


def _invalid(faults: Sequence[FieldError]) -> ProblemError:
    return ProblemError(422, "invalid_request", "; ".join(map(str, faults)), errors=faults)


async def read_json(request: Request) -> Any:
    """Return the request's JSON value.

    NaN and Infinity pass: the spec's own check names their field. Raises 400, 413 or 415.
    """
    _check_content_type(request.headers.get("content-type"))
    return await _json_value(await _read_limited(request))


async def _json_value(body: bytes) -> Any:
    try:
        value = await validated(_parsed, body) if len(body) > _SMALL_BYTES else _parsed(body)
    except RecursionError as exc:
        raise _too_deep() from exc
    except UnicodeDecodeError as exc:
        raise ProblemError(
            400, "malformed_json", f"the body is not UTF-8: {exc.reason} at byte {exc.start}"
        ) from exc
    except ValueError as exc:
        raise ProblemError(400, "malformed_json", f"the body is not JSON: {exc}") from exc
    return value


def _parsed(body: bytes) -> Any:
    value = json.loads(body.decode())
    check_shape(value)
    return value


def content_sha256(value: Any) -> str:
    """Return a hash of a JSON value, independent of spacing and the order of keys."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _check_content_type(content_type: str | None) -> None:
    media_type = (content_type or "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ProblemError(
            415,
            "unsupported_media_type",
            f"send the body as application/json, not {media_type[:80]!r}",
        )


async def _read_limited(request: Request) -> bytes:
    """Return the body, holding no more than the limit in memory."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ProblemError(
                413, "body_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes; send less"
            )
    return bytes(body)


def check_shape(value: Any) -> int:
    """Return the number of values in a body. Raise 400 if it is nested too deeply, 413 if it has
    too many of them.

    Validation time depends on the number of values, so a limit on the body's size is not enough.
    """
    level, num_values = [value], 1
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            if isinstance(node, dict | list)
            for item in (node.values() if isinstance(node, dict) else node)
        ]
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise ProblemError(
                413, "body_too_large", f"the body has more than {MAX_VALUES} values; send fewer"
            )
        if not level:
            return num_values
    raise _too_deep()


def _too_deep() -> ProblemError:
    return ProblemError(400, "too_deep", f"the body is nested more than {MAX_DEPTH} levels deep")
