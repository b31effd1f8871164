"""Routes of the cluster: the catalog, nodes, and marks of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Final

import structlog
from fastapi import APIRouter, Depends, Path

from everstep.spec.run_spec import spec_schema
from everstep.spec.tasks import Catalog, catalog
from everstep.wire import ClusterInfo, Node
from everstep.wire.cluster import DrainOrder, NodeOrder, StorageAdoption, StorageStatus
from everstep.wire.deployment import CheckOrder, DeploymentCheck
from service.api.auth import Administrator, Caller, Principal
from service.api.bodies import optional_body
from service.api.context import ApiContext, Context
from service.api.openapi import CHECK_BODY, DRAIN_BODY, NODE_BODY, problem_answers
from service.api.problems import ProblemError, not_found, unavailable
from service.cluster.cluster_view import with_mark
from service.cluster.ray_jobs import JobNotFound, JobRejected, RayUnavailable
from service.db.lease import RUN_ID_PATTERN
from service.model.rows import MarkState
from service.model.run_rows import RunRow
from service.projections.goodput import WorkLedger
from service.storage_identity import adopt_storage, storage_status
from storage.errors import StorageError

router: Final = APIRouter(prefix="/v1", tags=["cluster"])
_CATALOG: Final = catalog()
_SCHEMA: Final = spec_schema()

log = structlog.get_logger(__name__)


NodeId = Annotated[str, Path(description="The node's whole id, from `GET /v1/cluster`.")]


@router.get("/catalog", summary="What a spec may name", responses=problem_answers())
async def get_catalog(_caller: Caller) -> Catalog:
    """Tasks, models, data sets, optimizers and schedules, each with the JSON schema of its
    arguments."""
    return _CATALOG


@router.get("/schema", summary="The JSON schema of a spec", responses=problem_answers())
async def get_schema(_caller: Caller) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the body of `POST /v1/runs`, for editors and generators. The
    same file is at `/static/spec.schema.json` without a token, for editors."""
    return _SCHEMA


@router.get("/cluster", summary="The Ray cluster", responses=problem_answers())
async def get_cluster(context: Context, caller: Caller) -> ClusterInfo:
    """Nodes with state, resources, and those of their runs that the token may see."""
    return await _with_marks_and_runs(context, caller, await context.cluster_view.cluster())


Order = Annotated[NodeOrder, Depends(optional_body(NodeOrder))]
Drain = Annotated[DrainOrder, Depends(optional_body(DrainOrder))]


@router.post(
    "/cluster/nodes/{node_id}/cordon",
    summary="Cordon a node",
    responses=problem_answers(403, 404, 409, 415, 422),
    openapi_extra=NODE_BODY,
)
async def cordon_node(
    node_id: NodeId, context: Context, caller: Administrator, order: Order
) -> Node:
    """Places no new ranks on the node. Its current ranks stay until their run restarts for another
    reason."""
    return await _mark(context, caller, node_id, "cordoned", order)


@router.post(
    "/cluster/nodes/{node_id}/uncordon",
    summary="Open a node again",
    responses=problem_answers(403, 404, 415, 422),
    openapi_extra=NODE_BODY,
)
async def uncordon_node(
    node_id: NodeId, context: Context, caller: Administrator, order: Order
) -> Node:
    """Ends a cordon or a drain. Earlier failures no longer count against the node."""
    return await _mark(context, caller, node_id, "open", order)


@router.post(
    "/cluster/nodes/{node_id}/drain",
    summary="Drain a node",
    responses=problem_answers(403, 404, 409, 415, 422),
    openapi_extra=DRAIN_BODY,
)
async def drain_node(
    node_id: NodeId, context: Context, caller: Administrator, order: Drain
) -> Node:
    """Ranks save, leave at once and move to other nodes, without losing a step. The node is
    `DRAINED` once they have left."""
    return await _mark(context, caller, node_id, "draining", order, order.deadline_s)


