"""The command line: `everstep COMMAND`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from everstep import __version__
from everstep.cli import admin as cli_alerts
from everstep.cli import admin as cli_team
from everstep.cli import cluster as cli_doctor
from everstep.cli import cluster as cli_node_watcher
from everstep.cli import cluster as cli_nodes
from everstep.cli import drills as cli_drills
from everstep.cli import drills as cli_replays
from everstep.cli import history as cli_checkpoints
from everstep.cli import history as cli_compare
from everstep.cli import history as cli_history
from everstep.cli import local as cli_local
from everstep.cli import local as cli_specs
from everstep.cli import login as cli_login
from everstep.cli import observe as cli_observe
from everstep.cli import observe as cli_tensorboard
from everstep.cli import rehearse as cli_rehearse
from everstep.cli import runs as cli_runs
from everstep.cli import service as cli_backup
from everstep.cli import service as cli_service
from everstep.cli import service as cli_storage
from everstep.cli import submit as cli_submit
from everstep.cli import sweeps as cli_sweeps
from everstep.cli.submit import Guide
from everstep.cli.terminal import JsonOption, UrlOption, begin
from everstep.spec.code import fix_hash_seed

app = typer.Typer(
    name="everstep",
    cls=Guide,
    help="Fault-tolerant distributed PyTorch training.\n\nExit codes: 0 success, 1 the run FAILED "
    "or was CANCELLED, 2 wrong usage or an invalid spec, 3 the service cannot be reached.",
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


app.command()(cli_service.serve)
app.command(cls=cli_submit.SubmitCommand)(cli_submit.submit)
app.add_typer(cli_sweeps.sweep, name="sweep")
app.command()(cli_sweeps.sweeps)
app.command()(cli_specs.validate)
app.command()(cli_specs.catalog)
app.command()(cli_local.run)
app.command(cls=cli_submit.SubmitCommand)(cli_rehearse.rehearse)
app.add_typer(cli_local.init, name="init")
app.command()(cli_runs.runs)
app.command()(cli_runs.show)
app.command()(cli_runs.watch)
app.command()(cli_compare.compare)
app.command("open")(cli_compare.open_page)
app.command()(cli_history.logs)
app.command()(cli_history.events)
app.command()(cli_history.why)
app.command()(cli_observe.stragglers)
app.command()(cli_observe.profile)
app.command()(cli_observe.stacks)
app.command()(cli_observe.goodput)
app.command()(cli_history.metrics)
app.command()(cli_tensorboard.tensorboard)
app.command()(cli_history.samples)
app.command()(cli_checkpoints.checkpoints)
app.command()(cli_checkpoints.verify)
app.command()(cli_checkpoints.download)
app.command()(cli_runs.cancel)
app.command()(cli_runs.pause)
app.command()(cli_runs.resume)
app.command()(cli_runs.note)
app.command()(cli_runs.delete)
app.command()(cli_drills.drill)
app.command()(cli_replays.replay)
app.command()(cli_service.cluster)
app.command()(cli_nodes.cordon)
app.command()(cli_nodes.uncordon)
app.command()(cli_nodes.drain)
app.command()(cli_node_watcher.node_watcher)
app.command()(cli_login.login)
app.command()(cli_login.logout)
app.command()(cli_login.context)
app.add_typer(cli_team.project, name="project")
app.add_typer(cli_team.token, name="token")
app.add_typer(cli_team.session, name="session")
app.add_typer(cli_alerts.alerts, name="alerts")
app.command()(cli_team.audit)
app.add_typer(cli_storage.storage, name="storage")
app.command()(cli_doctor.doctor)
app.command()(cli_backup.backup)
app.command()(cli_backup.restore)
app.command()(cli_service.demo)


def main() -> None:
    """Run the ``everstep`` script."""
    if sys.argv[1:2] in (["run"], ["rehearse"]):  # trains here
        fix_hash_seed()
    app()


if __name__ == "__main__":
    main()
