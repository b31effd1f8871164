"""Routes of the care of nodes: cordon, drain, and checks of the deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import structlog
from fastapi import APIRouter, Depends, Path, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from everstep.wire import Node
from everstep.wire.cluster import DrainOrder, NodeOrder
from everstep.wire.deployment import CheckOrder, DeploymentCheck
from service.annexes.nodes.deployment_checks import DeploymentChecks
from service.annexes.nodes.store import MarksFile, NodeMarkStore
from service.api.auth import Administrator
from service.api.blocking import db_write, storage_call
from service.api.bodies import ApiRouter, Parsed, example
from service.api.callers import Principal
from service.api.cluster import with_marks_and_runs
from service.api.dependencies import Cluster, Gate, Ray, Runs, TheDatabase, TheStorage
from service.api.openapi import problem_answers
from service.api.problems import ApiProblem, invalid_request, not_found, unavailable
from service.cluster.cluster_view import ClusterView
from service.cluster.ray_jobs import JobNotFound, JobRejected, RayUnavailable
from service.db.runs import RunStore
from service.model.rows import MarkState
from service.web.rendering import PageRoute
from service.web.session import CheckedForm, WebCaller
from storage.errors import StorageError

router: Final = ApiRouter("/v1", "cluster")

log = structlog.get_logger(__name__)

NodeId = Annotated[str, Path(description="The node's whole id, from `GET /v1/cluster`.")]

Order = Annotated[Annotated[NodeOrder, Parsed()] | None, example({"reason": "a disk fails"})]

Drain = Annotated[
    Annotated[DrainOrder, Parsed()] | None,
    example({"reason": "maintenance at noon", "deadline_s": 300}),
]


@dataclass(frozen=True)
class NodeMarking:
    """Sets marks of nodes, and lets drivers know."""

    cluster: ClusterView
    runs: RunStore
    marks: NodeMarkStore
    file: MarksFile

    async def mark(
        self,
        caller: Principal,
        node_id: str,
        state: MarkState,
        order: NodeOrder,
        deadline_s: float | None = None,
    ) -> Node:
        """Set a node's mark, notify drivers, and return the node.

        The database comes first. If the storage does not accept the file now, the reconciler writes
        it later.
        """
        caller.require("admin")
        info = await self.cluster.cluster()
        if not info.available:
            raise unavailable(
                "unavailable",
                f"Ray does not respond, so it is unknown whether node {node_id} exists; try again",
            )
        found = next((node for node in info.nodes if node.id == node_id), None)
        if found is None:
            raise not_found(
                f"node {node_id} is not in the cluster; GET /v1/cluster lists its nodes"
            )
        if found.state == "DEAD" and state != "open":
            raise ApiProblem(
                409, "conflict", f"node {node_id} is dead; only live nodes can be marked"
            )
        row = await db_write(
            self.marks.mark, node_id, state, caller.name, reason=order.reason, deadline_s=deadline_s
        )
        log.info(
            "node marked",
            node_id=node_id,
            state=state,
            by=caller.name,
            reason=order.reason,
            deadline=row.deadline,
        )
        try:
            await storage_call(self.file.publish)
        except StorageError as exc:
            log.warning("publishing node mark delayed", node_id=node_id, problem=str(exc))
        shown = await with_marks_and_runs(self.runs, self.marks, caller, info)
        return next(node for node in shown.nodes if node.id == node_id)


async def node_marking(
    cluster: Cluster, runs: Runs, database: TheDatabase, storage: TheStorage, gate: Gate
) -> NodeMarking:
    marks = NodeMarkStore(database, runs.clock)
    return NodeMarking(cluster, runs, marks, MarksFile(storage, marks, gate.require))


Marking = Annotated[NodeMarking, Depends(node_marking)]


@router.post(
    "/cluster/nodes/{node_id}/cordon",
    summary="Cordon a node",
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
)
async def cordon_node(
    node_id: NodeId, marking: Marking, caller: Administrator, order: Order = None
) -> Node:
    """Places no new ranks on the node. Its current ranks stay until their run restarts for another
    reason."""
    return await marking.mark(caller, node_id, "cordoned", order or NodeOrder())


@router.post(
    "/cluster/nodes/{node_id}/uncordon",
    summary="Open a node again",
    responses=problem_answers(400, 403, 404, 413, 415, 422),
)
async def uncordon_node(
    node_id: NodeId, marking: Marking, caller: Administrator, order: Order = None
) -> Node:
    """Ends a cordon or a drain. Earlier failures no longer count against the node."""
    return await marking.mark(caller, node_id, "open", order or NodeOrder())


@router.post(
    "/cluster/nodes/{node_id}/drain",
    summary="Drain a node",
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
)
async def drain_node(
    node_id: NodeId, marking: Marking, caller: Administrator, order: Drain = None
) -> Node:
    """Ranks save, leave at once and move to other nodes, without losing a step. The node is
    `DRAINED` once they have left."""
    order = order or DrainOrder()
    return await marking.mark(caller, node_id, "draining", order, order.deadline_s)


# ---------------------------------------------------------------- deployment checks

# Routes of deployment checks: start one, read its report.

checks_router: Final = ApiRouter("/v1/cluster/checks", "cluster")

CheckBody = Annotated[Annotated[CheckOrder, Parsed()] | None, example({"all_reduce_s": 10})]


async def deployment_checks(storage: TheStorage, ray: Ray, runs: Runs) -> DeploymentChecks:
    return DeploymentChecks(storage, ray, runs.clock)


Checks = Annotated[DeploymentChecks, Depends(deployment_checks)]


@checks_router.post(
    "",
    status_code=202,
    summary="Check the deployment",
    responses=problem_answers(400, 403, 413, 415, 422, 503),
)
async def start_check(
    checks: Checks, _caller: Administrator, order: CheckBody = None
) -> DeploymentCheck:
    """Runs a process on every live node that checks versions, storage, ports, clocks and an
    all-reduce. `everstep doctor` interprets the report."""
    try:
        return await checks.start((order or CheckOrder()).all_reduce_s)
    except JobRejected as exc:
        raise ApiProblem(409, "conflict", str(exc)) from exc
    except RayUnavailable as exc:
        raise unavailable("unavailable", str(exc)) from exc


@checks_router.get(
    "/{check_id}", summary="One check of the deployment", responses=problem_answers(403, 404, 503)
)
async def get_check(
    checks: Checks,
    _caller: Administrator,
    check_id: Annotated[
        str, Path(pattern=r"^check_[0-9a-z]{1,32}$", description="Id of the check.")
    ],
) -> DeploymentCheck:
    """The state `running`, later the report, or why there is none."""
    try:
        return await checks.get(check_id)
    except JobNotFound as exc:
        raise not_found(
            f"check {check_id} does not exist; start one with POST /v1/cluster/checks"
        ) from exc
    except RayUnavailable as exc:
        raise unavailable("unavailable", str(exc)) from exc


# ---------------------------------------------------------------- pages

# What the page of the cluster asks of nodes: cordon, drain, uncordon.

pages: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

_MARKS: Final = {"cordon": cordon_node, "uncordon": uncordon_node}


@pages.post("/cluster/nodes/{node_id}/{word}")
async def post_mark(
    node_id: str,
    word: Literal["cordon", "uncordon", "drain"],
    marking: Marking,
    caller: WebCaller,
    form: CheckedForm,
) -> Response:
    reason = form.get("reason", "").strip() or None
    try:
        if word == "drain":
            minutes = form.get("deadline_min", "").strip()
            deadline_s = float(minutes) * 60 if minutes else None
            await drain_node(
                node_id, marking, caller, DrainOrder(reason=reason, deadline_s=deadline_s)
            )
        else:
            await _MARKS[word](node_id, marking, caller, NodeOrder(reason=reason))
    except (ValidationError, ValueError) as exc:
        raise invalid_request(
            "deadline",
            msg="enter minutes above 0, at most 30 days, and a reason of at most 1000 characters",
        ) from exc
    return RedirectResponse("/cluster", 303)
