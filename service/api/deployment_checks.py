"""Routes of deployment checks: start one, read its report."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path

from everstep.wire.deployment import CheckOrder, DeploymentCheck
from service.api.auth import Administrator
from service.api.context import Context
from service.api.openapi import CHECK_BODY, problem_answers
from service.api.problems import ProblemError, not_found, unavailable
from service.api.spec_body import optional_body
from service.cluster.ray_errors import JobNotFound, JobRejected, RayUnavailable

router: Final = APIRouter(prefix="/v1/cluster/checks", tags=["cluster"])


Order = Annotated[CheckOrder, Depends(optional_body(CheckOrder))]


@router.post(
    "",
    status_code=202,
    summary="Check the deployment",
    responses=problem_answers(403, 415, 422, 503),
    openapi_extra=CHECK_BODY,
)
async def start_check(context: Context, _caller: Administrator, order: Order) -> DeploymentCheck:
    """Runs a process on every live node that checks versions, storage, ports, clocks and an
    all-reduce. `everstep doctor` interprets the report."""
    try:
        return await context.deployment_checks.start(order.all_reduce_s)
    except JobRejected as exc:
        raise ProblemError(409, "conflict", str(exc)) from exc
    except RayUnavailable as exc:
        raise unavailable("unavailable", str(exc)) from exc


@router.get(
    "/{check_id}", summary="One check of the deployment", responses=problem_answers(403, 404, 503)
)
async def get_check(
    context: Context,
    _caller: Administrator,
    check_id: Annotated[
        str, Path(pattern=r"^check_[0-9a-z]{1,32}$", description="Id of the check.")
    ],
) -> DeploymentCheck:
    """The state `running`, later the report, or why there is none."""
    try:
        return await context.deployment_checks.get(check_id)
    except JobNotFound as exc:
        raise not_found(
            f"check {check_id} does not exist; start one with POST /v1/cluster/checks"
        ) from exc
    except RayUnavailable as exc:
        raise unavailable("unavailable", str(exc)) from exc
