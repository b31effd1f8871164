"""Commands about runs: submit, look, follow, stop, fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from everstep.cli.terminal import (
    Exit,
    JsonOption,
    SpecArgument,
    TaskOption,
    Terminal,
    UrlOption,
    command,
    exit_code_of_status,
    terminal,
)
from everstep.cli.watch import watch as watch_run
from everstep.client.runs import RunHandle, Which
from everstep.code.source import with_code
from everstep.errors import UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.plain_text import printable
from everstep.spec.run_spec import RunSpec, parse_spec
from everstep.spec.yaml_file import read_spec
from everstep.text import words
from everstep.wire import Checkpoint

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run: run_…")]
WhichArgument = Annotated[
    str, typer.Argument(metavar="[STEP|latest|best]", help="Which checkpoint.")
]


@command
def submit(
    spec: SpecArgument = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Override a field, for example train.epochs=3."
        ),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--code",
            metavar="DIRECTORY",
            help="Upload this code and run it in place of the spec's task.",
        ),
    ] = None,
    task: TaskOption = None,
    train_fn: Annotated[
        str | None,
        typer.Option(
            "--train-fn", metavar="MODULE:FUNCTION", help="Ray Train function in that code."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the run until it has ended.")
    ] = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The same key and spec give the same run, however often."),
    ] = None,
    create_project: Annotated[
        bool,
        typer.Option("--create-project", help="Make the run's project where it does not exist."),
    ] = False,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Submit a run; exit code 2 for a spec with faults, each of which is named."""
    raw, archive = with_code(None if spec is None else read_spec(spec), code, task, train_fn)
    raw = apply_overrides(raw, overrides or [])
    parsed = parse_spec(raw)
    client = terminal().client()
    if archive is not None:
        client.code.upload_packed(archive, project=parsed.project, create_project=create_project)
    run = client.runs.create(parsed, idempotency_key, create_project=create_project)
    _note_best_mode(raw, parsed)
    if watch:
        _watch_to_the_end(run)
    elif terminal().as_json:
        terminal().json(run.run)
    else:
        terminal().line(run.id)
        terminal().note(f"{run.name} is {run.status}; `everstep watch {run.id}` shows it")


def _note_best_mode(raw: dict[str, Any], spec: RunSpec) -> None:
    """Say which mode was inferred: a run that keeps its worst checkpoint is found out at its
    end."""
    checkpoint = spec.checkpoint
    if (
        checkpoint.best_metric is not None
        and (raw.get("checkpoint") or {}).get("best_mode") is None
    ):
        size = "smallest" if checkpoint.best_mode == "min" else "largest"
        terminal().note(
            f"the best checkpoint is that of the {size} {checkpoint.best_metric} "
            f"(checkpoint.best_mode {checkpoint.best_mode}, "
            "inferred from its name)"
        )


