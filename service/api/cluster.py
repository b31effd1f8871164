"""What a spec may name, what runs where, and which nodes take no ranks."""

from __future__ import annotations

from typing import Annotated, Final

import structlog
from fastapi import APIRouter, Body, Path
from pydantic import BaseModel, ConfigDict, Field

from everstep.spec.catalog import Catalog, catalog
from everstep.wire import ClusterInfo, Node
from service.api.auth import Caller, Principal
from service.api.context import ApiContext, Context
from service.api.openapi import problem_answers
from service.api.problems import ProblemError, not_found, unavailable
from service.cluster.cluster_view import with_mark
from service.db.ids import RUN_ID_PATTERN
from service.model.rows import MarkWord
from storage.errors import StorageError

router: Final = APIRouter(prefix="/v1", tags=["cluster"])
_CATALOG: Final = catalog()
LONGEST_DEADLINE_S: Final = 30 * 24 * 3600

log = structlog.get_logger(__name__)


class NodeOrder(BaseModel):
    """Why a node is cordoned, uncordoned or drained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str | None = Field(
        None, max_length=1000, description="In words, for whoever looks at the cluster."
    )


class DrainOrder(NodeOrder):
    """Why a node is drained, and until when."""

    deadline_s: float | None = Field(
        None,
        gt=0,
        le=LONGEST_DEADLINE_S,
        allow_inf_nan=False,
        description="Seconds from now at which the node is to be taken away.",
    )


NodeId = Annotated[str, Path(description="The node's whole id, as `GET /v1/cluster` shows it.")]


@router.get("/catalog", summary="What a spec may name", responses=problem_answers())
async def get_catalog(_caller: Caller) -> Catalog:
    """Tasks, models, data sets, optimizers and schedules, each with the JSON schema of its
    arguments."""
    return _CATALOG


@router.get("/cluster", summary="The Ray cluster", responses=problem_answers())
async def get_cluster(context: Context, caller: Caller) -> ClusterInfo:
    """Nodes with their state, resources, and the runs on them that the token may see."""
    return await _with_marks_and_runs(context, caller, await context.cluster_view.cluster())


Order = Annotated[
    NodeOrder | None, Body(openapi_examples={"reason": {"value": {"reason": "a disk fails"}}})
]
Drain = Annotated[
    DrainOrder | None,
    Body(
        openapi_examples={
            "deadline": {"value": {"reason": "maintenance at noon", "deadline_s": 300}}
        }
    ),
]


@router.post(
    "/cluster/nodes/{node_id}/cordon",
    summary="Cordon a node",
    responses=problem_answers(403, 404, 409, 422),
)
async def cordon_node(
    node_id: NodeId, context: Context, caller: Caller, order: Order = None
) -> Node:
    """No new rank goes there; ranks that are there stay until their run restarts for another
    reason."""
    return await _say(context, caller, node_id, "cordoned", order or NodeOrder())


@router.post(
    "/cluster/nodes/{node_id}/uncordon",
    summary="Open a node again",
    responses=problem_answers(403, 404, 422),
)
async def uncordon_node(
    node_id: NodeId, context: Context, caller: Caller, order: Order = None
) -> Node:
    """Ends a cordon or a drain. Failures up to now no longer count against the node."""
    return await _say(context, caller, node_id, "open", order or NodeOrder())


@router.post(
    "/cluster/nodes/{node_id}/drain",
    summary="Drain a node",
    responses=problem_answers(403, 404, 409, 422),
)
async def drain_node(
    node_id: NodeId, context: Context, caller: Caller, order: Drain = None
) -> Node:
    """Ranks save, leave at once and move to other nodes without losing a step. The node is
    `DRAINED` once they have left."""
    order = order or DrainOrder()
    return await _say(context, caller, node_id, "draining", order, order.deadline_s)


async def _say(
    context: ApiContext,
    caller: Principal,
    node_id: str,
    state: MarkWord,
    order: NodeOrder,
    deadline_s: float | None = None,
) -> Node:
    """Record the word about a node, tell drivers, and answer with the node as it is now.

    The database has it first. Where storage does not take the file now, the reconciler writes it
    later: the word is not lost.
    """
    caller.require("admin")
    info = await context.cluster_view.cluster()
    if not info.available:
        raise unavailable(
            "unavailable",
            f"Ray does not answer, so that it is not known whether there is a node {node_id}",
        )
    found = next((node for node in info.nodes if node.id == node_id), None)
    if found is None:
        raise not_found(f"node {node_id} is not in the cluster; GET /v1/cluster lists its nodes")
    if found.state == "DEAD" and state != "open":
        raise ProblemError(409, "conflict", f"node {node_id} is dead; no rank can go there")
    word = await context.database_call(
        context.node_marks.say,
        node_id,
        state,
        caller.name,
        reason=order.reason,
        deadline_s=deadline_s,
    )
    log.info(
        "a node was marked",
        node_id=node_id,
        state=state,
        by=caller.name,
        reason=order.reason,
        deadline=word.deadline,
    )
    try:
        await context.storage_call(context.marks_file.publish)
    except StorageError as exc:
        log.warning("drivers are told of the marked node later", node_id=node_id, problem=str(exc))
    shown = await _with_marks_and_runs(context, caller, info)
    return next(node for node in shown.nodes if node.id == node_id)


def _as_seen(caller: Principal, node: Node) -> Node:
    """The node as shown to whom one project alone is open: a reason that the service gives names
    the runs that failed there."""
    if caller.project is None or node.mark is None or node.mark.reason is None:
        return node
    reason = RUN_ID_PATTERN.sub("a run", node.mark.reason)
    return node.model_copy(update={"mark": node.mark.model_copy(update={"reason": reason})})


async def _with_marks_and_runs(
    context: ApiContext, caller: Principal, info: ClusterInfo
) -> ClusterInfo:
    """The cluster with what the database knows of its nodes; a run that the caller may not see
    counts, and is not named."""
    words = await context.database_call(context.node_marks.all)
    places: dict[str, list[str]] = {}
    occupied: set[str] = set()
    for run in await context.database_call(context.runs.live):
        nodes = {worker["node_id"] for worker in run.workers}
        occupied |= nodes
        if caller.reaches(run.project):
            for node_id in nodes:
                places.setdefault(node_id, []).append(run.id)
    now = context.clock()
    shown = tuple(
        _as_seen(
            caller, with_mark(node, words.get(node.id), has_ranks=node.id in occupied, now=now)
        ).model_copy(update={"runs": tuple(places.get(node.id, ()))})
        for node in info.nodes
    )
    return info.model_copy(update={"nodes": shown})
