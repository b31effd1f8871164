"""Checks of the deployment: asked for, and looked at."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Body, Path
from pydantic import BaseModel, ConfigDict, Field

from everstep.wire.deployment import DeploymentCheck
from service.api.auth import Caller
from service.api.context import Context
from service.api.openapi import problem_answers
from service.api.problems import ProblemError, not_found, unavailable
from service.cluster.ray_errors import JobNotFound, JobRejected, RayUnavailable

router: Final = APIRouter(prefix="/v1/cluster/checks", tags=["cluster"])
LONGEST_ALL_REDUCE_S: Final = 60.0


class CheckOrder(BaseModel):
    """How long a check tries what takes time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all_reduce_s: float = Field(
        5.0,
        gt=0,
        le=LONGEST_ALL_REDUCE_S,
        allow_inf_nan=False,
        description="Seconds of sums over the nodes that run ranks.",
    )


Order = Annotated[
    CheckOrder | None, Body(openapi_examples={"ten seconds": {"value": {"all_reduce_s": 10}}})
]


@router.post(
    "", status_code=202, summary="Check the deployment", responses=problem_answers(403, 422, 503)
)
async def start_check(context: Context, caller: Caller, order: Order = None) -> DeploymentCheck:
    """A process on every live node looks at versions, storage, ports, clocks and a sum. `everstep
    doctor` reads the report."""
    caller.require("admin")
    try:
        return await context.deployment_checks.start((order or CheckOrder()).all_reduce_s)
    except JobRejected as exc:
        raise ProblemError(409, "conflict", str(exc)) from exc
    except RayUnavailable as exc:
        raise unavailable("unavailable", str(exc)) from exc


@router.get(
    "/{check_id}", summary="One check of the deployment", responses=problem_answers(403, 404, 503)
)
async def get_check(
    context: Context,
    caller: Caller,
    check_id: Annotated[str, Path(pattern=r"^check_[0-9a-z]{1,32}$", description="Its id.")],
) -> DeploymentCheck:
    """While it runs, `running`; afterwards with its report, or why there is none."""
    caller.require("admin")
    try:
        return await context.deployment_checks.get(check_id)
    except JobNotFound as exc:
        raise not_found(f"there is no check {check_id}; POST /v1/cluster/checks makes one") from exc
    except RayUnavailable as exc:
        raise unavailable("unavailable", str(exc)) from exc