@command
def runs(
    status: Annotated[
        list[str] | None,
        typer.Option(metavar="STATUS", help="Only these statuses, for example RUNNING."),
    ] = None,
    project: Annotated[str | None, typer.Option(metavar="NAME", help="Only this project.")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only runs of this name.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only runs with this tag.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most runs to show.")] = 50,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """List runs, newest first."""
    found = terminal().client().runs.list(status=status, project=project, name=name, tag=tag)
    shown = [run.run for run, _ in zip(found, range(limit), strict=False)]
    if terminal().as_json:
        terminal().json(shown)
        return
    headers = ("id", "name", "status", "step", "ranks", "loss", "created", "reason")
    terminal().table(
        headers,
        [
            (
                run.id,
                run.name,
                run.status,
                words.progress(run),
                run.world_size,
                words.number(run.metrics["loss"]) if "loss" in run.metrics else None,
                words.ago(run.created_at),
                run.reason.code if run.reason else None,
            )
            for run in shown
        ],
        empty="no runs",
    )


@command
def show(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show one run."""
    run = terminal().client().runs.get(run_id).run
    if terminal().as_json:
        terminal().json(run)
        return
    checkpoint = run.latest_checkpoint
    survives = ", ".join(run.protection.survives) or "nothing"
    lost = words.count(run.protection.worst_case_steps_lost, "step")
    terminal().fields(
        [
            ("id", run.id),
            ("name", run.name),
            ("project", run.project),
            ("status", run.status),
            ("reason", f"{run.reason.code}: {run.reason.message}" if run.reason else None),
            ("tags", ", ".join(f"{key}={value}" for key, value in run.tags.items()) or None),
            ("created", words.ago(run.created_at)),
            (
                "forked from",
                f"step {run.forked_from.step} of {run.forked_from.run_id}"
                if run.forked_from
                else None,
            ),
            ("step", f"{words.progress(run)}, epoch {run.epoch}"),
            ("ranks", run.world_size),
            ("metrics", words.numbers(run.metrics) or None),
            (
                "best",
                f"{run.best.metric} {words.number(run.best.value)} at step {run.best.step}"
                if run.best
                else None,
            ),
            (
                "checkpoint",
                f"step {checkpoint.step}, {words.size(checkpoint.size_bytes)}"
                if checkpoint
                else None,
            ),
            ("attempt", f"{run.attempt} of submission {run.submission}"),
            (
                "failures",
                (
                    f"{words.count(run.restarts, 'restart')}, "
                    f"{words.count(run.steps_lost, 'step')} "
                    "lost"
                ),
            ),
            (
                "survives",
                f"loss of {survives}; at worst {lost} would be lost"
                if not run.status.terminal
                else None,
            ),
            ("protection", run.protection.message if not run.status.terminal else None),
            ("samples", run.guarantee),
            ("goodput", f"{run.goodput:.0%}" if run.goodput is not None else None),
            ("Ray job", run.links.ray_job),
        ]
    )


@command
def watch(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show a run until it has ended; the exit code tells how: 0 SUCCEEDED, 1 FAILED or
    CANCELLED."""
    _watch_to_the_end(terminal().client().runs.get(run_id))


def _watch_to_the_end(run: RunHandle) -> None:
    out = terminal()
    if not out.as_json:
        out.note(f"{run.id} ({run.name})")
    ended = watch_run(out, run).run
    code = exit_code_of_status(ended.status)
    if out.as_json:
        out.json(ended)
    else:
        for line in words.summary(ended).splitlines():
            out.line(line, style=words.STATUS_STYLES[ended.status])
        if code != Exit.SUCCEEDED and ended.restarts + (ended.status == "FAILED"):
            out.note(
                f"`everstep why {ended.id}` tells its failures, `everstep logs {ended.id}` what "
                "it wrote"
            )
    if code != Exit.SUCCEEDED:
        raise typer.Exit(code)


@command
def logs(
    run_id: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more until the run has ended.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Only this attempt; 0 is the driver's.")
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Print what the ranks and the driver logged, over all attempts."""
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
def why(
    run_id: RunArgument,
    lines: Annotated[
        int, typer.Option(min=0, max=200, help="Most last lines of the first failing rank.")
    ] = 10,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Tell what went wrong, the evidence, what was done about it and what it cost; and who holds
    the others up now."""
    out = terminal()
    run = out.client().runs.get(run_id)
    failures, report = run.failures(lines=lines), run.stragglers()
    if out.as_json:
        out.json(
            {
                "status": run.status,
                "reason": run.reason,
                "failures": failures,
                "stragglers": report.stragglers,
            }
        )
        return
    out.line(words.summary(run.run).splitlines()[0])
    if run.reason is not None:
        out.line(f"{run.reason.code}: {run.reason.message}")
    for line in words.stragglers(report):
        out.line(line)
    for number, fault in enumerate(failures, start=1):
        out.line()
        for line in f"{number}. {fault.at.astimezone():%H:%M:%S} {words.failure(fault)}".split(
            "\n"
        ):
            out.line(line)
    if not failures:
        out.note("no failure was recorded")


@command
def metrics(
    run_id: RunArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="Only these metrics.")
    ] = None,
    max_points: Annotated[
        int, typer.Option(min=4, max=10_000, help="Most points of one series.")
    ] = 500,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Show the run's metrics; with --json every point: step, unix seconds, value."""
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
    terminal().table(("metric", "step", "latest", "least", "most"), rows, empty="no metrics yet")


@command
def samples(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show for each epoch that ended how often its samples were used, over the committed
    lineage."""
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
            f"begins at step {origin.step} of {origin.run_id} ({origin.checkpoint}), which used "
            f"{origin.samples} samples of epoch "
            f"{origin.epoch}"
        )


@command
def checkpoints(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """List the run's checkpoints, oldest first."""
    found = terminal().client().runs.get(run_id).checkpoints()
    if terminal().as_json:
        terminal().json(found)
        return
    headers = ("step", "epoch", "state", "size", "committed", "metrics", "digest")
    terminal().table(
        headers,
        [
            (
                each.step,
                each.epoch,
                each.state,
                words.size(each.size_bytes),
                words.ago(each.committed_at),
                words.numbers(each.metrics) or None,
                each.digest[:16],
            )
            for each in found
        ],
        empty="no checkpoints yet",
    )


@command
def verify(
    run_id: RunArgument,
    which: WhichArgument = "latest",
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Have the service read a checkpoint back; exit code 1 where a file is not what it should
    be."""
    checkpoint = terminal().client().runs.get(run_id).verify_checkpoint(_which(which))
    if terminal().as_json:
        terminal().json(checkpoint)
    elif checkpoint.state == "corrupt":
        terminal().line(f"{checkpoint.name} is corrupt: {checkpoint.problem}", style="bold red")
    else:
        terminal().line(
            f"{checkpoint.name} is sound: {words.size(checkpoint.size_bytes)}, every file has its "
            "size and digest"
        )
    if checkpoint.state == "corrupt":
        raise typer.Exit(Exit.FAILED)


@command
def download(
    run_id: RunArgument,
    which: WhichArgument = "latest",
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIRECTORY]", help="Where to; by default ./RUN-STEP.", show_default=False
        ),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Fetch a checkpoint; every file is verified before any appears."""
    out = terminal()
    named = _which(which)
    run = out.client().runs.get(run_id)
    checkpoint = run.checkpoint(named)
    target = directory or Path(f"{run_id}-{checkpoint.step}")
    _download(out, run, checkpoint, target)
    if out.as_json:
        out.json({"directory": str(target.absolute()), "checkpoint": checkpoint})
    else:
        out.line(str(target))
        out.note(
            f"step {checkpoint.step}, {words.size(checkpoint.size_bytes)}, every file verified"
        )


def _which(text: str) -> Which:
    """Raises UsageError where it names no checkpoint."""
    if text not in ("latest", "best") and not (text.isascii() and text.isdigit()):
        raise UsageError(f"{text!r} names no checkpoint; give a step, latest or best")
    return cast(Which, text)


def _download(out: Terminal, run: RunHandle, checkpoint: Checkpoint, target: Path) -> None:
    if not out.is_interactive:
        run.download_checkpoint(checkpoint.step, target)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=out.err, transient=True) as progress:
        task = progress.add_task(f"step {checkpoint.step}", total=checkpoint.size_bytes)
        run.download_checkpoint(
            checkpoint.step, target, on_bytes=lambda num_bytes: progress.advance(task, num_bytes)
        )


@command
def cancel(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Stop a run for good, after a last checkpoint."""
    _told(terminal().client().runs.get(run_id).cancel())


@command
def pause(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Stop a run after a checkpoint and give its resources back."""
    _told(terminal().client().runs.get(run_id).pause())


@command
def resume(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """Queue a paused run again; it goes on from its last checkpoint."""
    _told(terminal().client().runs.get(run_id).resume())


def _told(run: RunHandle) -> None:
    if terminal().as_json:
        terminal().json(run.run)
    else:
        terminal().line(f"{run.id} {printable(run.name)} is {run.status}")
