"""Commands for a service of one's own: start and stop it, its storage."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from everstep.cli.terminal import Columns, Exit, Said, command, terminal
from everstep.client.address import (
    LogIn,
    checked_token,
    checked_url,
    is_loopback,
    read_contexts,
    write_contexts,
)
from everstep.client.client import Client
from everstep.options.model import FlagValue
from everstep.options.serve import (
    FLAGS,
    OPTIONS,
    ServeOptions,
    as_variables,
    help_of,
    is_list,
    is_switch,
)
from everstep.supported import install_command
from everstep.text import words
from everstep.wire import ClusterInfo, Node
from everstep.wire.cluster import StorageStatus

SERVER_MODULES = ("fastapi", "uvicorn", "sqlalchemy", "ray", "torch", "torchvision")


def require_server() -> None:
    """Exit with a message if only the client is installed."""
    missing = [name for name in SERVER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        message = (
            f"only Everstep's client is installed in this Python ({', '.join(missing)} missing); "
            f"run: {install_command('server')}"
        )
        raise terminal().fail(message, Exit.USAGE, {"code": "server_missing", "missing": missing})


def _takes_serve_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of ServeOptions as keyword parameters, for typer to read."""

    def parameter(name: str) -> inspect.Parameter:
        kind: Any = bool if is_switch(name) else list[str] | None if is_list(name) else str | None
        if name in FLAGS:
            option = FLAGS[name]
            info = typer.Option(option.flag, metavar=option.metavar or None, help=help_of(name))
        else:  # only to say what to set instead
            kind, info = str | None, typer.Option(f"--{name.replace('_', '-')}", hidden=True)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if is_switch(name) else None,
            annotation=Annotated[kind, info],
        )

    own = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(function, eval_str=True).parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*map(parameter, OPTIONS), *own]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


@command(options=("json_",))
@_takes_serve_flags
def serve(**flags: FlagValue | None) -> None:
    """Run the service, by default with a Ray cluster of its own on this machine (EVERSTEP_HOME,
    default ~/.everstep)."""
    require_server()
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    for name in given.keys() - FLAGS.keys():
        variable = OPTIONS[name].variable or OPTIONS[name].file
        message = f"--{name.replace('_', '-')} is a setting, not an option; set {variable} instead"
        raise terminal().fail(message, Exit.USAGE, {"code": "setting", "variable": variable})
    ServeOptions.read(os.environ, given)
    # The service reads one source, its environment, where other users do not see a password.
    environ = {**os.environ, **as_variables(given)}
    if terminal().as_json:
        environ[OPTIONS["log_format"].variable] = "json"
    # The service takes this process's place: signals and the exit code are its own.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "service.process.serve"], environ)


def _show_cluster(info: ClusterInfo) -> None:
    out = terminal()
    if not info.available:
        out.note("Ray does not respond; this may be out of date")
    out.fields(
        [
            ("Ray", info.ray_version),
            ("address", info.address),
            # Ray's own address needs a token that only the service has
            ("dashboard", f"{out.client().url}/ray/" if info.dashboard_url else None),
        ]
    )
    hosts = Counter((node.hostname, node.ip) for node in info.nodes if node.state != "DEAD")
    show_nodes = Columns[Node](
        ("node", "host", "ip", "state", "used", "runs", "cordoned"),
        lambda node: (
            node.id[:12],
            node.hostname + (" (head)" if node.is_head else ""),
            node.ip,
            node.state,
            _resources(node, has_own_host=hosts[node.hostname, node.ip] < 2),
            ", ".join(node.runs) or None,
            _mark(node),
        ),
        empty="no nodes",
        text=("host", "used", "runs", "cordoned"),
        dispensable=("ip", "used", "cordoned"),
    )
    show_nodes(info.nodes)
    for at in info.coming_back:
        out.note(f"a missing node is started again at {at.astimezone():%H:%M:%S}")


@command(_show_cluster)
def cluster() -> ClusterInfo:
    """Show the nodes of the Ray cluster and the runs on them."""
    return terminal().client().cluster()


def _mark(node: Node) -> str | None:
    """Return who cordoned or drained a node, and why."""
    if node.mark is None:
        return None
    text = f"by {node.mark.by}, {words.ago(node.mark.at)}"
    if node.mark.deadline is not None:
        text += f", until {node.mark.deadline.astimezone():%H:%M:%S}"
    return f"{text}: {node.mark.reason}" if node.mark.reason else text


