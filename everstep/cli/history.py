"""Commands that tell what happened: attempts, failures, checkpoints, comparisons."""

from __future__ import annotations

import importlib
import webbrowser
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from everstep.cli.terminal import (
    Columns,
    Exit,
    RunArgument,
    Said,
    Terminal,
    command,
    terminal,
)
from everstep.client.download import Which, leaves_out_frozen
from everstep.client.runs import RunHandle
from everstep.errors import EverstepError, UsageError
from everstep.text import events as event_words
from everstep.text import failure as failure_words
from everstep.text import words
from everstep.text.events import summary
from everstep.text.words import differences
from everstep.wire import Checkpoint, LogLine, ReasonCode, Run, RunStatus
from everstep.wire.drills import StackReport
from everstep.wire.events import EventKind
from everstep.wire.figures import EpochSamples, Samples


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in EventKind if kind.startswith(incomplete)]


@command()
def logs(
    run_id: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only lines of this rank.")] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Only lines of this attempt; 0 is the driver.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="Only lines of this level or above, for example warning.")
    ] = "debug",
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Only so many of the last lines.")
    ] = None,
) -> None:
    """Print the log of all ranks and the driver, over all attempts."""
    out = terminal()
    if level.upper() not in _LEVELS:
        raise UsageError(
            f"--level {level!r} is not a level; use one of {', '.join(_LEVELS).lower()}"
        )
    lowest = _LEVELS.index(level.upper())
    read = partial(out.client().runs.get(run_id).logs, rank=rank, attempt=attempt)
    for line in _lines(read, tail, lowest, follow=follow):
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


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _lines(
    read: Callable[..., Iterator[LogLine]], tail: int | None, lowest: int, *, follow: bool
) -> Iterator[LogLine]:
    """Yield log lines from a level on; with ``tail`` only the last ones, and then new ones."""

    def is_shown(line: LogLine) -> bool:
        level = line.level.upper()
        return level not in _LEVELS or _LEVELS.index(level) >= lowest

    if tail is None:
        yield from filter(is_shown, read(follow=follow))
        return
    after, last = 0, deque[LogLine](maxlen=tail)
    for line in read():
        after = line.seq
        if is_shown(line):
            last.append(line)
    yield from last
    if follow:
        yield from filter(is_shown, read(follow=True, after=after))


@command()
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


@command()
def why(
    run_id: RunArgument,
    lines: Annotated[
        int,
        typer.Option(min=0, max=200, help="Number of last log lines of the first failing rank."),
    ] = 10,
) -> None:
    """Explain the failures of a run: cause, evidence, action and cost; show current stragglers, and
    what a run waits for that does not train."""
    out = terminal()
    run = out.client().runs.get(run_id)
    failures, report = run.failures(lines=lines), run.stragglers()
    still, doing = _standing_still(run), _doing(out, run)
    rehearsal = run.rehearsal()
    if out.as_json:
        out.json(
            {
                "status": run.status,
                "reason": run.reason,
                "failures": failures,
                "stragglers": report.stragglers,
                "standing_still": still,
                "doing": doing,
                "rehearsal": rehearsal,
            }
        )
        return
    out.line(summary(run.run).splitlines()[0])
    if run.reason is not None:
        out.line(f"{run.reason.code}: {run.reason.message}")
    for line in (*doing, *event_words.stragglers(report)):
        out.line(line)
    if still is not None:
        out.line(f"{event_words.standing_still(still)} (at {still.at.astimezone():%H:%M:%S})")
    if rehearsal.state != "none":
        out.line(rehearsal.text)
    for number, fault in enumerate(failures, start=1):
        out.line()
        at = f"{fault.at.astimezone():%H:%M:%S}"
        out.line(f"{number}. {at} {failure_words.headline(fault)}")
        for line in failure_words.story(fault):
            out.line(f"  {line}")
    if not failures and not doing and still is None:
        out.note("no failures recorded")


def _doing(out: Terminal, run: RunHandle) -> list[str]:
    """Return what a run does or waits for that does not train, and what is free where it waits for
    resources."""
    attempts = [] if run.status.terminal else run.attempts(workers=False)
    apart = event_words.built_apart(attempts[-1].built_apart) if attempts else []
    what = event_words.doing(run.run, attempts, datetime.now(UTC))
    found = [] if what is None else [what]
    lacks = (ReasonCode.WAITING_FOR_CAPACITY, ReasonCode.INFEASIBLE)
    if found and run.reason is not None and run.reason.code in lacks:
        with suppress(EverstepError):  # what the run waits for is said all the same
            cluster = out.client().cluster()
            found += [event_words.room(cluster.nodes)] if cluster.available else []
    return [*found, *apart]


def _standing_still(run: RunHandle) -> StackReport | None:
    """Return the newest report on ranks of which nothing has moved since; None if there is none, or
    if the run has moved on."""
    if run.status != RunStatus.RUNNING:
        return None
    newest = next((each for each in run.stack_reports() if each.complete and each.id is None), None)
    if newest is None or newest.attempt != run.attempt or (newest.step or 0) != (run.step or 0):
        return None
    return newest


def _show_metrics(found: dict[str, Any]) -> None:
    rows: list[tuple[object, ...]] = []
    for name, points in sorted(found["series"].items()):
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


@command(_show_metrics)
def metrics(
    run_id: RunArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="Only these metrics; default all.")
    ] = None,
    max_points: Annotated[
        int, typer.Option(min=4, max=10_000, help="Maximum number of points per metric.")
    ] = 500,
) -> dict[str, Any]:
    """Show the metrics of a run; with --json every point as step, unix seconds, value."""
    run = terminal().client().runs.get(run_id)
    return {"series": run.metrics(*(names or []), max_points=max_points)}


