"""Pages of sweeps: the list, and one sweep with its best run, its curves and its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse

from everstep.wire import RunStatus
from everstep.wire.sweep import Sweep, SweepRun, best_first
from service.annexes.sweeps import routes as sweeps
from service.annexes.sweeps.routes import run_of_sweep
from service.annexes.sweeps.store import SweepRow
from service.api.context import Context
from service.web import compare
from service.web.rendering import PageRoute, page, progress_share
from service.web.session import CheckedForm, WebCaller

router: Final = APIRouter(prefix="/sweeps", route_class=PageRoute, include_in_schema=False)

_PAGE_SWEEPS: Final = 50
MOST_CURVES: Final = 8
"""Runs whose curves are drawn: each has a colour of its own."""


async def web_sweep(sweep_id: str, context: Context, caller: WebCaller) -> SweepRow:
    """Return the sweep in the path. Sweeps of other projects do not exist for this caller: 404."""
    return await sweeps.visible_sweep(sweep_id, context, caller)


WebSweep = Annotated[SweepRow, Depends(web_sweep)]


@router.get("")
async def get_sweeps(
    request: Request,
    context: Context,
    caller: WebCaller,
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Show every sweep, newest first."""
    found, after = await sweeps.page_of_sweeps(
        context, caller, None, (), _PAGE_SWEEPS, cursor or None
    )
    return page(request, "sweeps.html", caller, sweeps=found, after=after, cursor=cursor)


@router.get("/{sweep_id}")
async def get_sweep(
    request: Request,
    row: WebSweep,
    context: Context,
    caller: WebCaller,
    has_curves: bool = True,
) -> Response:
    """Show one sweep. An update of a page that was opened before there were curves loads the page
    anew once there are."""
    [sweep] = await sweeps.sweep_answers(context, [row])
    runs = [run_of_sweep(trial) for trial in await sweeps.trials_of_sweep(context, row.id)]
    ranked = best_first(runs, sweep.mode)
    drawn = [str(run.run_id) for run in ranked if run.status not in (None, RunStatus.QUEUED)]
    drawn = drawn[:MOST_CURVES]
    if drawn and not has_curves:
        return Response(headers={"HX-Refresh": "true"})
    return page(
        request,
        "sweep.html",
        caller,
        sweep=sweep,
        runs=ranked,
        paths=list(runs[0].params),
        drawn=drawn,
        best=_best(sweep, runs),
        parallel=_parallel(sweep, ranked),
        progress_share=progress_share,
    )


@router.post("/{sweep_id}/{action}")
async def post_action(
    action: Literal["cancel", "delete"],
    row: WebSweep,
    context: Context,
    caller: WebCaller,
    form: CheckedForm,
) -> Response:
    """Cancel the sweep, or delete it, with its runs if the form says so."""
    row = await sweeps.controlled_sweep(row, caller)
    if action == "delete":
        await sweeps.delete_sweep(row, context, caller, runs="runs" in form)
        return RedirectResponse("/sweeps", 303)
    await sweeps.cancel_sweep(row, context)
    return RedirectResponse(f"/sweeps/{row.id}", 303)


def _parallel(sweep: Sweep, ranked: Sequence[SweepRun]) -> compare.Picture | None:
    """Return parallel coordinates of the runs with a value, the best one drawn last, on top."""
    runs = [run for run in ranked if run.value is not None and run.run_id is not None][::-1]
    paths = list(ranked[0].params)[: compare.MOST_AXES - 1]
    columns = [(path, [run.params[path] for run in runs]) for path in paths]
    columns.append((sweep.metric, [run.value for run in runs]))
    names = [(str(run.run_id), f"run {run.number}") for run in runs]
    return compare.drawn(columns, names, len(ranked[0].params) - len(paths))


def _best(sweep: Sweep, runs: Sequence[SweepRun]) -> SweepRun | None:
    return None if sweep.best is None else runs[sweep.best.number]
