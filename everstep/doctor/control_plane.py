"""Findings about the service, and about the Ray cluster as the service sees it."""

from __future__ import annotations

from everstep.doctor.finding import Finding, ok, problem, warning
from everstep.supported import RAY
from everstep.wire import ClusterInfo, Readiness

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
            remedy = f"Once it is repaired: `everstep uncordon {node.id[:12]}`."
            found.append(
                warning(
                    "cluster", f"node {node.hostname} ({node.id[:12]}) is {node.state}{why}", remedy
                )
            )
    words = f"{len(live)} live nodes, {len(workers)} can run ranks; Ray {cluster.ray_version}"
    return [*found, ok("cluster", words)] if workers else found
