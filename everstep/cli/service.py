"""Commands about the service: serve it, look at its cluster, see it all at work."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated

import typer

from everstep.cli.terminal import Exit, JsonOption, UrlOption, command, terminal
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
    """What `everstep serve` needs and this Python has not; nothing is imported to find out."""
    return [name for name in SERVER_MODULES if not _exists(name)]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def require_server() -> None:
    """Raises an exit with the way out where the light client was installed alone."""
    missing = missing_server_modules()
    if missing:
        message = (
            f"this Python has only Everstep's client ({', '.join(missing)} missing); run: pip "
            "install 'everstep[server]'"
        )
        raise terminal().fail(message, Exit.USAGE, {"code": "server_missing", "missing": missing})


@command
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; by default 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on, 0 for a free one; by default 8000.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Worker nodes of the service's own Ray cluster.")
    ] = None,
    cpus_per_node: Annotated[
        int | None, typer.Option(help="CPUs that each of them offers.")
    ] = None,
    cluster_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Variable that the own cluster, and so the code of every run, inherits; NAME* "
                "too; repeatable."
            ),
        ),
    ] = None,
    drills: Annotated[
        bool, typer.Option("--drills", help="Allow failure drills through the API.")
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Use another Ray cluster: its dashboard's URL."),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="postgresql+psycopg://…; by default SQLite in EVERSTEP_HOME."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="Directory or s3://… for runs; by default in EVERSTEP_HOME."
        ),
    ] = None,
    storage_root: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URI", help="Storage and data lie below it; repeatable, by default anywhere."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Run the service, by default with a Ray cluster of its own on this machine (EVERSTEP_HOME,
    default ~/.everstep)."""
    require_server()
    given = {
        "--host": host,
        "--port": port,
        "--nodes": nodes,
        "--cpus-per-node": cpus_per_node,
        "--ray-address": ray_address,
        "--database": database,
        "--storage": storage,
    }
    arguments = [
        text for name, value in given.items() if value is not None for text in (name, str(value))
    ]
    arguments += [text for root in storage_root or () for text in ("--storage-root", root)]
    arguments += [text for name in cluster_env or () for text in ("--cluster-env", name)]
    arguments += ["--drills"] if drills else []
    if terminal().as_json:
        os.environ["EVERSTEP_LOG_FORMAT"] = "json"
    # The service takes this process's place: signals and the exit code are its own.
    os.execv(sys.executable, [sys.executable, "-m", "service.process.serve", *arguments])


@command
def cluster(json_: JsonOption = False, url: UrlOption = None) -> None:
    """Show the Ray cluster's nodes and the runs on them."""
    out = terminal()
    info = out.client().cluster()
    if out.as_json:
        out.json(info)
        return
    if not info.available:
        out.note("Ray does not answer; what follows may be old")
    out.fields(
        [("Ray", info.ray_version), ("address", info.address), ("dashboard", info.dashboard_url)]
    )
    headers = ("node", "host", "ip", "state", "resources", "runs", "marked")
    out.table(
        headers,
        [
            (
                node.id[:12],
                node.hostname + (" (head)" if node.is_head else ""),
                node.ip,
                node.state,
                _resources(node.resources_total),
                ", ".join(node.runs) or None,
                _mark(node),
            )
            for node in info.nodes
        ],
        empty="no nodes",
    )


def _mark(node: Node) -> str | None:
    """Who cordoned or drained a node, and why."""
    if node.mark is None:
        return None
    text = f"by {node.mark.by}, {words.ago(node.mark.at)}"
    if node.mark.deadline is not None:
        text += f", until {node.mark.deadline.astimezone():%H:%M:%S}"
    return f"{text}: {node.mark.reason}" if node.mark.reason else text


def _resources(total: dict[str, float]) -> str:
    """CPUs, GPUs and memory; Ray's own markers are left out."""
    parts = [f"{total[name]:g} {name}" for name in ("CPU", "GPU") if total.get(name)]
    if total.get("memory"):
        parts.append(words.size(total["memory"]))
    return ", ".join(parts) or "none"


@command
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the service up at the end, and print its URLs.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Use the service at URL, on this machine, and start none."
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="DIRECTORY", help="Where the trained model goes.")
    ] = "out/demo",
    json_: JsonOption = False,
) -> None:
    """Train on three local nodes, kill one of them in the middle, and watch the run carry on."""
    from everstep.cli.demo import run_demo

    if url is None:
        require_server()
    raise typer.Exit(run_demo(terminal(), url=url, keep=keep, out=out))
