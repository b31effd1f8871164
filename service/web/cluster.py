"""Pages of the cluster: which runs are on which nodes, and why runs wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

from fastapi import APIRouter, Request, Response

from everstep.text import words as cli_words
from everstep.wire import Node, RunStatus
from service.api import cluster
from service.api.blocking import db_read
from service.api.dependencies import Cluster, Marks, Ready, Runs
from service.db.run_lookup import RunFilter
from service.runs.views import Views
from service.web.rendering import PageRoute, page
from service.web.session import WebCaller

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

Resource = tuple[str, str, str | None]
"""Name, total, and what is used of it; None where that is not known."""
_MOST_QUEUED: Final = 1000


@router.get("/cluster")
async def get_cluster(
    request: Request, view: Cluster, runs: Runs, marks: Marks, ready: Ready, caller: WebCaller
) -> Response:
    info = await cluster.get_cluster(view, runs, marks, caller)
    ids = {run_id for node in info.nodes for run_id in node.runs}
    live = await db_read(runs.live)
    shown = {run.id: run for run in live if run.id in ids}
    ranks: dict[tuple[str, str], list[int]] = {}
    for run in shown.values():
        for worker in run.workers:
            ranks.setdefault((run.id, worker["node_id"]), []).append(worker["rank"])
    hosts: dict[tuple[str, str], list[Node]] = {}
    for node in info.nodes:
        if node.state != "DEAD":
            hosts.setdefault((node.hostname, node.ip), []).append(node)
    return page(
        request,
        "cluster.html",
        caller,
        info=info,
        runs=shown,
        ranks=ranks,
        totals=_totals(hosts),
        resources_of=partial(
            _resources_of, with_memory=all(len(each) == 1 for each in hosts.values())
        ),
        # the load of a host once, however many nodes it has
        loads={nodes[0].id: nodes[0].load for nodes in hosts.values()},
        lag_s=ready.lag_s(),
    )


def _resources_of(node: Node, *, with_memory: bool) -> list[Resource]:
    return _resources(node.resources_total, node.resources_used or {}, with_memory=with_memory)


def _resources(
    total: Mapping[str, float], used: Mapping[str, float], *, with_memory: bool
) -> list[Resource]:
    """Return the resources to show, CPUs and GPUs first, memory in bytes, without Ray's internal
    ones."""
    order = {"CPU": 0, "GPU": 1, "memory": 2}
    return [
        (name, _amount(name, amount), _amount(name, used[name]) if name in used else None)
        for name, amount in sorted(total.items(), key=lambda item: (order.get(item[0], 3), item[0]))
        if ":" not in name and name != "object_store_memory" and (with_memory or name != "memory")
    ]


def _totals(hosts: Mapping[tuple[str, str], Sequence[Node]]) -> list[Resource]:
    """Return the resources of all live nodes together. The memory of a host with several nodes
    counts once."""
    nodes = [node for each in hosts.values() for node in each]
    total: dict[str, float] = {}
    used: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.resources_total.items():
            if name != "memory":
                total[name] = total.get(name, 0.0) + amount
        for name, amount in (node.resources_used or {}).items():
            if name != "memory":
                used[name] = used.get(name, 0.0) + amount
    return [*_resources(total, used, with_memory=False), *_memory(hosts.values())]


def _memory(hosts: Collection[Sequence[Node]]) -> list[Resource]:
    """Return the memory of all hosts: what the machines have, or else what Ray may give away."""
    loads = [next((node.load for node in nodes if node.load), None) for nodes in hosts]
    known = [
        (load.memory_total_bytes, load.memory_used_bytes)
        for load in loads
        if load and load.memory_total_bytes is not None and load.memory_used_bytes is not None
    ]
    if loads and len(known) == len(loads):
        total, used = (sum(each) for each in zip(*known, strict=True))
        return [("Memory", cli_words.size(total), cli_words.size(used))]
    ray = sum(max(node.resources_total.get("memory", 0.0) for node in nodes) for nodes in hosts)
    return [("Memory", cli_words.size(ray), None)] if ray else []


def _amount(name: str, amount: float) -> str:
    return cli_words.size(amount) if name == "memory" else f"{amount:g}"


@router.get("/queue")
async def get_queue(request: Request, views: Views, caller: WebCaller) -> Response:
    """Show queued runs in the order in which they start: by priority, then by age."""
    where = RunFilter(project=caller.project, statuses=(RunStatus.QUEUED,))
    rows = await db_read(views.runs.find, where, _MOST_QUEUED)
    rows.sort(key=lambda run: (-run.priority, run.created_at, run.id))
    scaling = {row.id: row.stored_spec.scaling for row in rows}
    return page(
        request,
        "queue.html",
        caller,
        runs=await views.of(rows),
        scaling_of=scaling,
        most=_MOST_QUEUED,
    )
