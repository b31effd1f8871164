"""What is wrong, or remarkable, about a model as the task built it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from train_fn.errors import BadTask
from train_fn.state.contents import few
from train_fn.state.trained_parameters import hooked_parameters


def require_fit_for(device: torch.device, model: nn.Module) -> None:
    """Raise BadTask for a model that cannot be trained on such devices."""
    if device.type == "cpu" and any(
        isinstance(module, nn.SyncBatchNorm) for module in model.modules()
    ):
        raise BadTask(
            "torch's SyncBatchNorm works on GPUs only; on CPUs use norm group, which any world "
            "size agrees on, or batch"
        )


def exchanges_in_forward(model: nn.Module) -> bool:
    """Return whether a module exchanges values between ranks in every forward pass, so that all
    ranks must run the same number of them: one that normalises over all ranks, or a user's with an
    attribute ``exchanges_in_forward = True``."""
    return any(
        isinstance(module, nn.SyncBatchNorm) or getattr(module, "exchanges_in_forward", False)
        for module in model.modules()
    )


def warnings_of(model: nn.Module, in_eval: list[str]) -> Iterator[str]:
    """Yield warnings about a model for the run's user.

    Args:
        in_eval: names of the modules that are trained in eval mode.
    """
    if hooked := hooked_parameters(model):
        yield (
            f"gradient hooks on {few(hooked)} see the gradient of one micro-batch, times the world "
            "size: what is not linear, as clipping, depends on how many ranks there are. Use "
            "train.grad_clip_norm, or change gradients in a hook of the optimizer's"
        )
    if in_eval:
        yield (
            f"trained in eval mode, as build_model returned it: {few(in_eval)}; call .train() "
            "there if that is not meant"
        )
