"""Routes of liveness and readiness."""

from __future__ import annotations

from typing import Final, Literal

from fastapi import APIRouter, Response

from everstep.wire import Answer, Readiness
from service.api.context import Context
from service.api.problems import RETRY_AFTER_S

router: Final = APIRouter(tags=["health"])


class Liveness(Answer):
    """Response of a process that serves requests."""

    status: Literal["alive"]


@router.get("/healthz", summary="Whether the service lives")
async def healthz() -> Liveness:
    return Liveness(status="alive")


@router.get(
    "/readyz",
    summary="Whether the service can work",
    responses={
        503: {"model": Readiness, "description": "The database or the storage is unavailable."}
    },
)
async def readyz(response: Response, context: Context) -> Readiness:
    """503 only if the database or the storage is unavailable; Ray's state and the reconciler's lag
    are in the body. The response may be a second old."""
    answer = await context.readiness.answer()
    if answer.status == "unavailable":
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return answer
