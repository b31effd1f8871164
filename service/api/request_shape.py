"""What every route does alike with a request: HEAD as GET, and only known query parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import anyio
import anyio.lowlevel
from fastapi import Request
from fastapi.dependencies.models import Dependant
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.errors import FieldError
from everstep.text.close_names import closest
from service.api.auth import bearer, principal
from service.api.problems import ProblemError

_RELAYED: Final = "/ray/"
"""Paths whose HEAD is passed on to Ray, which answers it itself."""

_OF_LISTS: Final = {"limit", "cursor"}
"""Parameters that clients send with every list, also with one that is always a single page."""


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


async def refuse_unknown_query(request: Request) -> None:
    """Raise 422 for a query parameter that the route does not have: a typing error would otherwise
    look like a filter that matches everything. Without a valid token raise 401, as the route."""
    if not request.scope["query_string"]:
        return
    dependant = request.scope["route"].dependant
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
        if any(each is bearer for each in _calls(dependant)):
            await principal(request, request.app.state.context, await bearer(request))
        raise ProblemError(422, "invalid_request", "; ".join(map(str, faults)), errors=faults)


def _unknown(name: str, known: list[str]) -> str:
    if not known:
        return "is not a query parameter of this route, which has none; remove it"
    close = closest(name, known)
    hint = f"did you mean {close}?" if close else f"use {', '.join(known)}"
    return f"is not a query parameter of this route; {hint}"


def _calls(dependant: Dependant) -> Iterator[object]:
    """Yield what the route calls before its function; the check of the query is not its own."""
    for each in dependant.dependencies:
        if each.call is not refuse_unknown_query:
            yield each.call
            yield from _calls(each)


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for each in dependant.dependencies:
        yield from _query_names(each)
