"""Routes of deployment checks: start one, read its report."""

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
    """Duration of the parts of a check that take time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    all_reduce_s: float = Field(
        5.0,
        gt=0,
        le=LONGEST_ALL_REDUCE_S,
        allow_inf_nan=False,
        description="Duration of the all-reduce test in seconds.",
    )


Order = Annotated[
    CheckOrder | None, Body(openapi_examples={"ten seconds": {"value": {"all_reduce_s": 10}}})
]


@router.post(
    "", status_code=202, summary="Check the deployment", responses=problem_answers(403, 422, 503)
)
async def start_check(context: Context, caller: Caller, order: Order = None) -> DeploymentCheck:
    """Runs a process on every live node that checks versions, storage, ports, clocks and an
    all-reduce. `everstep doctor` interprets the report."""
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
    check_id: Annotated[
        str, Path(pattern=r"^check_[0-9a-z]{1,32}$", description="Id of the check.")
    ],
) -> DeploymentCheck:
    """The state `running`, later the report, or why there is none."""
    caller.require("admin")
    try:
        return await context.deployment_checks.get(check_id)
    except JobNotFound as exc:
        raise not_found(
            f"check {check_id} does not exist; start one with POST /v1/cluster/checks"
        ) from exc
    except RayUnavailable as exc:
        raise unavailable("unavailable", str(exc)) from exc
