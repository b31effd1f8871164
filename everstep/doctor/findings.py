"""All findings of ``everstep doctor``, with those about the control plane and the shared
storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from everstep.doctor.nodes import (
    Finding,
    all_reduce_findings,
    answer_findings,
    clock_findings,
    gpu_findings,
    interface_findings,
    joined,
    memory_findings,
    ok,
    port_findings,
    problem,
    version_findings,
    warning,
)
from everstep.supported import RAY
from everstep.wire import ClusterInfo, Readiness
from everstep.wire.cluster import StorageStatus
from everstep.wire.deployment import DeploymentCheck, NodeFacts


def check_findings(check: DeploymentCheck, asked_at: datetime) -> list[Finding]:
    """Return the findings from the check's job.

    Args:
        check: a finished check.
        asked_at: the service's clock when it was requested.
    """
    if check.report is None:
        remedy = (
            "Read the job's log on Ray's dashboard. Install Everstep in the environment in which "
            "`ray start` runs."
        )
        return [problem("nodes", f"the check failed: {check.problem}", remedy)]
    nodes = check.report.nodes
    names = {node.id: f"{node.hostname} ({node.id[:8]})" for node in nodes}
    up = [node for node in nodes if node.problem is None]
    parts = (
        answer_findings(nodes, names),
        version_findings(up, names, check.service),
        clock_findings(up, names, check.report, check.service, asked_at),
        port_findings(up, names),
        interface_findings(up, names),
        sharing_findings(up, names, check.service.storage),
        memory_findings(up, names),
        gpu_findings(up, names),
        all_reduce_findings(check.report.all_reduce, names),
    )
    return [finding for part in parts for finding in part]


# ---------------------------------------------------------------- control plane

# Findings about the service, and about the Ray cluster as the service sees it.

LAG_PROBLEM_S = 30.0


def service_findings(ready: Readiness) -> list[Finding]:
    """Return the findings from ``/readyz``."""
    found = []
    if ready.database == "down":
        remedy = (
            "Read `not_ready` in the service's log; check --database, and that the database runs "
            "and accepts connections."
        )
        found.append(problem("service", "the service cannot use its database", remedy))
    if ready.storage == "down":
        remedy = (
            "Read `not_ready` in the service's log; check --storage, that it is mounted on the "
            "service's host, that it has free space, and that "
        )
        found.append(
            problem(
                "service",
                "the service cannot use its storage",
                remedy + "the service's user can write there.",
            )
        )
    if ready.ray == "down":
        remedy = (
            "Check that the head runs, that --ray-address is the URL of its dashboard, and that "
            "RAY_AUTH_TOKEN_PATH names a file with its token."
        )
        found.append(problem("service", "the service cannot reach Ray", remedy))
    if ready.reconciler_lag_s is None or ready.reconciler_lag_s > LAG_PROBLEM_S:
        since = (
            "never" if ready.reconciler_lag_s is None else f"not for {ready.reconciler_lag_s:.0f} s"
        )
        remedy = (
            "Without it no run starts or ends. Look for errors in the service's log; with several "
            "replicas, in the log of the leader."
        )
        found.append(problem("service", f"the reconciler has {since} finished a tick", remedy))
    return found or [ok("service", "database, storage, Ray and the reconciler respond")]


def cluster_findings(cluster: ClusterInfo) -> list[Finding]:
    """Return the findings from the cluster's list of nodes."""
    if not cluster.available:
        return [
            problem(
                "cluster",
                "Ray does not respond to the service",
                "Check that the head runs: `ray status` there.",
            )
        ]
    live = [node for node in cluster.nodes if node.state != "DEAD"]
    workers = [
        node for node in live if node.resources_total.get("CPU") or node.resources_total.get("GPU")
    ]
    found = []
    version = cluster.ray_version
    if version is not None and (refused := RAY.problem(version, "the cluster")):
        found.append(problem("cluster", *refused.split("; ", 1)))
    if not workers:
        remedy = (
            "Start a worker node: `ray start --address=HEAD:6379` with the head's token and the "
            "same packages."
        )
        found.append(
            problem("cluster", "no live node offers CPUs or GPUs: no run can start", remedy)
        )
    for node in live:
        if node.state != "ALIVE":
            why = (
                f" by {node.mark.by}: {node.mark.reason or 'no reason given'}"
                if node.mark
                else " according to Ray"
            )
            remedy = f"Once it is repaired: `everstep cordon --undo {node.id[:12]}`."
            found.append(
                warning(
                    "cluster", f"node {node.hostname} ({node.id[:12]}) is {node.state}{why}", remedy
                )
            )
    words = f"{len(live)} live nodes, {len(workers)} can run ranks; Ray {cluster.ray_version}"
    return [*found, ok("cluster", words)] if workers else found