def _resources(node: Node, *, has_own_host: bool) -> str:
    """Return what is used of CPUs and GPUs, and the memory, as text. The memory of a host with
    several nodes is not each node's."""
    used, total = node.resources_used, node.resources_total
    parts = [
        f"{total[name]:g} {name}"
        if used is None
        else f"{used.get(name, 0):g}/{total[name]:g} {name}"
        for name in ("CPU", "GPU")
        if total.get(name)
    ]
    if total.get("memory") and has_own_host:
        parts.append(words.size(total["memory"]))
    return ", ".join(parts) or "none"


@command(options=("json_",))
def demo(
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the service running at the end, and print its URLs."),
    ] = False,
    out: Annotated[
        str, typer.Option(metavar="DIRECTORY", help="Directory for the trained model.")
    ] = "out/demo",
) -> None:
    """Train on three local nodes, kill one of them, and watch the run continue."""
    from everstep.cli.demo import run_demo

    require_server()
    raise typer.Exit(run_demo(terminal(), keep=keep, out=out))


# ---------------------------------------------------------------- storage


def _show_storage(found: StorageStatus) -> None:
    out = terminal()
    out.fields(
        [
            ("storage", found.uri),
            ("its id", found.found_id),
            ("the database's", found.known_id),
            ("problem", found.problem),
        ]
    )
    rows = [(one.run_id, one.database_submission, one.storage_submission) for one in found.behind]
    if rows:
        out.table(("run", "submission in the database", "in the storage"), rows, empty="")
    if found.unknown_runs:
        out.note(
            f"the storage has {words.count(len(found.unknown_runs), 'run')} that the database does "
            "not know"
        )


@command(_show_storage)
def storage(
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="Continue with the storage that is there now, without data that it lacks. Read "
            "docs/runbook.md first.",
        ),
    ] = False,
) -> StorageStatus | Said:
    """Show whether the storage belongs to the service's database, or adopt another one."""
    if not adopt:
        return terminal().client().storage.status()
    done = terminal().client().storage.adopt()
    lines = [
        f"the service now uses storage {done.storage_id} (before: {done.previous_id or 'none'})"
    ]
    if done.caught_up:
        lines.append(f"runs with newer submissions in the storage: {', '.join(done.caught_up)}")
    if done.lost:
        lines.append(f"runs whose data the storage lacks: {', '.join(done.lost)}")
    return Said(done, lines)


# ---------------------------------------------------------------- log in

# Commands about services elsewhere: `everstep login` and `everstep logout`.

LOCAL = "local"
"""Name of the service on this machine, which needs no log-in."""


@command()
def login(
    service: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|NAME]",
            help="URL of a service to log in to, or the name of a log-in to use from now on; "
            f"{LOCAL} for this machine's service.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the log-in; default the host.")
    ] = None,
) -> Said | None:
    """Log in to a service: keep its URL and your token for the following commands and the SDK.
    Without a URL, list the log-ins.

    The token is asked for, or read as one line of standard input.
    """
    if service is None or service in (LOCAL, *read_contexts().log_ins) or service.isidentifier():
        _log_ins(service)
        return None
    out = terminal()
    address = checked_url(service)
    chosen = name or urlsplit(address).netloc
    if address.startswith("http://") and not is_loopback(address):
        out.note("warning: without https the token travels in the clear")
    if sys.stdin.isatty():
        token = typer.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline()
    token = checked_token(token, "the given token")
    with Client(address, token, max_tries=2) as client:
        next(iter(client.runs.list()), None)  # raises AuthError for a token that is not valid
    path = write_contexts(read_contexts().with_log_in(chosen, LogIn(address, token)))
    return Said(
        {"name": chosen, "url": address},
        [f"logged in to {address} as {chosen}"],
        [f"the token is in {path}, which only you can read"],
    )


@command()
def logout(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Name of the log-in; default the one in use."),
    ] = None,
) -> Said | None:
    """Forget a log-in on this machine. The token itself stays valid; `everstep token revoke` ends
    it."""
    known = read_contexts()
    chosen = name or known.current
    if chosen is None:
        terminal().note("not logged in")
        return None
    write_contexts(known.without(chosen))
    return Said({"name": chosen}, [f"forgot {chosen}"])


def _log_ins(name: str | None) -> None:
    """Use another log-in if one is named, and list them."""
    out, known = terminal(), read_contexts()
    if name is not None:
        known = known.using(None if name == LOCAL else name)
        write_contexts(known)
    if out.as_json:
        log_ins = {key: each.url for key, each in known.log_ins.items()}
        out.json({"current": known.current, "log_ins": log_ins})
        return
    rows = [
        ("*" if key == known.current else "", key, each.url) for key, each in known.log_ins.items()
    ]
    here = ("*" if known.current is None else "", LOCAL, "the service on this machine")
    out.table(("", "name", "url"), [here, *rows], empty="", text=("name", "url"))
