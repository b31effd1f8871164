"""Findings about the network between the nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from everstep.doctor.finding import Finding, joined, ok, problem
from everstep.doctor.interface_choice import GLOO_VARIABLE, NCCL_VARIABLE, lets_through
from everstep.wire.deployment import AllReduceFacts, NodeFacts


def port_findings(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    remedy = (
        "Ranks meet on ports of their own choice: let the hosts of one cluster talk to each other "
        "on all TCP ports, both ways."
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
    found = False
    for node in nodes:
        if node.interface is None:
            found = True
            remedy = (
                "Ray was told an address that the host has not (NAT?); give `ray start "
                "--node-ip-address` one of its own."
            )
            yield problem(
                "network", f"no interface of {names[node.id]} has its address {node.ip}", remedy
            )
        elif node.interface == "lo" and len({node.ip for node in nodes}) > 1:
            found = True
            remedy = (
                "Give `ray start --node-ip-address` an address that others reach; see /etc/hosts "
                "for the host's own name."
            )
            yield problem(
                "network", f"{names[node.id]} is known by its loopback address {node.ip}", remedy
            )
        for variable, value in node.interface_variables.items():
            if not lets_through(variable, value, node.interfaces):
                found = True
                remedy = (
                    f"Its interfaces are {', '.join(node.interfaces)}: set {variable} to one of "
                    "them, or unset it."
                )
                yield problem(
                    "network", f"{variable}={value} names no interface of {names[node.id]}", remedy
                )
    if not found and nodes:
        interfaces = Counter(node.interface for node in nodes)
        yield ok(
            "network",
            "ranks talk over "
            + ", ".join(f"{name} ({count})" for name, count in interfaces.items()),
        )


def all_reduce_findings(facts: AllReduceFacts | None, names: dict[str, str]) -> Iterator[Finding]:
    if facts is None:
        yield ok("all_reduce", "fewer than two nodes run ranks: nothing to add up")
    elif facts.problem is not None:
        variable = NCCL_VARIABLE if facts.backend == "nccl" else GLOO_VARIABLE
        remedy = (
            f"Where ports are well, {facts.backend} may have picked the wrong interface: set "
            f"{variable} in the environment of "
            "`ray start`, see that /etc/hosts does not give the host's name a loopback address, "
            "and try again."
        )
        listed = joined([names[node] for node in facts.nodes])
        yield problem(
            "all_reduce",
            f"{listed} could not add up a tensor over {facts.backend}: {facts.problem}",
            remedy,
        )
    else:
        assert facts.round_s is not None
        rate = facts.size_bytes / 1e6 / facts.round_s
        words = (
            f"{facts.rounds} sums of {facts.size_bytes / 1e6:.0f} MB over {len(facts.nodes)} "
            f"nodes by {facts.backend}"
        )
        yield ok("all_reduce", f"{words}, {facts.round_s * 1000:.1f} ms each ({rate:.0f} MB/s)")
