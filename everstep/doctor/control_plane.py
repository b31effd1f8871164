"""Findings about the service and the Ray cluster that it sees."""

from __future__ import annotations

from everstep.doctor.finding import Finding, ok, problem, warning
from everstep.wire import ClusterInfo, Readiness

LAG_PROBLEM_S = 30.0


def service_findings(ready: Readiness) -> list[Finding]:
    """What ``/readyz`` says."""
    found = []
    if ready.database == "down":
        remedy = (
            "See `not_ready` in the service's log; check --database, and that the database runs "
            "and takes connections."
        )
        found.append(problem("service", "the service cannot use its database", remedy))
    if ready.storage == "down":
        remedy = (
            "See `not_ready` in the service's log; check --storage, that it is mounted on the "
            "service's host, has room, and that "
        )
        found.append(
            problem(
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
        found.append(problem("service", "the service cannot reach Ray", remedy))
    if ready.reconciler_lag_s is None or ready.reconciler_lag_s > LAG_PROBLEM_S:
        since = (
            "never" if ready.reconciler_lag_s is None else f"not for {ready.reconciler_lag_s:.0f} s"
        )
        remedy = (
            "No run starts or ends by it. Look for errors in the service's log; with several "
            "replicas ask the one that leads."
        )
        found.append(problem("service", f"its reconciler has {since} finished a tick", remedy))
    return found or [ok("service", "database, storage, Ray and the reconciler answer")]


def cluster_findings(cluster: ClusterInfo) -> list[Finding]:
    """What the cluster's list of nodes says."""
    if not cluster.available:
        return [
            problem(
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
            problem("cluster", "no live node offers CPUs or GPUs: no run can start", remedy)
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
                warning(
                    "cluster", f"node {node.hostname} ({node.id[:12]}) is {node.state}{why}", remedy
                )
            )
    words = f"{len(live)} live nodes, {len(workers)} of them run ranks; Ray {cluster.ray_version}"
    return [*found, ok("cluster", words)] if workers else found