# ---------------------------------------------------------------- shared storage

# Findings about the storage: whether all nodes share it, and whether it matches the database.


def identity_findings(status: StorageStatus) -> list[Finding]:
    """Return the differences between the service's database and its storage."""
    found = []
    if status.problem is not None:
        remedy = (
            'Run `everstep storage`, and read "Another storage, or an older database" in '
            "docs/runbook.md."
        )
        found.append(problem("storage", status.problem, remedy))
    for run in status.behind:
        words = (
            f"submission {run.storage_submission} of run {run.run_id}, but the database only knows "
            f"{run.database_submission}"
        )
        remedy = (
            "Restore a newer database, or run `everstep storage --adopt` once no other service "
            "uses this storage."
        )
        found.append(problem("storage", f"the storage has {words}", remedy))
    if status.unknown_runs:
        words = (
            f"the storage has {len(status.unknown_runs)} runs that the database does not know, "
            f"for example {status.unknown_runs[0]}"
        )
        found.append(
            warning(
                "storage",
                words,
                "They belong to a newer database or another service. Everstep leaves them alone.",
            )
        )
    return found


def sharing_findings(
    nodes: Sequence[NodeFacts], names: dict[str, str], uri: str
) -> Iterator[Finding]:
    """Return whether every node can write the storage and read what the others wrote."""
    problems = [found for node in nodes for found in _node_problems(node, names, uri)]
    yield from problems
    if uri.startswith("gs://"):
        words = (
            f"Everstep's client for {uri} has no conditional create: if two processes write the "
            "same name at the same time, both may be told that they created it"
        )
        remedy = (
            "Use s3:// or a shared filesystem for full guarantees; docs/checkpoints.md (What each "
            "storage guarantees) lists what is missing without it."
        )
        yield warning("storage", words, remedy)
    rates = [
        node.storage.write_mb_per_s
        for node in nodes
        if node.storage and node.storage.write_mb_per_s is not None
    ]
    if rates and not problems:
        yield ok(
            "storage",
            f"all nodes read each other's files in {uri}; slowest write {min(rates):g} MB/s",
        )


def _node_problems(node: NodeFacts, names: dict[str, str], uri: str) -> Iterator[Finding]:
    """Return what keeps a node from writing the storage, or from reading other nodes' files."""
    facts = node.storage
    if facts is None:
        return
    if facts.problem:
        remedy = (
            "Check that it is mounted there, that Ray's user can write, that it has free "
            "space, and that the node has its credentials."
        )
        yield problem("storage", f"{names[node.id]} cannot use {uri}: {facts.problem}", remedy)
    remedy = "Mount one shared filesystem there on every node, the head included, or use s3://."
    for others, what in (
        (facts.unseen, "does not see"),
        (facts.differs, "reads different bytes than were written to"),
    ):
        if others:
            listed = joined([names.get(other, other[:8]) for other in others])
            yield problem(
                "storage",
                f"{names[node.id]} {what} the file of {listed} in {uri}: it is not shared",
                remedy,
            )
