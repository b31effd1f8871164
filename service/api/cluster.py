"""What a spec may name, and what runs where."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from everstep.catalog import Catalog, catalog
from everstep.wire import ClusterInfo
from service.api.context import Context
from service.api.openapi import problem_answers
from service.auth import Caller

router: Final = APIRouter(prefix="/v1", tags=["cluster"])
_CATALOG: Final = catalog()


@router.get("/catalog", summary="What a spec may name", responses=problem_answers())
async def get_catalog(_caller: Caller) -> Catalog:
    """Tasks, models, data sets, optimizers and schedules, each with the JSON schema of its arguments."""
    return _CATALOG


@router.get("/cluster", summary="The Ray cluster", responses=problem_answers())
async def get_cluster(context: Context, caller: Caller) -> ClusterInfo:
    """Nodes with their state, resources, and the runs on them that the token may see."""
    info = await context.cluster_view.cluster()
    places: dict[str, list[str]] = {}
    for run in await context.database_call(context.runs.live):
        if caller.reaches(run.project):
            for node_id in {worker["node_id"] for worker in run.workers}:
                places.setdefault(node_id, []).append(run.id)
    nodes = tuple(node.model_copy(update={"runs": tuple(places.get(node.id, ()))}) for node in info.nodes)
    return info.model_copy(update={"nodes": nodes})
