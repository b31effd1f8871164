"""Commands about the cluster: nodes, and checks of a deployment."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from everstep.cli.service import require_server
from everstep.cli.terminal import Exit, Said, command, terminal
from everstep.client.client import Client
from everstep.doctor.findings import (
    check_findings,
    cluster_findings,
    identity_findings,
    service_findings,
)
from everstep.doctor.nodes import Finding
from everstep.errors import AuthError, EverstepError, Unavailable, UsageError, WaitTimeout
from everstep.spec.plain_text import printable
from everstep.text import words
from everstep.wire import Node

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="Id of the node, or a unique prefix.")
]
ReasonOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Reason, shown with the node.")
]


@command()
def cordon(
    node: NodeArgument,
    reason: ReasonOption = None,
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Allow ranks on a cordoned or draining node again."),
    ] = False,
) -> Said:
    """Place no new ranks on a node; its current ranks stay."""
    nodes = terminal().client().nodes
    change = nodes.uncordon if undo else nodes.cordon
    return _now(change(nodes.find(node).id, reason=reason))


@command()
def drain(
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="Id of the node, or a unique prefix."),
    ] = None,
    this_node: Annotated[
        bool,
        typer.Option(
            "--this-node",
            help="Drain the node of Ray on this machine, by Ray itself: for hooks that run before "
            "a machine goes. Needs no service and no token of it.",
        ),
    ] = False,
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
) -> Said:
    """Make ranks save, leave a node and move to other nodes, without losing a step."""
    if this_node == (node is not None):
        raise UsageError("drain needs either NODE, or --this-node on the machine of the node")
    if node is None:
        return _drain_this_node(deadline, reason, wait=wait)
    nodes = terminal().client().nodes
    drained = nodes.drain(nodes.find(node).id, deadline_s=deadline, reason=reason)
    if wait:
        if drained.runs and not terminal().as_json:
            terminal().note(
                f"waiting for {words.count(len(drained.runs), 'run')} to leave: "
                f"{', '.join(drained.runs)}"
            )
        drained = nodes.wait_drained(drained.id, deadline)
    return _now(drained)


def _now(node: Node) -> Said:
    runs = f", with ranks of {', '.join(node.runs)}" if node.runs else ""
    return Said(node, [f"{node.id} {printable(node.hostname)} is {node.state}{runs}"])


# ---------------------------------------------------------------- this node

# `everstep drain --this-node`. A node has Ray's token. It has none of the service, since users'
# code on the node could read it.


def _drain_this_node(deadline_s: float | None, reason: str | None, *, wait: bool) -> Said:
    """Have Ray announce that the node on this machine goes; ranks then leave it by themselves.

    Raises UsageError if this machine has none or several, Unavailable if Ray does not accept it,
    WaitTimeout if ranks are still there at the deadline.
    """
    require_server()
    import psutil

    if deadline_s is not None and deadline_s <= 0:
        raise UsageError(f"--deadline {deadline_s:g} is over; give the seconds that are left")
    began = time.monotonic()
    raylets = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "raylet"]
    if len(raylets) != 1:
        raise UsageError(
            f"{len(raylets)} nodes of Ray run on this machine, and --this-node is for one; drain "
            "a node by its id from `everstep cluster`: everstep drain NODE"
        )
    words_of = raylets[0].cmdline()
    given = dict(word.lstrip("-").split("=", 1) for word in words_of if "=" in word)
    node_id, address = given["node_id"], given["gcs-address"]
    order = [sys.executable, "-P", "-m", "ray.scripts.scripts", "drain-node", "--node-id", node_id]
    order += ["--address", address, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    order += ["--reason-message", reason or "everstep drain --this-node"]
    if deadline_s is not None:
        order += ["--deadline-remaining-seconds", str(max(1, int(deadline_s)))]
    try:
        done = subprocess.run(
            order, capture_output=True, text=True, timeout=deadline_s or 60.0, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise Unavailable(f"Ray's head at {address} does not respond; is it there?") from exc
    if done.returncode:
        raise Unavailable(f"Ray does not drain node {node_id}: {done.stderr.strip()[-500:]}")
    if wait:
        try:
            # Ray ends a draining node once nothing runs on it.
            left_s = None if deadline_s is None else max(0.1, began + deadline_s - time.monotonic())
            raylets[0].wait(left_s)
        except psutil.TimeoutExpired as exc:
            raise WaitTimeout(
                f"node {node_id} is not drained after {deadline_s:g} s; its ranks are still there"
            ) from exc
    state = "DRAINED" if wait else "DRAINING"
    return Said({"id": node_id, "state": state}, [f"{node_id} is {state}"])


# ---------------------------------------------------------------- doctor

# `everstep doctor`: check a deployment from end to end, and say what to fix.

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_SIGNS = {"ok": "ok      ", "warning": "warning ", "problem": "PROBLEM "}


@command()
def doctor(
    all_reduce: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=60.0, help="Duration of the all-reduce test."),
    ] = 5.0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="Maximum time to wait for the nodes.")
    ] = 240.0,
) -> None:
    """Check service, nodes, versions, storage, ports, clocks and network, and say what to fix.
    Needs an admin token.

    Exit code 0 without problems (warnings are possible), 1 with problems, 3 if the service cannot
    be reached.
    """
    out = terminal()
    findings: list[Finding] = []
    client = out.client()
    reached = True
    try:
        findings += service_findings(client.ready())
        findings += identity_findings(client.storage.status())
        findings += _cluster(client, all_reduce, timeout)
    except Unavailable as exc:
        reached = bool(findings)
        remedy = (
            "Check that `everstep serve` runs there and listens on that address (--host), and that "
            "no firewall or proxy in between refuses."
        )
        findings.append(Finding("service", "problem", str(exc), remedy))
    except AuthError as exc:
        remedy = (
            "Set EVERSTEP_TOKEN to an admin token: from `everstep token create NAME --role admin`, "
            "or the file EVERSTEP_HOME/token."
        )
        findings.append(Finding("service", "problem", str(exc), remedy))
    _print_findings(findings)
    if not reached:
        raise typer.Exit(Exit.UNREACHABLE)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(Exit.FAILED)


def _cluster(client: Client, all_reduce_s: float, timeout_s: float) -> list[Finding]:
    """Return the findings about the cluster, and those of its nodes."""
    info = client.cluster()
    findings = cluster_findings(info)
    if not info.available:
        return findings
    if not terminal().as_json:
        terminal().note("checking every node; this takes up to a minute")
    try:
        asked = client.start_deployment_check(all_reduce_s=all_reduce_s)
        check = client.wait_deployment_check(asked.id, timeout_s=timeout_s)
    except WaitTimeout as exc:
        remedy = (
            "A node may hang or be slow: see `everstep cluster` and Ray's dashboard, or increase "
            "--timeout."
        )
        return [*findings, Finding("nodes", "problem", str(exc), remedy)]
    except AuthError:
        raise
    except EverstepError as exc:
        return [
            *findings,
            Finding(
                "nodes", "problem", f"the check was not started: {exc}", "Read the service's log."
            ),
        ]
    return [*findings, *check_findings(check, asked.service.at)]


def _print_findings(findings: list[Finding]) -> None:
    out = terminal()
    problems = sum(finding.level == "problem" for finding in findings)
    if out.as_json:
        out.json({"ok": problems == 0, "findings": [asdict(finding) for finding in findings]})
        return
    for finding in findings:
        out.line(
            f"{_SIGNS[finding.level]} {finding.check}: {finding.message}", _STYLES[finding.level]
        )
        if finding.remedy:
            out.line(f"           {finding.remedy}")
    out.line("no problems" if problems == 0 else f"{problems} problem{'s' if problems > 1 else ''}")
