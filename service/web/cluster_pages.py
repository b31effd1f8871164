"""The pages *cluster* and *queue*: which runs are on which nodes, and why runs wait."""

from __future__ import annotations

from typing import Final, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from everstep.text import words as cli_words
from everstep.wire import RunStatus
from service.api import cluster
from service.api.context import Context
from service.api.problems import invalid_request
from service.api.runs import run_answers
from service.db.run_lookup import RunFilter
from service.web.rendering import PageRoute, page
from service.web.session import CheckedForm, WebCaller

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

_MOST_QUEUED: Final = 1000
_MARKS: Final = {"cordon": cluster.cordon_node, "uncordon": cluster.uncordon_node}


@router.get("/cluster")
async def get_cluster(request: Request, context: Context, caller: WebCaller) -> Response:
    info = await cluster.get_cluster(context, caller)
    ids = {run_id for node in info.nodes for run_id in node.runs}
    live = await context.database_call(context.runs.live)
    totals: dict[str, float] = {}
    for node in info.nodes:
        if node.state != "DEAD":
            for name, amount in node.resources_total.items():
                totals[name] = totals.get(name, 0.0) + amount
    return page(
        request,
        "cluster.html",
        caller,
        info=info,
        runs={run.id: run for run in live if run.id in ids},
        totals=_worth_showing(totals),
        worth_showing=_worth_showing,
        may_mark=caller.may("admin"),
        lag_s=context.reconciler_lag_s(),
    )


def _worth_showing(resources: dict[str, float]) -> list[tuple[str, str]]:
    """Return the resources to show, CPUs and GPUs first, memory in bytes, without Ray's internal
    ones."""
    order = {"CPU": 0, "GPU": 1, "memory": 2}
    named = [
        (name, amount)
        for name, amount in resources.items()
        if ":" not in name and name != "object_store_memory"
    ]
    return [
        (name, cli_words.size(amount) if name == "memory" else f"{amount:g}")
        for name, amount in sorted(named, key=lambda item: (order.get(item[0], 3), item[0]))
    ]


@router.post("/cluster/nodes/{node_id}/{word}")
async def post_mark(
    node_id: str,
    word: Literal["cordon", "uncordon", "drain"],
    context: Context,
    caller: WebCaller,
    form: CheckedForm,
) -> Response:
    reason = form.get("reason", "").strip() or None
    try:
        if word == "drain":
            minutes = form.get("deadline_min", "").strip()
            deadline_s = float(minutes) * 60 if minutes else None
            await cluster.drain_node(
                node_id, context, caller, cluster.DrainOrder(reason=reason, deadline_s=deadline_s)
            )
        else:
            await _MARKS[word](node_id, context, caller, cluster.NodeOrder(reason=reason))
    except (ValidationError, ValueError) as exc:
        raise invalid_request(
            "deadline",
            msg="enter minutes above 0, at most 30 days, and a reason of at most 1000 characters",
        ) from exc
    return RedirectResponse("/cluster", 303)


@router.get("/queue")
async def get_queue(request: Request, context: Context, caller: WebCaller) -> Response:
    """Show queued runs in the order in which they start: by priority, then by age."""
    where = RunFilter(project=caller.project, statuses=(RunStatus.QUEUED,))
    rows = await context.database_call(context.runs.find, where, _MOST_QUEUED)
    rows.sort(key=lambda run: (-run.priority, run.created_at, run.id))
    scaling = {row.id: row.stored_spec.scaling for row in rows}
    return page(
        request,
        "queue.html",
        caller,
        runs=await run_answers(context, rows),
        scaling_of=scaling,
        most=_MOST_QUEUED,
    )
