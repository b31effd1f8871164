"""Commands about the service: serve, cluster, demo."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import typer

from everstep.cli.options import JsonOption, UrlOption
from everstep.cli.terminal import Exit, command, terminal
from everstep.options.flags import as_variables, help_of, is_list, is_switch
from everstep.options.model import FlagValue
from everstep.options.serve import FLAGS, OPTIONS, ServeOptions
from everstep.text import words
from everstep.wire import Node

SERVER_MODULES = (
    "service.process.serve",
    "fastapi",
    "uvicorn",
    "sqlalchemy",
    "ray",
    "torch",
    "torchvision",
)


def missing_server_modules() -> list[str]:
    """Return the modules that `everstep serve` needs and this Python lacks, without importing
    any."""
    return [name for name in SERVER_MODULES if not _exists(name)]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def require_server() -> None:
    """Exit with a message if only the client is installed."""
    missing = missing_server_modules()
    if missing:
        message = (
            f"only Everstep's client is installed in this Python ({', '.join(missing)} missing); "
            "run: pip install 'everstep[server]'"
        )
        raise terminal().fail(message, Exit.USAGE, {"code": "server_missing", "missing": missing})


def _takes_serve_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of ServeOptions as keyword parameters, for typer to read."""

    def parameter(name: str) -> inspect.Parameter:
        option = FLAGS[name]
        kind: Any = bool if is_switch(name) else list[str] | None if is_list(name) else str | None
        info = typer.Option(option.flag, metavar=option.metavar or None, help=help_of(name))
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
    parameters = [*map(parameter, FLAGS), *own]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


@command
@_takes_serve_flags
def serve(json_: JsonOption = False, **flags: FlagValue | None) -> None:
    """Run the service, by default with a Ray cluster of its own on this machine (EVERSTEP_HOME,
    default ~/.everstep)."""
    require_server()
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    ServeOptions.read(os.environ, given)
    # The service reads one source, its environment, where other users do not see a password.
    environ = {**os.environ, **as_variables(given)}
    if terminal().as_json:
        environ[OPTIONS["log_format"].variable] = "json"
    # The service takes this process's place: signals and the exit code are its own.
    os.execve(sys.executable, [sys.executable, "-m", "service.process.serve"], environ)


@command
def cluster(json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show the nodes of the Ray cluster and the runs on them."""
    out = terminal()
    client = out.client()
    info = client.cluster()
    if out.as_json:
        out.json(info)
        return
    if not info.available:
        out.note("Ray does not respond; this may be out of date")
    out.fields(
        [
            ("Ray", info.ray_version),
            ("address", info.address),
            # Ray's own address needs a token that only the service has
            ("dashboard", f"{client.url}/ray/" if info.dashboard_url else None),
        ]
    )
    hosts = Counter((node.hostname, node.ip) for node in info.nodes if node.state != "DEAD")
    headers = ("node", "host", "ip", "state", "used", "runs", "marked")
    out.table(
        headers,
        [
            (
                node.id[:12],
                node.hostname + (" (head)" if node.is_head else ""),
                node.ip,
                node.state,
                _resources(node, has_own_host=hosts[node.hostname, node.ip] < 2),
                ", ".join(node.runs) or None,
                _mark(node),
            )
            for node in info.nodes
        ],
        empty="no nodes",
        text=("host", "used", "runs", "marked"),
        dispensable=("ip", "used", "marked"),
    )
    for at in info.coming_back:
        out.note(f"a missing node is started again at {at.astimezone():%H:%M:%S}")


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


@command
def demo(
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the service running at the end, and print its URLs."),
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Use the service at URL on this machine instead of a new one."
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="DIRECTORY", help="Directory for the trained model.")
    ] = "out/demo",
    json_: JsonOption = False,
) -> None:
    """Train on three local nodes, kill one of them, and watch the run continue."""
    from everstep.cli.demo import run_demo

    if url is None:
        require_server()
    raise typer.Exit(run_demo(terminal(), url=url, keep=keep, out=out))
