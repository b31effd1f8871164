"""What a check of a deployment means, in words: what is wrong, and what to do. Pure: facts in,
findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from everstep.doctor.interface_choice import GLOO_VARIABLE, NCCL_VARIABLE, lets_through
from everstep.wire import ClusterInfo, Readiness
from everstep.wire.deployment import (
    AllReduceFacts,
    DeploymentCheck,
    DeploymentReport,
    NodeFacts,
    ServiceFacts,
)
from everstep.wire.storage_status import StorageStatus

Level = Literal["ok", "warning", "problem"]

CLOCK_WARNING_S = 1.0
CLOCK_PROBLEM_S = 30.0
LAG_PROBLEM_S = 30.0
SMALL_SHARED_MEMORY_BYTES = 1 << 30
SMALL_DISK_BYTES = 1 << 30
_MUST_AGREE = ("python", "everstep", "ray", "torch", "torchvision", "cuda", "nccl")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """What was looked at: service, cluster, nodes, versions, clocks, ports, network, storage,
    memory, gpus, all_reduce."""
    level: Level
    message: str
    remedy: str | None = None
    """What to do; None where nothing is to be done."""


def _ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def _warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "warning", message, remedy)


def _problem(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "problem", message, remedy)


def service_findings(ready: Readiness) -> list[Finding]:
    """What ``/readyz`` says."""
    found = []
    if ready.database == "down":
        remedy = (
            "See `not_ready` in the service's log; check --database, and that the database runs "
            "and takes connections."
        )
        found.append(_problem("service", "the service cannot use its database", remedy))
    if ready.storage == "down":
        remedy = (
            "See `not_ready` in the service's log; check --storage, that it is mounted on the "
            "service's host, has room, and that "
        )
        found.append(
            _problem(
                "service",
                "the service cannot use its storage",
                remedy + "the service's user may write there.",
            )
        )
    if ready.ray == "down":
        remedy = (
            "See that the head runs, that --ray-address is its dashboard's URL, and that "
            "RAY_AUTH_TOKEN_PATH holds its token."
        )
        found.append(_problem("service", "the service cannot reach Ray", remedy))
    if ready.reconciler_lag_s is None or ready.reconciler_lag_s > LAG_PROBLEM_S:
        since = (
            "never" if ready.reconciler_lag_s is None else f"not for {ready.reconciler_lag_s:.0f} s"
        )
        remedy = (
            "No run starts or ends by it. Look for errors in the service's log; with several "
            "replicas ask the one that leads."
        )
        found.append(_problem("service", f"its reconciler has {since} finished a tick", remedy))
    return found or [_ok("service", "database, storage, Ray and the reconciler answer")]


def identity_findings(status: StorageStatus) -> list[Finding]:
    """Return what does not fit between the service's database and its storage."""
    found = []
    if status.problem is not None:
        remedy = (
            "See `everstep storage show`, and in docs/runbook.md: another storage, or an older "
            "database."
        )
        found.append(_problem("storage", status.problem, remedy))
    for run in status.behind:
        words = (
            f"submission {run.storage_submission} of run {run.run_id}, and the database knows "
            f"{run.database_submission}"
        )
        remedy = (
            "Restore a newer database, or run `everstep storage adopt` once no other service uses "
            "this storage."
        )
        found.append(_problem("storage", f"the storage holds {words}", remedy))
    if status.unknown_runs:
        words = (
            f"the storage holds {len(status.unknown_runs)} runs that the database does not know, "
            f"{status.unknown_runs[0]} for one"
        )
        found.append(
            _warning(
                "storage",
                words,
                "They are of a newer database or of another service; nothing touches them.",
            )
        )
    return found


def cluster_findings(cluster: ClusterInfo) -> list[Finding]:
    """What the cluster's list of nodes says."""
    if not cluster.available:
        return [
            _problem(
                "cluster",
                "Ray does not answer the service",
                "See that the head is up: `ray status` there.",
            )
        ]
    live = [node for node in cluster.nodes if node.state != "DEAD"]
    workers = [
        node for node in live if node.resources_total.get("CPU") or node.resources_total.get("GPU")
    ]
    found = []
    if not workers:
        remedy = (
            "Start one: `ray start --address=HEAD:6379` with the head's token and the same "
            "packages."
        )
        found.append(
            _problem("cluster", "no live node offers CPUs or GPUs: no run can start", remedy)
        )
    for node in live:
        if node.state != "ALIVE":
            why = (
                f" by {node.mark.by}: {node.mark.reason or 'no reason given'}"
                if node.mark
                else " by Ray's word"
            )
            remedy = f"Once it is well: `everstep uncordon {node.id[:12]}`."
            found.append(
                _warning(
                    "cluster", f"node {node.hostname} ({node.id[:12]}) is {node.state}{why}", remedy
                )
            )
    words = f"{len(live)} live nodes, {len(workers)} of them run ranks; Ray {cluster.ray_version}"
    return [*found, _ok("cluster", words)] if workers else found


