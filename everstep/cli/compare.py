"""The commands that show runs elsewhere than alone: `everstep compare` and `everstep open`."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from everstep.cli.completion import run_ids
from everstep.cli.options import JsonOption, RunsArgument, UrlOption
from everstep.cli.terminal import command, terminal
from everstep.client.runs import RunHandle
from everstep.errors import UsageError
from everstep.text import words
from everstep.text.differences import differences
from everstep.wire import Run

OpenedArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Id of a run; default the list of runs.",
        show_default=False,
        autocompletion=run_ids,
    ),
]


@command
def compare(run_ids: RunsArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show runs side by side: how they did, and where their specs differ."""
    out = terminal()
    ids = list(dict.fromkeys(run_ids))
    if len(ids) < 2:
        raise UsageError("name at least two runs to compare")
    client = out.client()
    runs = [client.runs.get(run_id) for run_id in ids]
    found = differences([run.spec().model_dump(mode="json") for run in runs])
    if out.as_json:
        out.json(
            {
                "runs": [run.run for run in runs],
                "differences": {
                    path: dict(zip(ids, values, strict=True)) for path, values in found
                },
            }
        )
        return
    rows = [*_figures(runs), *((path, *values) for path, values in found)]
    headers = ("", *ids)
    out.table(headers, rows, empty="", text=("",))
    if not found:
        out.note("their specs are equal, except perhaps for the name")


def _figures(runs: list[RunHandle]) -> list[tuple[object, ...]]:
    """Return the rows of the comparison: a name, and the value of each run."""
    shown = [run.run for run in runs]
    names = sorted({name for run in shown for name in run.metrics})
    return [
        ("name", *(run.name for run in shown)),
        ("status", *(run.status for run in shown)),
        ("steps", *(words.progress(run) for run in shown)),
        ("time", *(None if run.progress is None else _elapsed(run) for run in shown)),
        ("goodput", *(None if run.goodput is None else f"{run.goodput:.0%}" for run in shown)),
        ("restarts", *(run.restarts for run in shown)),
        ("steps lost", *(run.steps_lost for run in shown)),
        *((name, *(_metric(run, name) for run in shown)) for name in names),
    ]


def _elapsed(run: Run) -> str | None:
    return None if run.progress is None else words.duration(run.progress.elapsed_s)


def _metric(run: Run, name: str) -> str | None:
    return words.number(run.metrics[name]) if name in run.metrics else None


@command
def open_page(
    run_id: OpenedArgument = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Open the page of a run in a browser, and print its address."""
    out = terminal()
    client = out.client()
    address = f"{client.url}/runs"
    if run_id is not None:
        run = client.runs.get(run_id)
        address = run.links.dashboard or f"{client.url}/runs/{run.id}"
    if out.as_json:
        out.json({"url": address})
        return
    out.line(address)
    if out.is_interactive and not webbrowser.open(address):
        out.note("this machine has no browser; open the address elsewhere")
