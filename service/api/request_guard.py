"""Around every request: how large its body may be, and its line in the audit log."""

from __future__ import annotations

import re
from typing import Final

import structlog
from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.context import ApiContext
from service.api.problems import ProblemError, problem_response
from service.api.spec_body import MAX_BODY_BYTES
from service.db.audit import AuditEntry, begin_entry
from service.db.errors import DatabaseError

logger = structlog.get_logger(__name__)

UPLOAD_PATHS: Final = frozenset({"/v1/code"})
"""Routes that take files: they have a limit of their own."""
_HOST: Final = re.compile(rb"([A-Za-z0-9._~%-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{0,5})?")
_FAULTS_OF_OURS: Final = 500
"""Statuses from here on."""
_LOOKS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


class AddressMiddleware:
    """Answer 400 to a request whose address cannot be put together.

    The framework does that of the Host header and the query wherever the address is asked for, as
    for a redirect, and raises ValueError where one holds half of a bracket or bytes that are no
    text.
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
            400, "malformed_host", "the Host header is no host; send HOST or HOST:PORT"
        )
    if not scope["query_string"].isascii():
        return ProblemError(
            400, "malformed_query", "the query holds bytes beyond ASCII; write them as %XX"
        )
    return None


class BodyLimitMiddleware:
    """No request's body is read beyond its limit, whatever its headers promise."""

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
                # FastAPI lets errors of this kind alone pass while it reads a body.
                raise HTTPException(413, f"the body is larger than {limit} bytes")
            return message

        await self._app(scope, limited_receive, send)


class AuditMiddleware:
    """Every call that may change something gets a line in the audit log.

    What a call writes takes its line along in the same transaction; a call that wrote nothing,
    mostly because it was refused, gets one before its answer, so that the log's order is that of
    the answers. A fault of the service's own, mostly a database that is away, is answered first.
    Calls that are not let in, without a valid token or too many of them, are told to the service's
    own log only: anybody could fill this one with them.
    """

    def __init__(self, app: ASGIApp, context: ApiContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _LOOKS:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        entry = AuditEntry(scope["method"], scope["path"], client[0] if client else None)
        recorded = False

        async def noting_send(message: Message) -> None:
            nonlocal recorded
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                if entry.seq is None and entry.status < _FAULTS_OF_OURS:
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
            if not recorded and (entry.seq is None or entry.told != (entry.target, entry.status)):
                await self._record(entry)

    async def _record(self, entry: AuditEntry) -> None:
        begin_entry(None)  # what is written from here on is the log itself
        words = {
            "method": entry.method,
            "path": entry.path,
            "address": entry.address,
            "status": entry.status,
        }
        if entry.token_id is None:
            logger.info("a call was not let in", **words)
            return
        try:
            await self._context.database_call(self._context.audit.complete, entry)
        except DatabaseError as exc:
            logger.warning(
                "a call is missing in the audit log",
                token=entry.token_id,
                problem=str(exc),
                **words,
            )