def check_findings(check: DeploymentCheck, asked_at: datetime) -> list[Finding]:
    """What the check's job found.

    Args:
        check: One that is over.
        asked_at: The service's clock when it was asked for.
    """
    if check.report is None:
        remedy = (
            "See the job's log on Ray's dashboard. Everstep must be installed in the environment "
            "that `ray start` runs in."
        )
        return [_problem("nodes", f"the check could not be made: {check.problem}", remedy)]
    nodes = check.report.nodes
    names = {node.id: f"{node.hostname} ({node.id[:8]})" for node in nodes}
    up = [node for node in nodes if node.problem is None]
    parts = (
        _silent(nodes, names),
        _versions(up, names, check.service),
        _clocks(up, names, check.report, check.service, asked_at),
        _ports(up, names),
        _network(up, names),
        _storage(up, names, check.service.storage),
        _memory(up, names),
        _gpus(up, names),
        _all_reduce(check.report.all_reduce, names),
    )
    return [finding for part in parts for finding in part]


def _silent(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    for node in nodes:
        if node.problem is not None:
            remedy = (
                "See that the node answers, and has Everstep, torch and Ray in the versions that "
                "the head has."
            )
            yield _problem("nodes", f"node {names[node.id]} did not answer: {node.problem}", remedy)
    if all(node.problem is None for node in nodes):
        yield _ok("nodes", f"all {len(nodes)} nodes started a process and answered")


def _versions(
    nodes: Sequence[NodeFacts], names: dict[str, str], service: ServiceFacts
) -> Iterator[Finding]:
    wrong = 0
    for what in _MUST_AGREE:
        versions = {node.id: node.versions.get(what) for node in nodes}
        # a head without GPUs may have the CPU build, which is the same but for its label
        if what.startswith("torch"):
            versions = {
                node_id: version and version.partition("+")[0]
                for node_id, version in versions.items()
            }
        if what in ("cuda", "nccl"):  # a head without GPUs has neither, and needs neither
            versions = {
                node.id: versions[node.id]
                for node in nodes
                if node.gpus and versions[node.id] is not None
            }
        told = [*versions.values(), *([service.versions["everstep"]] if what == "everstep" else [])]
        if len(set(told)) <= 1:
            continue
        usual = Counter(told).most_common(1)[0][0]
        odd = [
            f"{names[node_id]} has {version or 'none'}"
            for node_id, version in versions.items()
            if version != usual
        ]
        if what == "everstep" and service.versions["everstep"] != usual:
            odd.append(f"the service on {service.hostname} has {service.versions['everstep']}")
        wrong += 1
        remedy = (
            f"Install the same {what} everywhere (constraints.txt has the pins), or run one image "
            "on all hosts."
        )
        yield _problem(
            "versions",
            f"{what} is not the same everywhere: most have {usual or 'none'}, {_and(odd)}",
            remedy,
        )
    sources = {node.id: node.source for node in nodes}
    if len({*sources.values(), service.source}) > 1 and not wrong:
        odd = [names[node_id] for node_id, source in sources.items() if source != service.source]
        remedy = (
            "Install the same build everywhere; a version number does not tell two builds of a "
            "checkout apart."
        )
        yield _problem(
            "versions", f"Everstep's own modules differ from the service's on {_and(odd)}", remedy
        )
    elif not wrong and nodes:
        shown = ", ".join(
            f"{what} {nodes[0].versions[what]}"
            for what in _MUST_AGREE
            if nodes[0].versions.get(what)
        )
        yield _ok("versions", f"the same everywhere: {shown}")


def _clocks(
    nodes: Sequence[NodeFacts],
    names: dict[str, str],
    report: DeploymentReport,
    service: ServiceFacts,
    asked_at: datetime,
) -> Iterator[Finding]:
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
            yield Finding("clocks", level, words + "; so are the times in its own logs", remedy)
    # The report was written between these two moments of the service's clock.
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
        yield _ok("clocks", f"within {CLOCK_WARNING_S:g} s of each other")


def _ports(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
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
                listed = _and([names.get(other, other[:8]) for other in others])
                yield _problem(
                    "ports", f"{names[node.id]} cannot connect to {listed} {what}", remedy
                )
    if not blocked and nodes:
        yield _ok("ports", "every node reaches every other one")


def _network(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    found = False
    for node in nodes:
        if node.interface is None:
            found = True
            remedy = (
                "Ray was told an address that the host has not (NAT?); give `ray start "
                "--node-ip-address` one of its own."
            )
            yield _problem(
                "network", f"no interface of {names[node.id]} has its address {node.ip}", remedy
            )
        elif node.interface == "lo" and len({node.ip for node in nodes}) > 1:
            found = True
            remedy = (
                "Give `ray start --node-ip-address` an address that others reach; see /etc/hosts "
                "for the host's own name."
            )
            yield _problem(
                "network", f"{names[node.id]} is known by its loopback address {node.ip}", remedy
            )
        for variable, value in node.interface_variables.items():
            if not lets_through(variable, value, node.interfaces):
                found = True
                remedy = (
                    f"Its interfaces are {', '.join(node.interfaces)}: set {variable} to one of "
                    "them, or unset it."
                )
                yield _problem(
                    "network", f"{variable}={value} names no interface of {names[node.id]}", remedy
                )
    if not found and nodes:
        interfaces = Counter(node.interface for node in nodes)
        yield _ok(
            "network",
            "ranks talk over "
            + ", ".join(f"{name} ({count})" for name, count in interfaces.items()),
        )


def _storage(nodes: Sequence[NodeFacts], names: dict[str, str], uri: str) -> Iterator[Finding]:
    bad = False
    for node in nodes:
        facts = node.storage
        if facts is None:
            continue
        bad = bad or bool(facts.problem or facts.unseen or facts.differs)
        if facts.problem:
            remedy = (
                "See that it is mounted there, that Ray's user may write, that it has room, and "
                "that credentials are on the node."
            )
            yield _problem("storage", f"{names[node.id]} cannot use {uri}: {facts.problem}", remedy)
        remedy = "Mount one shared filesystem there on every node, the head included, or use s3://."
        for others, what in (
            (facts.unseen, "does not see"),
            (facts.differs, "reads other bytes than were written in"),
        ):
            if others:
                listed = _and([names.get(other, other[:8]) for other in others])
                yield _problem(
                    "storage",
                    f"{names[node.id]} {what} the file of {listed} in {uri}: it is not shared",
                    remedy,
                )
    rates = [
        node.storage.write_mb_per_s
        for node in nodes
        if node.storage and node.storage.write_mb_per_s is not None
    ]
    if uri.startswith("gs://"):
        words = (
            f"{uri} cannot create a file only where there is none, as far as Everstep's client can "
            "ask for it: of two processes that write the same name at the same moment both may be "
            "told that they have written it"
        )
        remedy = (
            "Use s3:// or a shared filesystem where runs must not depend on that; "
            "docs/checkpoints.md (Which storage promises what) says what is left without."
        )
        yield _warning("storage", words, remedy)
    if not bad and rates:
        yield _ok(
            "storage",
            f"all nodes read each other's bytes in {uri}; slowest write {min(rates):g} MB/s",
        )


def _memory(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    found = False
    for node in nodes:
        if (
            node.shared_memory_bytes is not None
            and node.shared_memory_bytes < SMALL_SHARED_MEMORY_BYTES
            and not node.is_head
        ):
            found = True
            remedy = (
                "Give the container at least twice the model's state (`--shm-size`, `shm_size:`, "
                "an emptyDir in memory)."
            )
            words = (
                f"{names[node.id]} has {node.shared_memory_bytes / 1e6:.0f} MB of shared memory: "
                "a death may cost steps"
            )
            yield _warning("memory", words, remedy)
        if node.temporary_free_bytes is not None and node.temporary_free_bytes < SMALL_DISK_BYTES:
            found = True
            remedy = "Free some, or move Ray's files by `ray start --temp-dir` and TMPDIR."
            words = (
                f"{names[node.id]} has {node.temporary_free_bytes / 1e6:.0f} MB left for "
                "temporary files"
            )
            yield _warning("memory", words, remedy)
    if not found and nodes:
        yield _ok("memory", "shared memory and temporary space have room")


def _gpus(nodes: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[Finding]:
    with_gpus = [node for node in nodes if node.gpus]
    for node in with_gpus:
        if node.cuda is False:
            remedy = (
                "Install a CUDA build of torch and a driver that fits it; `python -c 'import "
                "torch; torch.cuda.init()'` says more."
            )
            yield _problem(
                "gpus",
                f"Ray gives out {node.gpus} GPUs of {names[node.id]}, and torch cannot use them",
                remedy,
            )
        elif node.cuda is None:
            remedy = "Check again when one is free; NCCL was not tried."
            yield _warning("gpus", f"no GPU of {names[node.id]} was free to be tried", remedy)
    if with_gpus and all(node.cuda for node in with_gpus):
        yield _ok("gpus", f"torch can use the GPUs of {len(with_gpus)} nodes")


def _all_reduce(facts: AllReduceFacts | None, names: dict[str, str]) -> Iterator[Finding]:
    if facts is None:
        yield _ok("all_reduce", "fewer than two nodes run ranks: nothing to add up")
    elif facts.problem is not None:
        variable = NCCL_VARIABLE if facts.backend == "nccl" else GLOO_VARIABLE
        remedy = (
            f"Where ports are well, {facts.backend} may have picked the wrong interface: set "
            f"{variable} in the environment of "
            "`ray start`, see that /etc/hosts does not give the host's name a loopback address, "
            "and try again."
        )
        listed = _and([names[node] for node in facts.nodes])
        yield _problem(
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
        yield _ok("all_reduce", f"{words}, {facts.round_s * 1000:.1f} ms each ({rate:.0f} MB/s)")


def _and(words: Iterable[str]) -> str:
    *first, last = list(words) or ["nobody"]
    return f"{', '.join(first)} and {last}" if first else last
