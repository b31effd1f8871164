"""Findings about each node: whether it responds, its clock, memory and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from everstep.doctor.finding import Finding, Level, ok, problem, warning
from everstep.wire.deployment import DeploymentReport, NodeFacts, ServiceFacts

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
