"""Micro-batches of one sample, which BatchNorm cannot train on: found before the first step, and
not at the end of an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from train_fn.errors import BadTask
from train_fn.samples.sampler import MicroBatch, Sampler
from train_fn.tasks.checks import where
from train_fn.tasks.protocol import Task

_NEEDS_SEVERAL = "Expected more than 1 value per channel when training"
"""How torch says it."""


def smallest_micro_batch(sampler: Sampler, total_steps: int) -> MicroBatch | None:
    """Return a micro-batch of a single sample, if the run has one."""
    ends = {0, sampler.steps_per_epoch - 1} if total_steps >= sampler.steps_per_epoch else {0}
    micros = (micro for k in sorted(ends) for micro in sampler.share(0, k, 0, 1))
    return next((micro for micro in micros if len(micro.indices) == 1), None)


def check_small_batch(
    task: Task, sampler: Sampler, micro: MicroBatch, step_module: nn.Module, batch: Any
) -> None:
    """Run a forward pass over ``batch``, which is the run's smallest; what it changes is put back
    by the caller.

    Raises BadTask where a BatchNorm of the model needs more samples. What else such a pass raises,
    the step itself will say.
    """
    try:
        with torch.no_grad():
            step_module(batch)
    except ValueError as exc:
        if _NEEDS_SEVERAL not in str(exc):
            return
        size, micro_size = sampler.global_batch_size, sampler.micro_batch_size
        last = (
            f"the last micro-batch of global batch {micro.k + 1} of an epoch"
            if micro_size > 1
            else "a micro-batch"
        )
        raise BadTask(
            f"{where(task, 'build_model')}: BatchNorm cannot train on a single sample, and {last} "
            f"has one: {sampler.num_samples} "
            f"samples in global batches of {size} and micro-batches of {micro_size}. "
            f"{_remedy(sampler)}, or use GroupNorm or "
            "LayerNorm, which normalise each sample by itself"
        ) from exc
    except Exception:
        return


def trains_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _NormBase) and module.training for module in model.modules())


def _remedy(sampler: Sampler) -> str:
    """Settings under which no micro-batch of this data has a single sample."""
    size, micro, length = sampler.global_batch_size, sampler.micro_batch_size, sampler.num_samples
    micros = [
        near
        for near in sorted(range(2, size + 1), key=lambda near: abs(near - micro))
        if not _has_single(length, size, near)
    ]
    if micros:
        return f"Set train.micro_batch_size to {micros[0]}"
    sizes = [
        near
        for near in range(size + 1, 2 * size + 2)
        if not _has_single(length, near, min(max(micro, 2), near))
    ]
    shorter = f"Leave {length % size} of the samples out (torch.utils.data.Subset)"
    return f"Set train.global_batch_size to {sizes[0]}" if sizes and micro > 1 else shorter


def _has_single(length: int, size: int, micro: int) -> bool:
    """Whether a micro-batch has one sample, of full global batches or of an epoch's last one."""
    return any(batch % micro == 1 for batch in {min(size, length), length % size or size})
