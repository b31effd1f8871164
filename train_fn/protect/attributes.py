"""Attributes of a loop's models that no state holds: counters, and random generators of their
own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from torch import nn

from train_fn.state.contents import few
from train_fn.step.plain_attributes import PlainAttributes

_SET_BY_ACCELERATE = ("_is_accelerate_prepared",)
"""Attributes that Accelerate sets on any model, also in the Trainer of Hugging Face."""

logger = logging.getLogger(__name__)


class AttributeWatch:
    """Warn of plain attributes that the first step of an attempt changes. A restart would begin
    with their first values.

    Args:
        models: by the prefix of their names.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        owners: dict[str, object] = {
            f"{prefix}{name}".strip("."): module
            for prefix, model in models.items()
            for name, module in model.named_modules()
            if not _is_of_library(type(module))
        }
        self._of_libraries = {
            f"{name}.{key}".strip(".")
            for name, owner in owners.items()
            for key in (*_names_of_libraries(type(owner)), *_SET_BY_ACCELERATE)
        }
        self._before: PlainAttributes | None = PlainAttributes(owners)

    def committed(self) -> None:
        """Compare the attributes after the first commit."""
        before, self._before = self._before, None
        if before is None:
            return
        changed = [name for name in before.changed() if not self._is_of_library(name)]
        if changed:
            logger.warning(
                "the first step changes %s, which no checkpoint holds: a restart begins with the "
                "first values. Register tensors as buffers of the model, take the count of steps "
                "from state.step_number, draw from the global generators, or pass an object with "
                "state_dict() and load_state_dict() that keeps the rest as es.protect(extra=…)",
                few(changed),
            )

    def _is_of_library(self, name: str) -> bool:
        return any(name == own or name.startswith(f"{own}.") for own in self._of_libraries)


def _names_of_libraries(kind: type) -> frozenset[str]:
    """Return the attributes that Lightning sets on a module of its own kind, as its trainer. They
    are Lightning's to keep."""
    return frozenset(
        name
        for base in kind.__mro__
        if base.__name__ == "LightningModule" and _is_of_library(base)
        for name in vars(base())
    )


def _is_of_library(kind: type) -> bool:
    """Return whether a class is of an installed package other than torch itself."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" in file and not kind.__module__.startswith("torch.")
