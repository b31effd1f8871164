"""Findings about the network between the nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from everstep.doctor.finding import Finding, joined, ok, problem
from everstep.doctor.interface_choice import GLOO_VARIABLE, NCCL_VARIABLE, lets_through
from everstep.wire.deployment import AllReduceFacts, NodeFacts


def port_findings(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    """Return which nodes cannot connect to which others."""
    remedy = (
        "Ranks use arbitrary ports: allow all TCP ports between the hosts of a cluster, in both "
        "directions."
    )
    blocked = False
    for node in nodes:
        both = [other for other in node.unreachable if other in node.raylets_unreachable]
        ports = [other for other in node.unreachable if other not in node.raylets_unreachable]
        raylets = [other for other in node.raylets_unreachable if other not in node.unreachable]
        for others, what in (
            (both, "at all"),
            (ports, "on a free port"),
            (raylets, "at its raylet's port"),
        ):
            if others:
                blocked = True
                listed = joined([names.get(other, other[:8]) for other in others])
                yield problem(
                    "ports", f"{names[node.id]} cannot connect to {listed} {what}", remedy
                )
    if not blocked and nodes:
        yield ok("ports", "every node reaches every other one")


def interface_findings(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    """Return nodes whose address or interface variables do not match their interfaces."""
    found = False
    for node in nodes:
        if node.interface is None:
            found = True
            remedy = (
                "Ray uses an address that the host does not have (NAT?); set `ray start "
                "--node-ip-address` to one of its own."
            )
            yield problem(
                "network", f"no interface of {names[node.id]} has its address {node.ip}", remedy
            )
        elif node.interface == "lo" and len({node.ip for node in nodes}) > 1:
            found = True
            remedy = (
                "Set `ray start --node-ip-address` to an address that others can reach; check the "
                "host's own name in /etc/hosts."
            )
            yield problem(
                "network",
                f"{names[node.id]} is registered with its loopback address {node.ip}",
                remedy,
            )
        for variable, value in node.interface_variables.items():
            if not lets_through(variable, value, node.interfaces):
                found = True
                remedy = (
                    f"Its interfaces are {', '.join(node.interfaces)}: set {variable} to one of "
                    "them, or unset it."
                )
                yield problem(
                    "network",
                    f"{variable}={value} matches no interface of {names[node.id]}",
                    remedy,
                )
    if not found and nodes:
        interfaces = Counter(node.interface for node in nodes)
        yield ok(
            "network",
            "ranks communicate over "
            + ", ".join(f"{name} ({count})" for name, count in interfaces.items()),
        )


def all_reduce_findings(facts: AllReduceFacts | None, names: dict[str, str]) -> Iterator[Finding]:
    """Return the result of the all-reduce over all nodes."""
    if facts is None:
        yield ok("all_reduce", "skipped: fewer than two nodes run ranks")
    elif facts.problem is not None:
        variable = NCCL_VARIABLE if facts.backend == "nccl" else GLOO_VARIABLE
        remedy = (
            f"If all ports are open, {facts.backend} may use the wrong interface: set {variable} "
            "in the environment of `ray start`, check that /etc/hosts does not map the host's name "
            "to a loopback address, and try again."
        )
        listed = joined([names[node] for node in facts.nodes])
        yield problem(
            "all_reduce",
            f"the all-reduce between {listed} over {facts.backend} failed: {facts.problem}",
            remedy,
        )
    else:
        assert facts.round_s is not None
        rate = facts.size_bytes / 1e6 / facts.round_s
        words = (
            f"{facts.rounds} all-reduces of {facts.size_bytes / 1e6:.0f} MB over "
            f"{len(facts.nodes)} nodes with {facts.backend}"
        )
        yield ok("all_reduce", f"{words}, {facts.round_s * 1000:.1f} ms each ({rate:.0f} MB/s)")
