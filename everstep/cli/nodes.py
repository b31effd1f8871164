"""Commands for nodes: cordon, uncordon, drain."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.options import JsonOption, UrlOption
from everstep.cli.terminal import command, terminal
from everstep.spec.plain_text import printable
from everstep.text import words
from everstep.wire import Node

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="Id of the node, or a unique prefix.")
]
ReasonOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Reason, shown with the node.")
]


@command
def cordon(
    node: NodeArgument,
    reason: ReasonOption = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Place no new ranks on a node; its current ranks stay."""
    nodes = terminal().client().nodes
    _print_node(nodes.cordon(nodes.find(node).id, reason=reason))


@command
def uncordon(
    node: NodeArgument,
    reason: ReasonOption = None,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Allow ranks on a cordoned or draining node again."""
    nodes = terminal().client().nodes
    _print_node(nodes.uncordon(nodes.find(node).id, reason=reason))


@command
def drain(
    node: NodeArgument,
    deadline: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="The node will be removed in this many seconds."),
    ] = None,
    reason: ReasonOption = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            "-w",
            help="Wait until every rank has left; exit code 1 if the deadline passes first.",
        ),
    ] = False,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Make ranks save, leave a node and move to other nodes, without losing a step."""
    nodes = terminal().client().nodes
    drained = nodes.drain(nodes.find(node).id, deadline_s=deadline, reason=reason)
    if wait:
        if drained.runs and not terminal().as_json:
            terminal().note(
                f"waiting for {words.count(len(drained.runs), 'run')} to leave: "
                f"{', '.join(drained.runs)}"
            )
        drained = nodes.wait_drained(drained.id, deadline)
    _print_node(drained)


def _print_node(node: Node) -> None:
    if terminal().as_json:
        terminal().json(node)
        return
    runs = f", with ranks of {', '.join(node.runs)}" if node.runs else ""
    terminal().line(f"{node.id} {printable(node.hostname)} is {node.state}{runs}")
