"""The command that injects a failure into a run and shows how it recovered."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.options import JsonOption, RunArgument, UrlOption
from everstep.cli.terminal import Exit, Terminal, command, terminal
from everstep.client.runs import BEFORE_RUNNING
from everstep.text import losses, words
from everstep.wire.drills import Drill, DrillKind, DrillParity, DrillReport, DrillState


@command
def drill(
    run_id: RunArgument,
    kind: Annotated[
        DrillKind, typer.Argument(metavar="KIND", help=f"What to break: {', '.join(DrillKind)}.")
    ],
    rank: Annotated[
        int, typer.Option(min=0, help="Rank to hit, by itself or through its node.")
    ] = 0,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait",
            help="Wait until the run trains, and then until it has recovered; show the report.",
        ),
    ] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0, help="Maximum time to wait.")
    ] = 600.0,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Inject a failure into a live run, once its ranks train. Exit code 1 if it did not recover, or
    its loss did not continue in parity."""
    out = terminal()
    run = out.client().runs.get(run_id)
    if wait and run.status in BEFORE_RUNNING:
        out.note(f"run {run.id} is {run.status}; waiting until its ranks train")
    begun = run.drill(kind, rank=rank, wait_s=timeout_s if wait else 0.0)
    if wait and not out.as_json:
        out.note(f"{begun.id}: {kind} of rank {rank}; waiting for the run to train again")
    found = begun.wait(timeout_s).drill if wait else begun.drill
    if out.as_json:
        out.json(found)
    elif wait:
        _show(out, found)
    else:
        out.line(found.id)
    if wait and not passed(found):
        raise typer.Exit(Exit.FAILED)


def passed(found: Drill) -> bool:
    """Return whether the run recovered and its loss continued in parity."""
    parity = found.report.parity if found.report else None
    return found.state is DrillState.RECOVERED and parity is not None and parity.in_parity is True


def _show(out: Terminal, found: Drill) -> None:
    out.fields(
        [
            ("drill", found.id),
            ("kind", found.kind),
            ("state", found.state),
            ("problem", found.problem),
        ]
    )
    if found.report is not None:
        out.fields(report_fields(found.report))


def report_fields(report: DrillReport) -> list[tuple[str, object]]:
    """Return names and values to show of a drill's report; None is left out."""
    phases = ", ".join(
        f"{name.replace('_', ' ')} {words.duration(seconds)}"
        for name, seconds in report.phases.items()
    )
    sizes = (report.world_size_before, report.world_size_after)
    return [
        (
            "hit",
            f"process {report.pid}{f' on node {report.node_id[:8]}' if report.node_id else ''}"
            if report.pid
            else None,
        ),
        ("damaged", report.checkpoint),
        ("verdict", report.verdict),
        (
            "trained again",
            None if report.total_s is None else f"after {words.duration(report.total_s)}",
        ),
        (
            "recovery",
            None
            if report.recovery_s is None
            else f"{words.duration(report.recovery_s)} after detection",
        ),
        ("phases", phases or None),
        ("ranks", None if None in sizes else f"{sizes[0]} -> {sizes[1]}"),
        (
            "resumed from",
            None
            if report.restored_step is None
            else f"step {report.restored_step} ({report.restored_from})",
        ),
        (f"{losses.unit(report)}s lost", losses.of_drill(report)),
        ("loss", _parity(report.parity) if report.parity else None),
        ("samples", _samples(report.parity) if report.parity else None),
        ("note", report.note),
    ]


def _parity(found: DrillParity) -> str:
    means = (
        f"mean {words.number(found.loss_before)} before, {words.number(found.loss_after)} over "
        "the next "
    )
    means += words.count(found.num_steps_after, "step")
    problems = [
        f"{what} {', '.join(map(str, steps))}"
        for what, steps in (
            ("missing steps", found.missing_steps),
            ("steps with two losses", found.conflicting_steps),
        )
        if steps
    ]
    verdict = {True: "in parity", False: "NOT in parity", None: "not known yet"}[found.in_parity]
    return "; ".join([f"{verdict}: {means}", *problems])


def _samples(found: DrillParity) -> str | None:
    if found.samples_used_once is None:
        return "the epoch has not ended yet; run `everstep samples` later"
    return (
        "each used once"
        if found.samples_used_once
        else "NOT each used once; run `everstep samples`"
    )
