"""Requests and answers of the API's routes: who asks, bodies in JSON, parts of files, streams."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.lowlevel
from fastapi import APIRouter, Body, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute, get_request_handler
from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema
from starlette.concurrency import iterate_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.errors import FieldError
from everstep.spec import plain_text
from everstep.spec.parsing import few, field_errors
from everstep.text.words import closest
from service.api.auth import authenticated, bearer
from service.api.problems import ApiProblem

if TYPE_CHECKING:
    from service.api.callers import Principal
    from service.api.streams import Followers
    from storage.run_dir import RunDir

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


def parse_model(model: type[M], raw: Any) -> M:
    """Return a JSON value as ``model``. Raises 422 with one entry for each fault."""
    try:
        found = model.model_validate(raw)
    except ValidationError as exc:
        raise _invalid(field_errors(model, raw, exc)) from exc
    if faults := plain_text.faults(raw):
        raise _invalid(few(faults))
    return found


def _invalid(faults: Sequence[FieldError]) -> ApiProblem:
    return ApiProblem(422, "invalid_request", "; ".join(map(str, faults)), errors=faults)


# ---------------------------------------------------------------- routes

# FastAPI reads a body before it calls dependencies. A request is answered 401, then 403 and 404,
# then what is wrong with its body, so the dependencies are called once more, before.

_OF_LISTS: Final = {"limit", "cursor"}
"""Parameters that clients send with every list, also with one that is always a single page."""


class ApiRoute(APIRoute):
    """A route of the API: its caller has a token, unless the route needs none; its query has no
    unknown parameters; its body is JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        needs_token = any(each is bearer for each in _calls(self.dependant))
        has_body = self.body_field is not None
        allow = get_request_handler(replace(self.dependant, call=_allowed, body_params=[]))

        async def checked(request: Request) -> Response:
            if needs_token:
                await authenticated(request)
            if request.scope["query_string"]:
                _refuse_unknown_query(request, self.dependant)
            if has_body:
                await allow(request)
                request = JsonRequest(request)
                await request.read()
            return await handle(request)

        return checked


async def _allowed(**_dependencies: object) -> Response:
    return Response()


class ApiRouter(APIRouter):
    """Routes of the API under one prefix and tag."""

    def __init__(self, prefix: str, tag: str) -> None:
        super().__init__(prefix=prefix, tags=[tag], route_class=ApiRoute)


class JsonRequest(Request):
    """A request whose body is JSON."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.scope, request.receive)
        self._is_required = request.scope["route"].body_field.field_info.is_required()
        self._media_type = request.headers.get("content-type")
        # FastAPI calls ``json`` for this type only
        kept = [each for each in request.headers.raw if each[0] != b"content-type"]
        self._headers = Headers(raw=[*kept, (b"content-type", b"application/json")])
        self._value: Any = None

    async def read(self) -> None:
        """Read everything. Raises 400, 413 or 415."""
        body = await super().body()
        if body.strip() or self._is_required:
            _check_media_type(self._media_type)
            is_small = len(body) <= _SMALL_BYTES
            self._value = _parsed(body) if is_small else await validated(_parsed, body)
        if self._value is None and self._is_required:
            self._value = []  # ``null`` is no object, and to FastAPI it is no body

    async def body(self) -> bytes:
        return b"" if self._value is None else b"."

    async def json(self) -> Any:
        return self._value


class Parsed:
    """Marks a body that is checked as its type: ``Annotated[DrillRequest, Parsed(), Body()]``."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda raw, _: parse_model(kind, raw), handler(kind)
        )


class AsWritten:
    """Marks a body that the route checks itself, and only documents as its type."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(lambda raw, _: raw, handler(kind))


def example(value: dict[str, Any]) -> Any:
    """Return FastAPI's declaration of a body with this example."""
    return Body(openapi_examples={"example": {"value": value}})


def _parsed(body: bytes) -> Any:
    """Return the JSON value. NaN and Infinity pass: the spec's own check names their field."""
    try:
        value = json.loads(body.decode())
        check_shape(value)
    except RecursionError as exc:
        raise _too_deep() from exc
    except UnicodeDecodeError as exc:
        detail = f"the body is not UTF-8: {exc.reason} at byte {exc.start}"
        raise ApiProblem(400, "malformed_json", detail) from exc
    except ValueError as exc:
        raise ApiProblem(400, "malformed_json", f"the body is not JSON: {exc}") from exc
    return value


