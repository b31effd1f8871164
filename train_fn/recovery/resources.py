"""The Ray resources of one rank."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.spec.sections import ScalingSpec


def use_gpu(spec: ScalingSpec, cluster: Mapping[str, float]) -> bool:
    """Return whether ranks run on GPUs. ``auto`` means yes if the cluster has enough for
    ``min_workers``."""
    if spec.use_gpu != "auto":
        return spec.use_gpu
    return cluster.get("GPU", 0.0) >= spec.min_workers * spec.resources_per_worker.get("GPU", 1.0)


def worker_resources(spec: ScalingSpec, on_gpu: bool) -> dict[str, float]:
    """Return the Ray resources of one rank."""
    resources = dict(spec.resources_per_worker)
    if on_gpu:
        resources.setdefault("GPU", 1.0)
    return resources
