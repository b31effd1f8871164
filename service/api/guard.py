"""Middleware around every request: its address, the limit of its body, the audit log."""

from __future__ import annotations

import re
from typing import Final

import structlog
from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.code import MAX_ARCHIVE_BYTES
from service.api.blocking import db_write
from service.api.bodies import MAX_BODY_BYTES
from service.api.problems import ApiProblem, problem_response
from service.db.audit import AuditedCall, AuditStore, begin_entry
from service.db.engine import DatabaseError

logger = structlog.get_logger(__name__)

UPLOAD_PATHS: Final = frozenset({"/v1/code"})
"""Routes for uploads, which have their own limit."""
FORM_BYTES: Final = 64 << 10
"""Size allowed for the parts of a multipart body around its file."""
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


def _address_problem(scope: Scope) -> ApiProblem | None:
    if any(name == b"host" and not _HOST.fullmatch(value) for name, value in scope["headers"]):
        return ApiProblem(
            400, "malformed_host", "the Host header is invalid; send HOST or HOST:PORT"
        )
    if not scope["query_string"].isascii():
        return ApiProblem(
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
        limit, advice = MAX_BODY_BYTES, "send less"
        if scope["path"].rstrip("/") in UPLOAD_PATHS:
            limit = min(self._max_upload_bytes, MAX_ARCHIVE_BYTES + FORM_BYTES)
            advice = "leave out data and weights (.everstepignore)"
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                # the only kind of error that FastAPI passes on while it reads a body
                raise HTTPException(413, f"the body is larger than {limit} bytes; {advice}")
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

    def __init__(self, app: ASGIApp, log: AuditStore) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_look = scope["type"] == "http" and (
            scope["method"] in _LOOKS or scope["path"] in _CHECKS
        )
        if scope["type"] != "http" or is_look:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        entry = AuditedCall(scope["method"], scope["path"], client[0] if client else None)
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

    async def _record(self, entry: AuditedCall) -> None:
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
            await db_write(self._log.complete, entry)
        except DatabaseError as exc:
            logger.warning(
                "audit entry lost",
                token=entry.token_id,
                problem=str(exc),
                **words,
            )