def content_sha256(value: Any) -> str:
    """Return a hash of a JSON value, independent of spacing and the order of keys."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _check_media_type(content_type: str | None) -> None:
    media_type = (content_type or "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ApiProblem(
            415,
            "unsupported_media_type",
            f"send the body as application/json, not {media_type[:80]!r}",
        )


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
            raise ApiProblem(
                413, "body_too_large", f"the body has more than {MAX_VALUES} values; send fewer"
            )
        if not level:
            return num_values
    raise _too_deep()


def _too_deep() -> ApiProblem:
    return ApiProblem(400, "too_deep", f"the body is nested more than {MAX_DEPTH} levels deep")


def _refuse_unknown_query(request: Request, dependant: Dependant) -> None:
    """Raise 422 for a query parameter that the route does not have: a typing error would otherwise
    look like a filter that matches everything."""
    names = set(_query_names(dependant))
    known = sorted(names)
    if request.method == "GET":
        names |= _OF_LISTS
    faults = [
        FieldError((name,), _unknown(name, known))
        for name in request.query_params
        if name not in names
    ]
    if faults:
        raise _invalid(faults)


def _unknown(name: str, known: list[str]) -> str:
    if not known:
        return "is not a query parameter of this route, which has none; remove it"
    close = closest(name, known)
    hint = f"did you mean {close}?" if close else f"use {', '.join(known)}"
    return f"is not a query parameter of this route; {hint}"


def _calls(dependant: Dependant) -> Iterator[object]:
    for each in dependant.dependencies:
        yield each.call
        yield from _calls(each)


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for each in dependant.dependencies:
        yield from _query_names(each)


# ---------------------------------------------------------------- head

# HEAD as GET, without the body.

_RELAYED: Final = "/ray/"
"""Paths whose HEAD is passed on to Ray, which answers it itself."""


class HeadMiddleware:
    """Answers HEAD as GET, without the body. Nothing is read of a body that is streamed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "HEAD"
            or scope["path"].startswith(_RELAYED)
        ):
            await self._app(scope, receive, send)
            return
        with anyio.CancelScope() as answered:

            async def send_head(message: Message) -> None:
                await send(message)
                if message["type"] == "http.response.start":
                    await send({"type": "http.response.body", "body": b""})
                    answered.cancel()
                    await anyio.lowlevel.checkpoint()

            await self._app({**scope, "method": "GET"}, receive, send_head)


# ---------------------------------------------------------------- byte range

# The ``Range`` header for a single range of bytes (RFC 9110, section 14).

_ONE_RANGE: Final = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", re.IGNORECASE)


def requested_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return (first byte, byte after the last) of the requested range.

    None means everything: no header, another unit, several ranges or an invalid one, all of which a
    server may ignore. Raises 416 if the range contains no byte of the content.
    """
    match = _ONE_RANGE.fullmatch(header or "")
    if match is None or match[0].strip().endswith("=-"):
        return None
    first, last = match[1], match[2]
    if first and last and int(first) > int(last):
        return None
    begin = int(first) if first else max(0, size_bytes - int(last))
    end = min(int(last) + 1, size_bytes) if first and last else size_bytes
    if begin >= size_bytes or (not first and not int(last)):
        raise ApiProblem(
            416,
            "range_not_satisfiable",
            f"Range {header!r} contains no byte of the archive, which has {size_bytes} bytes",
            headers={"Content-Range": f"bytes */{size_bytes}"},
        )
    return begin, end


# ---------------------------------------------------------------- byte stream

# Files as streamed responses.

_BLOCK_BYTES: Final = 1 << 20


def blocks_of(run_dir: RunDir, path: str, offset: int = 0) -> Iterator[bytes]:
    """Yield a file of a run from an offset on."""
    with run_dir.files.open_read(path, offset) as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def begun(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the same blocks, with the first already read: a missing file then becomes an error
    response, not a broken download."""
    return chain((next(blocks, b""),), blocks)


def download(
    followers: Followers,
    caller: Principal,
    blocks: Iterator[bytes],
    media_type: str,
    headers: Mapping[str, str] | None = None,
    status: int = 200,
) -> StreamingResponse:
    """Return the blocks as a response that ends when the caller's token or session does."""
    confirmed = followers.confirmed(caller, _in_threads(blocks))
    return StreamingResponse(confirmed, status, headers, media_type)


async def _in_threads(blocks: Iterator[bytes]) -> AsyncGenerator[bytes]:
    async for block in iterate_in_threadpool(blocks):
        yield block
