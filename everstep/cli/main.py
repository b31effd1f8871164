"""The command line: `everstep COMMAND`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from everstep import __version__
from everstep.cli import (
    admin,
    cluster,
    drills,
    history,
    local,
    observe,
    runs,
    service,
    submit,
    sweeps,
)
from everstep.cli.submit import Guide
from everstep.cli.terminal import JsonOption, UrlOption, begin
from everstep.spec.code import fix_hash_seed

app = typer.Typer(
    name="everstep",
    cls=Guide,
    help="Fault-tolerant distributed PyTorch training.\n\nExit codes: 0 success, 1 the run FAILED "
    "or was CANCELLED, 2 wrong usage or an invalid spec, 3 the service cannot be reached, 141 the "
    "reader of the output went away first.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"everstep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    json_: JsonOption = False,
    url: UrlOption = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")
    ] = False,
) -> None:
    """Options of every command. They can also follow the command's name."""
    begin(json_, url)


app.command()(service.serve)
app.command(cls=submit.SubmitCommand)(submit.submit)
app.command()(sweeps.sweep)
app.command()(local.validate)
app.command()(local.catalog)
app.command(cls=submit.SubmitCommand)(local.run)
app.command(cls=submit.SubmitCommand)(local.rehearse)
app.command()(local.init)
app.command()(runs.runs)
app.command()(observe.show)
app.command()(runs.watch)
app.command()(history.logs)
app.command()(history.events)
app.command()(history.why)
app.command()(observe.profile)
app.command()(history.metrics)
app.command()(observe.tensorboard)
app.command()(history.checkpoints)
app.command()(history.download)
app.command()(runs.cancel)
app.command()(runs.pause)
app.command()(runs.resume)
app.command()(runs.note)
app.command()(runs.delete)
app.command()(drills.drill)
app.command()(drills.replay)
app.command()(service.cluster)
app.command()(cluster.cordon)
app.command()(cluster.drain)
app.command()(service.login)
app.command()(service.logout)
app.add_typer(admin.project, name="project")
app.add_typer(admin.token, name="token")
app.add_typer(admin.alerts, name="alerts")
app.command()(admin.audit)
app.command()(service.storage)
app.command()(cluster.doctor)
app.command()(service.demo)


def main() -> None:
    """Run the ``everstep`` script."""
    if sys.argv[1:2] in (["run"], ["rehearse"]):  # trains here
        fix_hash_seed()
    app()


if __name__ == "__main__":
    main()