async def _mark(
    context: ApiContext,
    caller: Principal,
    node_id: str,
    state: MarkState,
    order: NodeOrder,
    deadline_s: float | None = None,
) -> Node:
    """Set a node's mark, notify drivers, and return the node.

    The database comes first. If the storage does not accept the file now, the reconciler writes it
    later.
    """
    caller.require("admin")
    info = await context.cluster_view.cluster()
    if not info.available:
        raise unavailable(
            "unavailable",
            f"Ray does not respond, so it is unknown whether node {node_id} exists; try again",
        )
    found = next((node for node in info.nodes if node.id == node_id), None)
    if found is None:
        raise not_found(f"node {node_id} is not in the cluster; GET /v1/cluster lists its nodes")
    if found.state == "DEAD" and state != "open":
        raise ProblemError(
            409, "conflict", f"node {node_id} is dead; only live nodes can be marked"
        )
    row = await context.database_call(
        context.node_marks.mark,
        node_id,
        state,
        caller.name,
        reason=order.reason,
        deadline_s=deadline_s,
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
        await context.storage_call(context.marks_file.publish)
    except StorageError as exc:
        log.warning("publishing node mark delayed", node_id=node_id, problem=str(exc))
    shown = await _with_marks_and_runs(context, caller, info)
    return next(node for node in shown.nodes if node.id == node_id)


def _of_a_rank(run: RunRow) -> dict[str, float]:
    """Return the resources that each rank of a live run holds."""
    resources = dict(run.stored_spec.scaling.resources_per_worker)
    work = WorkLedger.load(run.work_ledger) if run.work_ledger else None
    if work is not None and work.on_gpu:
        resources.setdefault("GPU", work.gpus_per_rank)
    return resources


def _used(node: Node, held: Mapping[str, float]) -> dict[str, float] | None:
    """Return what is in use on a node: by Ray's account, or else by the ranks there."""
    if node.state == "DEAD":
        return None
    if node.resources_used is not None:
        return node.resources_used
    return {
        name: float(held.get(name, 0.0))
        for name in node.resources_total
        if name in held or name in ("CPU", "GPU")
    }


def _as_seen(caller: Principal, node: Node) -> Node:
    """Return the node for a caller with one project: reasons from the service may name runs of
    other projects."""
    if caller.project is None or node.mark is None or node.mark.reason is None:
        return node
    reason = RUN_ID_PATTERN.sub("a run", node.mark.reason)
    return node.model_copy(update={"mark": node.mark.model_copy(update={"reason": reason})})


async def _with_marks_and_runs(
    context: ApiContext, caller: Principal, info: ClusterInfo
) -> ClusterInfo:
    """Return the cluster with marks and runs of its nodes. Runs that the caller may not see count,
    but are not named."""
    rows = await context.database_call(context.node_marks.all)
    places: dict[str, list[str]] = {}
    occupied: dict[str, dict[str, float]] = {}
    for run in await context.database_call(context.runs.live):
        nodes = Counter(worker["node_id"] for worker in run.workers)
        for node_id, num_ranks in nodes.items():
            held = occupied.setdefault(node_id, {})
            for name, amount in _of_a_rank(run).items():
                held[name] = held.get(name, 0.0) + num_ranks * amount
        if caller.reaches(run.project):
            for node_id in nodes:
                places.setdefault(node_id, []).append(run.id)
    now = context.clock()
    shown = tuple(
        _as_seen(
            caller, with_mark(node, rows.get(node.id), has_ranks=node.id in occupied, now=now)
        ).model_copy(
            update={
                "runs": tuple(places.get(node.id, ())),
                "resources_used": _used(node, occupied.get(node.id, {})),
            }
        )
        for node in info.nodes
    )
    return info.model_copy(update={"nodes": shown})


# ---------------------------------------------------------------- deployment checks

# Routes of deployment checks: start one, read its report.

checks_router: Final = APIRouter(prefix="/v1/cluster/checks", tags=["cluster"])


CheckBody = Annotated[CheckOrder, Depends(optional_body(CheckOrder))]


@checks_router.post(
    "",
    status_code=202,
    summary="Check the deployment",
    responses=problem_answers(403, 415, 422, 503),
    openapi_extra=CHECK_BODY,
)
async def start_check(
    context: Context, _caller: Administrator, order: CheckBody
) -> DeploymentCheck:
    """Runs a process on every live node that checks versions, storage, ports, clocks and an
    all-reduce. `everstep doctor` interprets the report."""
    try:
        return await context.deployment_checks.start(order.all_reduce_s)
    except JobRejected as exc:
        raise ProblemError(409, "conflict", str(exc)) from exc
    except RayUnavailable as exc:
        raise unavailable("unavailable", str(exc)) from exc


@checks_router.get(
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


# ---------------------------------------------------------------- storage

# Routes of the storage that the database belongs to; for administrators.

storage_router: Final = APIRouter(prefix="/v1/storage", tags=["administration"])


@storage_router.get(
    "", summary="The storage, and whether it matches the database", responses=problem_answers(403)
)
async def get_storage(context: Context, _caller: Administrator) -> StorageStatus:
    """Compares the storage with the database: its id, and the newest submission of each run that
    has not ended."""
    return await context.storage_call(
        storage_status, context.storage, context.runs, context.storage_gate
    )


@storage_router.post(
    "/adopt",
    summary="Adopt the present storage",
    operation_id="adopt_storage",
    responses=problem_answers(403),
)
async def adopt(context: Context, _caller: Administrator) -> StorageAdoption:
    """For a storage that was replaced on purpose, or a database that is older than its storage.
    Runs that have not ended continue from the data in this storage: submissions that the database
    does not know are read, and data that the storage lacks is lost."""
    return await context.storage_call(
        adopt_storage, context.storage, context.runs, context.storage_gate
    )
