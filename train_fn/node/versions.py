"""Versions that ranks of one group must share."""

from __future__ import annotations

import importlib.metadata
import platform

import ray
import torch


def versions() -> dict[str, str]:
    """Return the versions that must be equal on every node, by package."""
    return {
        "everstep": importlib.metadata.version("everstep"),
        "ray": ray.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **_cuda_versions(),
    }


def _cuda_versions() -> dict[str, str]:
    """Return the versions that torch was built with; none if it was built without CUDA. This needs
    no GPU."""
    if torch.version.cuda is None:
        return {}
    return {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
