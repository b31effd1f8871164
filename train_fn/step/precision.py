"""How a step computes: precision, deterministic kernels, and modules' train and eval modes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context for one forward pass. Its cache of casts is cleared on exit, so
    none is kept between micro-batches."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def build_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Return a loss scaler for fp16, which keeps small gradients from underflowing. It is disabled
    for other precisions."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


# ---------------------------------------------------------------- determinism

# Choose deterministic kernels if a run asks for them.
#
# The environment variables that they need are set when a rank is launched
# (``recovery/settings.py``).

BITWISE = "bitwise"
"""The same world size on the same hardware gives the same bits, even across restarts."""
ELASTIC = "bitwise at every world size"
"""As ``BITWISE``, whatever the number of ranks and its changes."""
BITWISE_WHERE_POSSIBLE = "bitwise where kernels are"
"""As ``BITWISE``, except for operators without a deterministic kernel. Torch warns of each."""
FLOAT_TOLERANCE = "float tolerance"
"""Results of two runs, and of a run before and after a restart, agree to float tolerance."""


def set_determinism(wanted: bool | Literal["auto"], device: torch.device) -> None:
    """Choose deterministic kernels if asked for. ``auto`` turns them on for CPUs, and only warns of
    operators without one."""
    deterministic = device.type == "cpu" if wanted == "auto" else wanted
    torch.use_deterministic_algorithms(deterministic, warn_only=wanted == "auto")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that writes every new tensor once more
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not deterministic


def reproducibility(
    exactness: Literal["world_size", "elastic"] = "world_size", *, compiled: bool = False
) -> str:
    """Return a text for users on how reproducible results of this process are.

    A compiled model promises no bits: the shapes that a process has seen before decide which
    kernels torch generates, and a restart sees them in another order.
    """
    if exactness == "elastic":
        return ELASTIC
    if compiled:
        return FLOAT_TOLERANCE
    if not torch.are_deterministic_algorithms_enabled():
        return FLOAT_TOLERANCE
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return BITWISE_WHERE_POSSIBLE
    return BITWISE


# ---------------------------------------------------------------- modes

# Set the train and eval modes of a model's modules as the task built them, and restore them after
# an evaluation.

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
