"""Routes of the cluster: the catalog, nodes with their runs, and the storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from everstep.spec.run_spec import spec_schema
from everstep.spec.tasks import Catalog, catalog
from everstep.wire import ClusterInfo, Node
from everstep.wire.cluster import StorageAdoption, StorageStatus
from service.api.auth import Administrator, Caller
from service.api.blocking import db_read, storage_call
from service.api.bodies import ApiRouter
from service.api.callers import Principal
from service.api.dependencies import Cluster, Gate, Marks, Runs, TheStorage
from service.api.openapi import problem_answers
from service.cluster.cluster_view import with_mark
from service.db.ids import RUN_ID_PATTERN
from service.db.node_marks import NodeMarks
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.projections.goodput import WorkLedger
from service.storage_identity import adopt_storage, storage_status

router: Final = ApiRouter("/v1", "cluster")
_CATALOG: Final = catalog()
_SCHEMA: Final = spec_schema()


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
async def get_cluster(cluster: Cluster, runs: Runs, marks: Marks, caller: Caller) -> ClusterInfo:
    """Nodes with state, resources, and those of their runs that the token may see."""
    return await with_marks_and_runs(runs, marks, caller, await cluster.cluster())


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


async def with_marks_and_runs(
    runs: RunStore, marks: NodeMarks, caller: Principal, info: ClusterInfo
) -> ClusterInfo:
    """Return the cluster with marks and runs of its nodes. Runs that the caller may not see count,
    but are not named."""
    rows = await db_read(marks.all)
    places: dict[str, list[str]] = {}
    occupied: dict[str, dict[str, float]] = {}
    for run in await db_read(runs.live):
        nodes = Counter(worker["node_id"] for worker in run.workers)
        for node_id, num_ranks in nodes.items():
            held = occupied.setdefault(node_id, {})
            for name, amount in _of_a_rank(run).items():
                held[name] = held.get(name, 0.0) + num_ranks * amount
        if caller.reaches(run.project):
            for node_id in nodes:
                places.setdefault(node_id, []).append(run.id)
    now = runs.clock()
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


# ---------------------------------------------------------------- storage

# Routes of the storage that the database belongs to; for administrators.

storage_router: Final = ApiRouter("/v1/storage", "administration")


@storage_router.get(
    "", summary="The storage, and whether it matches the database", responses=problem_answers(403)
)
async def get_storage(
    storage: TheStorage, runs: Runs, gate: Gate, _caller: Administrator
) -> StorageStatus:
    """Compares the storage with the database: its id, and the newest submission of each run that
    has not ended."""
    return await storage_call(storage_status, storage, runs, gate)


@storage_router.post(
    "/adopt",
    summary="Adopt the present storage",
    operation_id="adopt_storage",
    responses=problem_answers(403),
)
async def adopt(
    storage: TheStorage, runs: Runs, gate: Gate, _caller: Administrator
) -> StorageAdoption:
    """For a storage that was replaced on purpose, or a database that is older than its storage.
    Runs that have not ended continue from the data in this storage: submissions that the database
    does not know are read, and data that the storage lacks is lost."""
    return await storage_call(adopt_storage, storage, runs, gate)
