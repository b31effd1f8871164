"""Findings about nodes: versions, network, interfaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from everstep.supported import RAY, TORCH
from everstep.wire.deployment import AllReduceFacts, DeploymentReport, NodeFacts, ServiceFacts

# ---------------------------------------------------------------- findings

# One finding of a deployment check: what was checked, the result and the fix.

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """Subject: service, cluster, nodes, versions, clocks, ports, network, storage, memory, gpus,
    all_reduce."""
    level: Level
    message: str
    remedy: str | None = None
    """What to do; None if nothing needs to be done."""


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "problem", message, remedy)


def joined(words: Iterable[str]) -> str:
    """Return words joined by commas and "and"."""
    *first, last = list(words) or ["nobody"]
    return f"{', '.join(first)} and {last}" if first else last


CLOCK_WARNING_S = 1.0
CLOCK_PROBLEM_S = 30.0


SMALL_SHARED_MEMORY_BYTES = 1 << 30
SMALL_DISK_BYTES = 1 << 30


def answer_findings(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    """Return which nodes did not respond."""
    for node in nodes:
        if node.problem is not None:
            remedy = (
                "Check that the node is reachable, and has the head's versions of Everstep, torch "
                "and Ray."
            )
            yield problem("nodes", f"node {names[node.id]} did not respond: {node.problem}", remedy)
    if all(node.problem is None for node in nodes):
        yield ok("nodes", f"all {len(nodes)} nodes started a process and responded")


def clock_findings(
    nodes: Sequence[NodeFacts],
    names: dict[str, str],
    report: DeploymentReport,
    service: ServiceFacts,
    asked_at: datetime,
) -> Iterator[Finding]:
    """Return clocks that differ from the head's or the service's, beyond the error of the
    measurement."""
    remedy = "Run a time service (chrony, systemd-timesyncd) on every host."
    worst = 0.0
    for node in nodes:
        if node.clock_offset_s is None or node.clock_error_s is None:
            continue
        sure = max(0.0, abs(node.clock_offset_s) - node.clock_error_s)
        worst = max(worst, sure)
        if sure > CLOCK_WARNING_S:
            way = "ahead of" if node.clock_offset_s > 0 else "behind"
            level: Level = "problem" if sure > CLOCK_PROBLEM_S else "warning"
            words = (
                f"the clock of {names[node.id]} is {abs(node.clock_offset_s):.1f} s {way} the "
                "head's"
            )
            yield Finding("clocks", level, words + ", and so are the times in its logs", remedy)
    # The report was written between these two times of the service's clock.
    early, late = (asked_at - report.at).total_seconds(), (report.at - service.at).total_seconds()
    between = max(early, late, 0.0)
    if between > CLOCK_WARNING_S:
        level = "problem" if between > CLOCK_PROBLEM_S else "warning"
        way = "behind" if early > 0 else "ahead of"
        yield Finding(
            "clocks",
            level,
            f"the head's clock is at least {between:.1f} s {way} the service's",
            remedy,
        )
    elif worst <= CLOCK_WARNING_S:
        yield ok("clocks", f"within {CLOCK_WARNING_S:g} s of each other")


def memory_findings(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    """Return nodes with little shared memory or temporary space."""
    found = False
    for node in nodes:
        if (
            node.shared_memory_bytes is not None
            and node.shared_memory_bytes < SMALL_SHARED_MEMORY_BYTES
            and not node.is_head
        ):
            found = True
            remedy = (
                "Give the container at least twice the size of the model's state (`--shm-size`, "
                "`shm_size:`, an emptyDir in memory)."
            )
            words = (
                f"{names[node.id]} has {node.shared_memory_bytes / 1e6:.0f} MB of shared memory: "
                "a lost rank may cost steps"
            )
            yield warning("memory", words, remedy)
        if node.temporary_free_bytes is not None and node.temporary_free_bytes < SMALL_DISK_BYTES:
            found = True
            remedy = "Free some space, or move Ray's files with `ray start --temp-dir` and TMPDIR."
            words = (
                f"{names[node.id]} has {node.temporary_free_bytes / 1e6:.0f} MB left for "
                "temporary files"
            )
            yield warning("memory", words, remedy)
    if not found and nodes:
        yield ok("memory", "enough shared memory and temporary space")


def gpu_findings(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    """Return nodes whose GPUs torch cannot use."""
    with_gpus = [node for node in nodes if node.gpus]
    for node in with_gpus:
        if node.cuda is False:
            remedy = (
                "Install a CUDA build of torch and a matching driver; `python -c 'import torch; "
                "torch.cuda.init()'` shows the error."
            )
            yield problem(
                "gpus",
                f"Ray offers {node.gpus} GPUs on {names[node.id]}, but torch cannot use them",
                remedy,
            )
        elif node.cuda is None:
            remedy = "Check again when one is free; NCCL was not tested."
            yield warning("gpus", f"no GPU of {names[node.id]} was free for a test", remedy)
    if with_gpus and all(node.cuda for node in with_gpus):
        yield ok("gpus", f"torch can use the GPUs of {len(with_gpus)} nodes")


# ---------------------------------------------------------------- versions

# Findings about versions: Python, Everstep, Ray, torch and CUDA must be the same on all nodes.

_MUST_AGREE = ("python", "everstep", "ray", "torch", "torchvision", "cuda", "nccl")


def version_findings(
    nodes: Sequence[NodeFacts], names: dict[str, str], service: ServiceFacts
) -> Iterator[Finding]:
    """Return versions that Everstep does not run on, and those that differ between nodes or from
    the service."""
    refused = {
        (supported.name, found)
        for node in nodes
        for supported in (RAY, TORCH)
        if (version := node.versions.get(supported.name))
        and (found := supported.problem(version, names[node.id]))
    }
    yield from (problem("versions", *found.split("; ", 1)) for _, found in sorted(refused))
    wrong = len(refused)
    for what in _MUST_AGREE:
        if what in {name for name, _ in refused}:
            continue
        versions = _versions_of(what, nodes)
        all_versions = [
            *versions.values(),
            *([service.versions["everstep"]] if what == "everstep" else []),
        ]
        if len(set(all_versions)) <= 1:
            continue
        usual = Counter(all_versions).most_common(1)[0][0]
        odd = [
            f"{names[node_id]} has {version or 'none'}"
            for node_id, version in versions.items()
            if version != usual
        ]
        if what == "everstep" and service.versions["everstep"] != usual:
            odd.append(f"the service on {service.hostname} has {service.versions['everstep']}")
        wrong += 1
        remedy = (
            f"Install the same {what} everywhere (constraints.txt has the versions), or use one "
            "image on all hosts."
        )
        yield problem(
            "versions",
            f"versions of {what} differ: most have {usual or 'none'}, {joined(odd)}",
            remedy,
        )
    sources = {node.id: node.source for node in nodes}
    if len({*sources.values(), service.source}) > 1 and not wrong:
        odd = [names[node_id] for node_id, source in sources.items() if source != service.source]
        remedy = (
            "Install the same build everywhere; two builds of a checkout can have the same "
            "version number."
        )
        yield problem(
            "versions", f"Everstep's modules differ from the service's on {joined(odd)}", remedy
        )
    elif not wrong and nodes:
        shown = ", ".join(
            f"{what} {nodes[0].versions[what]}"
            for what in _MUST_AGREE
            if nodes[0].versions.get(what)
        )
        yield ok("versions", f"the same everywhere: {shown}")


def _versions_of(what: str, nodes: Sequence[NodeFacts]) -> dict[str, str | None]:
    """Return the versions to compare by node id, without nodes that do not need the package."""
    versions = {node.id: node.versions.get(what) for node in nodes}
    if what.startswith("torch"):  # a head without GPUs may have the CPU build of the same version
        return {
            node_id: version and version.partition("+")[0] for node_id, version in versions.items()
        }
    if what in ("cuda", "nccl"):  # a head without GPUs has neither, and needs neither
        return {
            node.id: versions[node.id]
            for node in nodes
            if node.gpus and versions[node.id] is not None
        }
    return versions


# ---------------------------------------------------------------- network

# Findings about the network between the nodes.


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


# ---------------------------------------------------------------- interface choice

# How NCCL and gloo interpret the variables that select a network interface.

NCCL_VARIABLE, GLOO_VARIABLE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def lets_through(variable: str, value: str, interfaces: Iterable[str]) -> bool:
    """Return whether the variable's value allows any of these interfaces.

    Gloo compares names. NCCL compares prefixes, names after ``=``, and excludes prefixes after
    ``^``.
    """
    return any(_chooses(variable, value, name) for name in interfaces)


def _chooses(variable: str, value: str, name: str) -> bool:
    if variable == GLOO_VARIABLE:
        return name in value.split(",")
    if value.startswith("^"):
        return not _begins(value[1:], name)
    return _begins(value, name)


def _begins(value: str, name: str) -> bool:
    if value.startswith("="):
        return name in value[1:].split(",")
    return any(part and name.startswith(part) for part in value.split(","))
