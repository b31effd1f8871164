"""Commands about the checkpoints of a run: list, verify and download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from everstep.cli.options import JsonOption, RunArgument, UrlOption
from everstep.cli.terminal import Exit, Terminal, command, terminal
from everstep.client.checkpoint_download import leaves_out_frozen
from everstep.client.run_checkpoints import Which
from everstep.client.runs import RunHandle
from everstep.errors import UsageError
from everstep.text import words
from everstep.wire import Checkpoint

WhichArgument = Annotated[
    str, typer.Argument(metavar="[STEP|latest|best]", help="Checkpoint: a step, latest or best.")
]


@command
def checkpoints(run_id: RunArgument, json_: JsonOption = False, url: UrlOption = None) -> None:
    """List the checkpoints of a run, oldest first."""
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
        text=("metrics", "committed"),
        dispensable=("digest", "metrics", "epoch"),
    )


@command
def verify(
    run_id: RunArgument,
    which: WhichArgument = "latest",
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Have the service verify every file of a checkpoint. Exit code 1 if one is corrupt."""
    checkpoint = terminal().client().runs.get(run_id).verify_checkpoint(_which(which))
    if terminal().as_json:
        terminal().json(checkpoint)
    elif checkpoint.state == "corrupt":
        terminal().line(f"{checkpoint.name} is corrupt: {checkpoint.problem}", style="bold red")
    else:
        terminal().line(
            f"{checkpoint.name} is sound: {words.size(checkpoint.size_bytes)}, sizes and digests "
            "of all files match"
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
            metavar="[DIRECTORY]", help="Target directory; default ./RUN-STEP.", show_default=False
        ),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Download a checkpoint. All files are verified before any appears in the directory."""
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
        out.note(f"step {checkpoint.step}, {words.size(checkpoint.size_bytes)}, all files verified")
        if leaves_out_frozen(target):
            out.note(
                "model.pt holds trained parameters and buffers, not the frozen ones: build the "
                "model as the task does, then model.load_state_dict(weights, strict=False)"
            )


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
