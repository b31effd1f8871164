"""Findings about the storage: whether all nodes share it, and whether it matches the database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everstep.doctor.finding import Finding, joined, ok, problem, warning
from everstep.wire.deployment import NodeFacts
from everstep.wire.storage_status import StorageStatus


def identity_findings(status: StorageStatus) -> list[Finding]:
    """Return the differences between the service's database and its storage."""
    found = []
    if status.problem is not None:
        remedy = (
            'Run `everstep storage show`, and read "Another storage, or an older database" in '
            "docs/runbook.md."
        )
        found.append(problem("storage", status.problem, remedy))
    for run in status.behind:
        words = (
            f"submission {run.storage_submission} of run {run.run_id}, but the database only knows "
            f"{run.database_submission}"
        )
        remedy = (
            "Restore a newer database, or run `everstep storage adopt` once no other service uses "
            "this storage."
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
            "Use s3:// or a shared filesystem for full guarantees; docs/checkpoints.md (Which "
            "storage promises what) lists what is missing without it."
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
