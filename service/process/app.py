"""API and dashboard as one ASGI application: routers, errors, documentation, background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import Depends, FastAPI

from service.api import (
    alerts,
    checkpoints,
    cluster,
    code,
    deployment_checks,
    drills,
    goodput,
    health,
    histories,
    logs,
    openapi,
    problems,
    profiles,
    prometheus,
    replays,
    runs,
    series,
    sessions,
    stacks,
    storage,
    sweeps,
    team,
    tensorboard,
)
from service.api.context import ApiContext
from service.api.request_guard import AddressMiddleware, AuditMiddleware, BodyLimitMiddleware
from service.api.request_shape import HeadMiddleware, refuse_unknown_query
from service.web import dashboard

_DESCRIPTION = """Training that never loses a step.
Every route but the health checks needs `Authorization: Bearer TOKEN`.
Times are RFC 3339 in UTC, durations seconds (`_s`), sizes bytes (`_bytes`);
errors are `application/problem+json` with a `code`."""


def create_app(context: ApiContext) -> FastAPI:
    """Compose the application. Nothing runs before its lifespan begins, and Ray is not called.

    Call ``context.feed.close()`` at a stop, before the server waits for its connections: it ends
    every stream.
    """

    app = FastAPI(
        title="Everstep",
        version=version("everstep"),
        description=_DESCRIPTION,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        generate_unique_id_function=openapi.operation_id,
    )
    app.state.context = context
    app.state.figures = prometheus.Figures(context)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(BodyLimitMiddleware, max_upload_bytes=context.max_upload_bytes)
    app.add_middleware(AuditMiddleware, context=context)
    app.add_middleware(AddressMiddleware)
    app.add_middleware(prometheus.LatencyMiddleware, figures=app.state.figures)
    problems.install(app)
    openapi.install(app)
    strict = [Depends(refuse_unknown_query)]
    for module in (
        runs,
        sweeps,
        histories,
        goodput,
        series,
        tensorboard,
        logs,
        checkpoints,
        drills,
        profiles,
        stacks,
        replays,
        code,
        cluster,
        deployment_checks,
        team,
        sessions,
        alerts,
        storage,
        health,
        prometheus,
    ):
        app.include_router(module.router, dependencies=strict)
    app.include_router(runs.checks, dependencies=strict)
    dashboard.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run the event feed, the check of its followers, and the record of token use as tasks."""
    context: ApiContext = app.state.context
    tasks = [
        asyncio.create_task(context.feed.run(), name="event-feed"),
        asyncio.create_task(context.followers.run(), name="followers"),
        asyncio.create_task(context.token_use.run(), name="token-use"),
    ]
    try:
        yield
    finally:
        context.feed.close()
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await context.token_use.flush()
        await context.database.close_loop()
