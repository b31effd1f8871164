"""Whether the service lives, and whether it can work."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import structlog
from fastapi import APIRouter, Response

from everstep.wire import Answer, Readiness
from service.api.context import ApiContext, Context
from service.db.engine import DatabaseError
from storage.errors import StorageError

logger = structlog.get_logger(__name__)

router: Final = APIRouter(tags=["health"])

PROBE_TIMEOUT_S: Final = 5.0


class Liveness(Answer):
    status: Literal["alive"]


@router.get("/healthz", summary="Whether the service lives")
async def healthz() -> Liveness:
    return Liveness(status="alive")


@router.get(
    "/readyz",
    summary="Whether the service can work",
    responses={503: {"model": Readiness, "description": "The database or the storage is away."}},
)
async def readyz(response: Response, context: Context) -> Readiness:
    """503 only when the database or the storage is away; Ray's state and the reconciler's lag are told besides."""
    database, storage, ray = await asyncio.gather(_database_up(context), _storage_up(context), _ray_up(context))
    ready = database and storage
    if not ready:
        response.status_code = 503
        response.headers["Retry-After"] = "2"
    return Readiness(
        status="ready" if ready else "unavailable",
        database="up" if database else "down",
        storage="up" if storage else "down",
        ray="up" if ray else "down",
        reconciler_lag_s=context.reconciler_lag_s(),
    )


async def _database_up(context: ApiContext) -> bool:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await context.database_call(context.database.probe)
    except (DatabaseError, TimeoutError) as exc:
        logger.warning("database_down", error=repr(exc))
        return False
    return True


async def _storage_up(context: ApiContext) -> bool:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await context.storage_call(context.storage.probe)
    except (StorageError, TimeoutError) as exc:
        logger.warning("storage_down", error=repr(exc))
        return False
    return True


async def _ray_up(context: ApiContext) -> bool:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return (await context.cluster_view.cluster()).available
    except TimeoutError:
        return False
