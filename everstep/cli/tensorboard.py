"""``everstep tensorboard``: the curves of runs in TensorBoard, kept up to date while they train."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.options import JsonOption, RunsArgument, UrlOption
from everstep.cli.terminal import Exit, command, terminal
from everstep.client.runs import RunHandle
from everstep.errors import Unavailable, UsageError

REFRESH_S = 10.0


@command
def tensorboard(
    run_ids: RunsArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 6006,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--download",
            metavar="DIRECTORY",
            help="Only download the files there, and start nothing.",
        ),
    ] = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Show runs in TensorBoard: download their files, start it, follow runs that train."""
    out = terminal()
    client = out.client()
    runs = [client.runs.get(run_id) for run_id in dict.fromkeys(run_ids)]
    if directory is not None:
        fetch(runs, directory)
        if out.as_json:
            out.json({"directory": str(directory.absolute())})
        else:
            out.line(str(directory))
            out.note("show it with: tensorboard --reload_multifile=true --logdir " + str(directory))
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "TensorBoard is not installed here: pip install tensorboard, or take the files "
            "elsewhere with --download DIRECTORY"
        )
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-tb-")))
        if not fetch(runs, place):
            out.note("there are no points yet; they appear a few seconds after the first step")
        shown = subprocess.Popen(served(place, host, port))
        stack.callback(end, shown)
        out.note(f"TensorBoard: http://{host}:{port}  (Ctrl-C ends it)")
        follow(runs, place, shown)
    if shown.returncode:
        raise out.fail(
            f"TensorBoard ended with exit code {shown.returncode}; its message is above",
            Exit.FAILED,
        )


def fetch(runs: Sequence[RunHandle], place: Path) -> int:
    """Bring the files of every run up to date, each in a folder; return how many bytes were new."""
    return sum(
        run.download_event_files(place / f"{run.run.name.replace('/', '_')}-{run.id}")
        for run in runs
    )


def served(place: Path, host: str, port: int) -> list[str]:
    """Return the command that shows the files below a directory."""
    program = [sys.executable, "-m", "tensorboard.main", "--logdir", str(place)]
    return [*program, "--host", host, "--port", str(port), "--reload_multifile=true"]


def follow(runs: Sequence[RunHandle], place: Path, shown: subprocess.Popen[bytes]) -> None:
    """Fetch what is new until TensorBoard ends. A service that is away for a while is asked
    again."""
    while True:
        try:
            shown.wait(REFRESH_S)
            return
        except subprocess.TimeoutExpired:
            pass
        try:
            fetch(runs, place)
        except Unavailable as exc:
            terminal().note(f"{exc}; trying again")


def end(shown: subprocess.Popen[bytes]) -> None:
    """End TensorBoard."""
    if shown.poll() is None:
        shown.terminate()
        try:
            shown.wait(10)
        except subprocess.TimeoutExpired:
            shown.kill()
            shown.wait()
