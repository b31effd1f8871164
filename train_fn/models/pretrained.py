"""Weights to start from, out of a file."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train_fn.errors import BadTask, DataMissing

_INSIDE = ("state_dict", "model", "model_state_dict")
"""Under which names other programs keep the weights within what they save."""
_PREFIXES = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before names."""
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
"""Torchvision's files for densenet keep names that Python once allowed: norm.1 is norm1."""
_SHOWN = 5

logger = logging.getLogger(__name__)


def load_weights(
    model: nn.Module, path: Path, *, num_classes: int, ignored: tuple[str, ...] = ()
) -> list[str]:
    """Start ``model`` from a file of ``torch.save``; the names of what stays random.

    A layer whose first dimension is ``num_classes`` in the model and another number in the file is
    a classifier of other classes, and stays random. Everything else has to fit, by name and shape.

    Args:
        ignored: beginnings of names in the file that the model does without, such as auxiliary
            heads.

    Raises:
        DataMissing: there is no such file on this node, or it cannot be read.
        BadTask: it does not hold weights of this model.
    """
    found = _read(path)
    wanted = model.state_dict()
    unknown = [name for name in found if name not in wanted and not name.startswith(ignored)]
    missing = [
        name for name in wanted if name not in found and not name.endswith("num_batches_tracked")
    ]
    other = [name for name in wanted if name in found and found[name].shape != wanted[name].shape]
    random = [
        name for name in other if wanted[name].ndim > 0 and wanted[name].shape[0] == num_classes
    ]
    if unknown or missing or len(random) < len(other):
        problems = {
            "unknown": unknown,
            "missing": missing,
            "of another shape": [name for name in other if name not in random],
        }
        said = "; ".join(
            f"{len(names)} {what} ({_list(names)})" for what, names in problems.items() if names
        )
        raise BadTask(f"task.model.args.weights_path: {path} does not fit the model: {said}")
    taken = {name: value for name, value in found.items() if name in wanted and name not in random}
    model.load_state_dict(taken, strict=False)
    if random:
        logger.info("%s is for other classes: %s start from random weights", path, _list(random))
    return random


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise DataMissing(
            f"task.model.args.weights_path: there is no file {path} on this node; put it on every "
            "node"
        )
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:
        raise DataMissing(
            f"task.model.args.weights_path: {path} cannot be read as weights "
            f"({type(exc).__name__}: {str(exc)[:200]}); "
            "save the model's state_dict() by torch.save"
        ) from exc
    if isinstance(content, dict):
        content = next(
            (content[name] for name in _INSIDE if isinstance(content.get(name), dict)), content
        )
    if not isinstance(content, dict) or not all(
        isinstance(value, torch.Tensor) for value in content.values()
    ):
        raise BadTask(
            f"task.model.args.weights_path: {path} holds no state_dict of tensors by name"
        )
    weights = {_OLD_DENSENET.sub(r"\1", str(name)): value for name, value in content.items()}
    for prefix in _PREFIXES:
        if weights and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
