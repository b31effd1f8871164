"""Findings about versions: Python, Everstep, Ray, torch and CUDA must be the same on all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from everstep.doctor.finding import Finding, joined, ok, problem
from everstep.supported import RAY, TORCH
from everstep.wire.deployment import NodeFacts, ServiceFacts

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
