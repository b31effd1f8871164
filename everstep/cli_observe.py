"""Where time goes: `everstep goodput` and `everstep stragglers`."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep import cli_words as words
from everstep.cli_runs import RunArgument
from everstep.cli_terminal import JsonOption, UrlOption, command, terminal
from everstep.wire import GoodputBuckets


@command
def goodput(
    run_id: Annotated[
        str | None, typer.Argument(metavar="[RUN_ID]", help="One run; without, all projects.", show_default=False)
    ] = None,
    project: Annotated[str | None, typer.Option(help="This project only.")] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Show where the wall time of a run, or of each project's runs, went."""
    out = terminal()
    if run_id is not None:
        found = out.client().runs.get(run_id).goodput()
        if out.as_json:
            out.json(found)
            return
        out.table(("bucket", "time", "share"), _rows(found.buckets, found.wall_s), empty="no time has passed yet")
        return
    projects = out.client().goodput(project)
    if out.as_json:
        out.json({"items": projects})
        return
    for each in projects:
        share = "" if each.goodput is None else f", {each.goodput:.1%} of the time with resources trained steps that count"
        out.line(f"{each.project}: {words.count(each.runs, 'run')}, {words.duration(each.wall_s)}{share}")
        out.table(("bucket", "time", "share"), _rows(each.buckets, each.wall_s), empty="no time has passed yet")
    if not projects:
        out.note("no runs")


def _rows(buckets: GoodputBuckets, wall_s: float) -> list[tuple[object, ...]]:
    spent = buckets.model_dump()
    return [(name, words.duration(spent[name]), f"{spent[name] / wall_s:.1%}" if wall_s else None) for name in spent if spent[name]]


@command
def stragglers(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show each rank's own time in a step, how long it waits for the others, and who holds them up."""
    out = terminal()
    report = out.client().runs.get(run_id).stragglers()
    if out.as_json:
        out.json(report)
        return
    out.table(
        ("rank", "node", "micro-batches", "own time", "waits", "skew"),
        [
            (
                each.rank,
                each.node_id[:8],
                each.micro_batches,
                f"{each.own_s * 1e3:.1f} ms",
                f"{each.wait_s * 1e3:.1f} ms",
                each.skew,
            )
            for each in report.ranks
        ],
        empty="no times yet: they come after some seconds of training with two ranks or more",
    )
    for line in words.stragglers(report):
        out.line(line)
