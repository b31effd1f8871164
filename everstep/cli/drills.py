"""Commands that cause faults on purpose, and that train steps again to compare them."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from everstep.cli.terminal import Exit, RunArgument, Terminal, command, terminal
from everstep.client.runs import BEFORE_RUNNING
from everstep.errors import RunFailed
from everstep.text import failure, words
from everstep.wire.drills import Drill, DrillKind, DrillParity, DrillReport, DrillState


@command()
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
) -> None:
    """Inject a failure into a live run, once its ranks train. Exit code 1 if it did not recover, or
    its loss did not continue as before."""
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
    """Return whether the run recovered and its loss continued as before."""
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
        ("cost", failure.of_drill(report)),
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
    verdicts = {True: "continues as before", False: "DIFFERS", None: "not known yet"}
    return "; ".join([f"{verdicts[found.in_parity]}: {means}", *problems])


def _samples(found: DrillParity) -> str | None:
    if found.samples_used_once is None:
        return "the epoch has not ended yet; run `everstep show RUN --samples` later"
    return (
        "each used once"
        if found.samples_used_once
        else "NOT each used once; run `everstep show RUN --samples`"
    )


# ---------------------------------------------------------------- replays

# The command that trains steps of a run again, and says whether they are equal.


@command()
def replay(
    run_id: RunArgument,
    from_step: Annotated[
        int,
        typer.Option("--from", min=0, metavar="STEP", help="0, or the step of a checkpoint."),
    ],
    to_step: Annotated[
        int, typer.Option("--to", min=1, metavar="STEP", help="Last step to train again.")
    ],
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks; by default as many as trained these steps."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait for the end, and show the result."),
    ] = True,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="Maximum time to wait."),
    ] = None,
) -> None:
    """Train steps of a run again, in a run of its own, and compare every step. Exit code 1 unless
    all are equal."""
    out = terminal()
    begun = out.client().runs.get(run_id).replay(from_step, to_step, workers=workers)
    if not wait:
        out.json(begun.run) if out.as_json else out.line(begun.id)
        return
    if not out.as_json:
        out.note(f"{begun.id} trains steps {from_step + 1} to {to_step} of {run_id} again")
    with suppress(RunFailed):  # its row says how it ended
        begun.wait(timeout_s)
    found = begun.run
    result = found.replay_of
    if out.as_json:
        out.json(found)
    elif result is None or result.message is None:
        out.line(f"not proven: the replay ended {found.status} and compared nothing")
    else:
        out.line(result.message)
    if result is None or result.result != "equal":
        raise typer.Exit(Exit.FAILED)
