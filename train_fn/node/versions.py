"""Versions of what a node runs. They must be the same on all nodes of a run."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

_PACKAGES = ("everstep", "ray", "torch", "torchvision")


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages that are installed, and of CUDA and NCCL if
    torch was built with CUDA. This needs no GPU."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a node that lacks it differs from the others
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
