"""Commands about the history of a run: logs, failures, metrics and samples."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.options import JsonOption, RunArgument, UrlOption
from everstep.cli.terminal import command, terminal
from everstep.client.runs import RunHandle
from everstep.errors import UsageError
from everstep.text import events as event_words
from everstep.text import failure as failure_words
from everstep.text import words
from everstep.text.ending import summary
from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from everstep.wire.stacks import StackReport


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in EventKind if kind.startswith(incomplete)]


@command
def logs(
    run_id: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only lines of this rank.")] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Only lines of this attempt; 0 is the driver.")
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Print the log of all ranks and the driver, over all attempts."""
    out = terminal()
    for line in out.client().runs.get(run_id).logs(follow=follow, rank=rank, attempt=attempt):
        if out.as_json:
            out.json(line)
            continue
        source = "driver" if line.rank is None else f"a{line.attempt} r{line.rank}"
        style = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}.get(
            line.level.upper()
        )
        stamp = line.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
        for text in line.message.split("\n"):
            out.line(f"{stamp} {source:<7} {line.level.upper():<7} {text}", style=style)


@command
def events(
    run_id: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events until the run ends.")
    ] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Only events of this kind, for example failure. Repeatable.",
            autocompletion=_kinds,
        ),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Print what happened in a run, oldest first; with --json every event, without it those that
    have words."""
    out = terminal()
    wanted = set(kind or ())
    if unknown := wanted - set(EventKind):
        raise UsageError(
            f"{min(unknown)!r} is not a kind of event; use one of {', '.join(EventKind)}"
        )
    for item in out.client().runs.get(run_id).events(follow=follow):
        if wanted and item.kind not in wanted:
            continue
        if out.as_json:
            out.json(item)
            continue
        text = event_words.event(item) or (item.kind if wanted else None)
        if text is not None:
            style = "bold yellow" if item.kind == EventKind.FAILURE else None
            out.line(f"{item.at.astimezone():%Y-%m-%d %H:%M:%S}  {text}", style=style)


@command
def why(
    run_id: RunArgument,
    lines: Annotated[
        int,
        typer.Option(min=0, max=200, help="Number of last log lines of the first failing rank."),
    ] = 10,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Explain the failures of a run: cause, evidence, action and cost; and show current
    stragglers."""
    out = terminal()
    run = out.client().runs.get(run_id)
    failures, report = run.failures(lines=lines), run.stragglers()
    still = _standing_still(run)
    if out.as_json:
        out.json(
            {
                "status": run.status,
                "reason": run.reason,
                "failures": failures,
                "stragglers": report.stragglers,
                "standing_still": still,
            }
        )
        return
    out.line(summary(run.run).splitlines()[0])
    if run.reason is not None:
        out.line(f"{run.reason.code}: {run.reason.message}")
    for line in event_words.stragglers(report):
        out.line(line)
    if still is not None:
        out.line(f"{event_words.standing_still(still)} (at {still.at.astimezone():%H:%M:%S})")
    for number, fault in enumerate(failures, start=1):
        out.line()
        at = f"{fault.at.astimezone():%H:%M:%S}"
        out.line(f"{number}. {at} {failure_words.headline(fault)}")
        for line in failure_words.story(fault):
            out.line(f"  {line}")
    if not failures and still is None:
        out.note("no failures recorded")


def _standing_still(run: RunHandle) -> StackReport | None:
    """Return the newest report on ranks of which nothing has moved since; None if there is none, or
    if the run has moved on."""
    if run.status != RunStatus.RUNNING:
        return None
    newest = next((each for each in run.stack_reports() if each.complete and each.id is None), None)
    if newest is None or newest.attempt != run.attempt or (newest.step or 0) != (run.step or 0):
        return None
    return newest


@command
def metrics(
    run_id: RunArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="Only these metrics; default all.")
    ] = None,
    max_points: Annotated[
        int, typer.Option(min=4, max=10_000, help="Maximum number of points per metric.")
    ] = 500,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Show the metrics of a run; with --json every point as step, unix seconds, value."""
    series = terminal().client().runs.get(run_id).metrics(*(names or []), max_points=max_points)
    if terminal().as_json:
        terminal().json({"series": series})
        return
    rows: list[tuple[object, ...]] = []
    for name, points in sorted(series.items()):
        finite = [(value, step) for step, _, value in points if value is not None]
        if not points:
            rows.append((name, None, None, None, None))
            continue
        least, most = (min(finite), max(finite)) if finite else (None, None)
        extremes = [
            f"{words.number(found[0])} at {found[1]}" if found else None for found in (least, most)
        ]
        rows.append((name, points[-1][0], words.number(points[-1][2]), *extremes))
    terminal().table(
        ("metric", "step", "latest", "least", "most"),
        rows,
        empty="no metrics yet",
        text=("metric", "least", "most"),
    )


@command
def samples(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show for each finished epoch how often its samples were used, over the committed lineage."""
    found = terminal().client().runs.get(run_id).samples()
    if terminal().as_json:
        terminal().json(found)
        return
    headers = ("epoch", "samples", "used once", "duplicates", "missing", "digest")
    rows = [
        (each.epoch, each.samples, each.used_once, each.duplicates, each.missing, each.digest[:16])
        for each in found.epochs
    ]
    terminal().table(headers, rows, empty="no epoch has ended yet")
    if found.origin is not None:
        origin = found.origin
        terminal().note(
            f"starts at step {origin.step} of {origin.run_id} ({origin.checkpoint}), which used "
            f"{origin.samples} samples of epoch {origin.epoch}"
        )