def show_samples(found: Samples) -> None:
    """Print the table of finished epochs."""
    show_epochs = Columns[EpochSamples](
        ("epoch", "samples", "used once", "duplicates", "missing", "digest"),
        lambda each: (
            each.epoch,
            each.samples,
            each.used_once,
            each.duplicates,
            each.missing,
            each.digest[:16],
        ),
        empty="no epoch has ended yet",
    )
    show_epochs(found.epochs)
    if found.origin is not None:
        origin = found.origin
        terminal().note(
            f"starts at step {origin.step} of {origin.run_id} ({origin.checkpoint}), which used "
            f"{origin.samples} samples of epoch {origin.epoch}"
        )


# ---------------------------------------------------------------- checkpoints

# Commands about the checkpoints of a run.

WhichArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[STEP|latest|best]",
        help="Checkpoint: a step, latest or best.",
        show_default=False,
    ),
]


def _show_checkpoints(found: list[Checkpoint] | Checkpoint) -> None:
    show_rows = Columns[Checkpoint](
        ("step", "epoch", "state", "size", "committed", "metrics", "digest"),
        lambda each: (
            each.step,
            each.epoch,
            each.state,
            words.size(each.size_bytes),
            words.ago(each.committed_at),
            words.numbers(each.metrics) or None,
            each.digest[:16],
        ),
        empty="no checkpoints yet",
        text=("metrics", "committed"),
        dispensable=("digest", "metrics", "epoch"),
    )
    if isinstance(found, list):
        show_rows(found)
    elif found.state == "corrupt":
        terminal().line(f"{found.name} is corrupt: {found.problem}", style="bold red")
    else:
        terminal().line(
            f"{found.name} is sound: {words.size(found.size_bytes)}, sizes and digests of all "
            "files match"
        )


@command(
    _show_checkpoints,
    ends=lambda found: (
        Exit.FAILED if not isinstance(found, list) and found.state == "corrupt" else Exit.SUCCEEDED
    ),
)
def checkpoints(
    run_id: RunArgument,
    which: WhichArgument = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Have the service verify every file of one, by default the latest. Exit code 1 if "
            "one is corrupt.",
        ),
    ] = False,
) -> list[Checkpoint] | Checkpoint:
    """List the checkpoints of a run, oldest first, or verify one."""
    named = None if which is None else _which(which)
    run = terminal().client().runs.get(run_id)
    if verify:
        return run.verify_checkpoint(named or "latest")
    return run.checkpoints() if named is None else [run.checkpoint(named)]


@command()
def download(
    run_id: RunArgument,
    which: WhichArgument = None,
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIRECTORY]", help="Target directory; default ./RUN-STEP.", show_default=False
        ),
    ] = None,
) -> Said:
    """Download a checkpoint. All files are verified before any appears in the directory."""
    out = terminal()
    named = _which(which or "latest")
    run = out.client().runs.get(run_id)
    checkpoint = run.checkpoint(named)
    target = directory or Path(f"{run_id}-{checkpoint.step}")
    _download(out, run, checkpoint, target)
    notes = [f"step {checkpoint.step}, {words.size(checkpoint.size_bytes)}, all files verified"]
    if any(target.glob("piece-*-of-*.pt")):
        notes.append(_joined(target))
    if leaves_out_frozen(target):
        notes.append(
            "model.pt holds trained parameters and buffers, not the frozen ones: build the model "
            "as the task does, then model.load_state_dict(weights, strict=False)"
        )
    value = {"directory": str(target.absolute()), "checkpoint": checkpoint}
    return Said(value, [str(target)], notes)


JOINING = "train_fn.checkpoints.sharded"


def _joined(target: Path) -> str:
    """Join the pieces of a sharded model, if this Python has torch. Return a note about it."""
    try:
        importlib.import_module(JOINING).join(target)
    except ImportError:
        return (
            "the model is sharded, and joining it needs torch: where that is installed, "
            f"python -m {JOINING} {target} joins its pieces into model.safetensors"
        )
    except ValueError as exc:
        return f"the model is sharded, and its pieces were left as they are: {exc}"
    return "the model is sharded: model.safetensors holds its joined weights"


def _which(text: str) -> Which:
    """Return the checkpoint that a text names. Raise UsageError."""
    if text not in ("latest", "best") and not (text.isascii() and text.isdigit()):
        raise UsageError(f"{text!r} is not a checkpoint; use a step, latest or best")
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


# ---------------------------------------------------------------- compare


def compare(ids: list[str]) -> None:
    """Print runs side by side: how they did, and where their specs differ."""
    out = terminal()
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
        ("time", *(run.progress and words.duration(run.progress.elapsed_s) for run in shown)),
        ("goodput", *(None if run.goodput is None else f"{run.goodput:.0%}" for run in shown)),
        ("restarts", *(run.restarts for run in shown)),
        ("steps lost", *(run.steps_lost for run in shown)),
        *((name, *(_metric(run, name) for run in shown)) for name in names),
    ]


def _metric(run: Run, name: str) -> str | None:
    return words.number(run.metrics[name]) if name in run.metrics else None


def open_page(address: str) -> None:
    """Open a page in a browser, and print its address."""
    out = terminal()
    if out.as_json:
        out.json({"url": address})
        return
    out.line(address)
    if out.is_interactive and not webbrowser.open(address):
        out.note("this machine has no browser; open the address elsewhere")
