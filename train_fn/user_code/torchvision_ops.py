"""Make torchvision importable with a CPU build of torch.

torchvision's wheel carries operators compiled for CUDA torch. If they do not load, importing
torchvision fails, because it registers shape functions for operators that do not exist. Declaring
their schemas first fixes that. The operators themselves (box suppression) serve detection, which
nothing here uses.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_kept_alive: list[Any] = []


def torchvision_models() -> ModuleType:
    """Return ``torchvision.models``. The first call imports it, which takes about a second."""
    declare_missing_ops()
    from torchvision import models

    return models  # type: ignore[no-any-return]


def torchvision_datasets() -> ModuleType:
    """Return ``torchvision.datasets``, imported by the first call."""
    declare_missing_ops()
    from torchvision import datasets

    return datasets  # type: ignore[no-any-return]


def declare_missing_ops() -> None:
    """Declare the operators that torchvision expects and its own library does not bring."""
    if _kept_alive or _library_loads():
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS.values():
        library.define(schema)  # type: ignore[no-untyped-call]
    _kept_alive.append(library)


def _library_loads() -> bool:
    """Return whether torchvision's compiled operators load into this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    libraries = list(Path(spec.submodule_search_locations[0]).glob("_C*.so"))
    try:
        for library in libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return bool(libraries)
