"""Findings about the storage: whether all nodes share it, and whether it fits the database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everstep.doctor.finding import Finding, joined, ok, problem, warning
from everstep.wire.deployment import NodeFacts
from everstep.wire.storage_status import StorageStatus


def identity_findings(status: StorageStatus) -> list[Finding]:
    """Return what does not fit between the service's database and its storage."""
    found = []
    if status.problem is not None:
        remedy = (
            "See `everstep storage show`, and in docs/runbook.md: another storage, or an older "
            "database."
        )
        found.append(problem("storage", status.problem, remedy))
    for run in status.behind:
        words = (
            f"submission {run.storage_submission} of run {run.run_id}, and the database knows "
            f"{run.database_submission}"
        )
        remedy = (
            "Restore a newer database, or run `everstep storage adopt` once no other service uses "
            "this storage."
        )
        found.append(problem("storage", f"the storage holds {words}", remedy))
    if status.unknown_runs:
        words = (
            f"the storage holds {len(status.unknown_runs)} runs that the database does not know, "
            f"{status.unknown_runs[0]} for one"
        )
        found.append(
            warning(
                "storage",
                words,
                "They are of a newer database or of another service; nothing touches them.",
            )
        )
    return found


def sharing_findings(
    nodes: Sequence[NodeFacts], names: dict[str, str], uri: str
) -> Iterator[Finding]:
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
            yield problem("storage", f"{names[node.id]} cannot use {uri}: {facts.problem}", remedy)
        remedy = "Mount one shared filesystem there on every node, the head included, or use s3://."
        for others, what in (
            (facts.unseen, "does not see"),
            (facts.differs, "reads other bytes than were written in"),
        ):
            if others:
                listed = joined([names.get(other, other[:8]) for other in others])
                yield problem(
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
        yield warning("storage", words, remedy)
    if not bad and rates:
        yield ok(
            "storage",
            f"all nodes read each other's bytes in {uri}; slowest write {min(rates):g} MB/s",
        )
