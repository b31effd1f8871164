"""A dashboard that records what it is asked and answers what a test sets, over real
HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass
class TellingDashboard:
    """Answers of a cluster's dashboard."""

    url: str = ""
    token: str = "ray-token"
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path with query, and headers of each request."""
    answers: dict[str, Response] = field(default_factory=dict)
    """Path -> its answer; others get an empty JSON object."""

    async def answer(self, request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        self.asked.append((request.method, request.url.path + query, dict(request.headers)))
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return Response("Unauthorized", 401)
        return self.answers.get(request.url.path) or JSONResponse({})


@asynccontextmanager
async def telling_dashboard() -> AsyncIterator[TellingDashboard]:
    """Serve one on a free port of this loop."""
    dashboard = TellingDashboard()
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
    app = Starlette(routes=[Route("/{path:path}", dashboard.answer, methods=methods)])
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    dashboard.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve([listener]))
    async with asyncio.timeout(60):
        while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.005)
    yield dashboard
    server.should_exit = True
    await serving
