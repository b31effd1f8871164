"""Set the train and eval modes of a model's modules as the task built them, and restore them after
an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

logger = logging.getLogger(__name__)

Modes = list[tuple[nn.Module, bool]]
"""Every module and whether it is in train mode; a module comes before those inside it."""


def modes_of(model: nn.Module) -> Modes:
    return [(module, module.training) for module in model.modules()]


class BuiltModes:
    """Remember the modes in which a model was built. Its state holds the modes that differ now, by
    module name."""

    def __init__(self, model: nn.Module) -> None:
        self._built = [(name, module, module.training) for name, module in model.named_modules()]

    def state_dict(self) -> dict[str, bool]:
        return {
            name: module.training for name, module, built in self._built if module.training != built
        }

    def load_state_dict(self, state: dict[str, bool]) -> None:
        _set_modes([(module, state.get(name, built)) for name, module, built in self._built])


def set_modes_for_training(model: nn.Module) -> list[str]:
    """Put a new model into train mode, except for the modules that the task put into eval mode.

    A module in eval mode inside a model in train mode is the task's choice: a frozen BatchNorm,
    say. A model that is in eval mode as a whole is not: ``from_pretrained`` of Hugging Face's
    libraries returns such models.

    Return the names of the outermost modules that are in eval mode now.
    """
    built = modes_of(model)
    model.train()
    if any(training for _, training in built):
        _set_modes([(module, training and module.training) for module, training in built])
    else:
        logger.info("build_model returned a model in eval mode; it was put into train mode")
    return _outermost_in_eval(model, "")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode inside the block, and restore every module's mode afterwards."""
    modes = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        _set_modes(modes)


def _set_modes(modes: Modes) -> None:
    """Set modes by calling each module's own ``train``, which may do more than set a flag: LoRA
    layers merge their weights in eval mode."""
    for module, training in modes:
        if module.training != training:
            module.train(training)
    for module, training in modes:  # in case a module's own train() ignores the mode
        module.training = training


def _outermost_in_eval(module: nn.Module, name: str) -> list[str]:
    if not module.training and not any(inner.training for inner in module.modules()):
        return [name or "the whole model"]
    return [
        each
        for inner, child in module.named_children()
        for each in _outermost_in_eval(child, f"{name}.{inner}".strip("."))
    ]
