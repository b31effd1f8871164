"""Whether a task, its model and its data go with the settings of the run: before anything is
trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import CheckpointSpec
from train_fn.checks.check import Moment, checked
from train_fn.checks.returns import require_measured
from train_fn.errors import BadTask, few
from train_fn.samples.sampler import MicroBatch, Sampler
from train_fn.tasks.protocol import METHOD, Task, is_iterable, makes_own_steps, where

_WAY_OUT = "or set train.exactness to world_size"

logger = logging.getLogger(__name__)


def require_fits(spec: RunSpec, task: Task, model: nn.Module, train_set: Any) -> None:
    """Raise BadTask for settings that a task with ``training_step``, or its data, does not go
    with."""
    train, source = spec.train, where(task, METHOD)
    if train.on_out_of_memory == "smaller" and is_iterable(train_set):
        raise BadTask(
            "train.on_out_of_memory is smaller, but the train set of "
            f"{where(task, 'build_datasets')} is iterable, and its order of samples depends on the "
            "size of micro-batches. Give it __len__ and __getitem__, or set on_out_of_memory to "
            "fail and a smaller train.micro_batch_size"
        )
    if not makes_own_steps(task):
        return
    problems = {
        f"train.micro_batch_size is {train.micro_batch_size}, but {source} gets a rank's whole "
        "share of the global batch. Leave it out, and cut the batch in training_step": (
            train.micro_batch_size != "auto" and spec.replay is None
        ),
        f"train.on_out_of_memory is smaller, but {source} gets a rank's whole share of the global "
        "batch. Set it to fail, and cut the batch in training_step": (
            train.on_out_of_memory == "smaller"
        ),
        f"train.precision is {train.precision}, but {source} runs the backward passes. Leave it "
        "out, and use torch.autocast in training_step": train.precision != "fp32",
        f"train.compile is set, but {source} calls the model as it likes. Leave it out, and call "
        "torch.compile in build_model": train.compile,
        f"train.batch_by is tokens, but {source} gets a rank's whole share of the global batch. "
        "Leave it out, and return batches by length from collate": train.batch_by == "tokens",
        "train.unused_parameters is allow, which is always so for a task with training_step. Leave "
        "it out": train.unused_parameters == "allow",
        f"the train set of {where(task, 'build_datasets')} is iterable, whose micro-batches do not "
        f"add up to a rank's share for {source}. Give it __len__ and __getitem__": is_iterable(
            train_set
        ),
    }
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        problems[
            f"{where(task, 'build_model')} returned parameters without a shape. Call the model "
            f"once in build_model: {source} has no first pass that gives them one"
        ] = True
    for problem, is_there in problems.items():
        if is_there:
            raise BadTask(problem)


def require_fit_for(device: torch.device, model: nn.Module) -> None:
    """Raise BadTask for a model that cannot be trained on such devices."""
    if device.type == "cpu" and any(
        isinstance(module, nn.SyncBatchNorm) for module in model.modules()
    ):
        raise BadTask(
            "torch's SyncBatchNorm works on GPUs only; on CPUs use norm group, which any world "
            "size agrees on, or batch"
        )


def require_elastic(task: Task, *, exchanges: bool, has_sparse: bool) -> None:
    """Raise BadTask if the task computes something else at another world size, as
    ``train.exactness: elastic`` does not allow.

    Args:
        exchanges: whether ranks exchange in the forward pass.
        has_sparse: whether gradients are sparse.
    """
    model = where(task, "build_model")
    if makes_own_steps(task):
        raise BadTask(
            f"{where(task, METHOD)} gets a rank's whole share of the global batch, so its "
            "steps depend on the world size, and train.exactness elastic cannot hold. Let the task "
            f"return a loss instead, {_WAY_OUT}"
        )
    if exchanges:
        raise BadTask(
            f"{model} returned a model that exchanges in its forward pass, so its results depend "
            "on the world size, and train.exactness elastic cannot hold. Use layers that "
            f"see one micro-batch only, as BatchNorm for SyncBatchNorm, {_WAY_OUT}"
        )
    if has_sparse:
        raise BadTask(
            f"{model} returned embeddings with sparse gradients, which train.exactness elastic "
            f"does not add. Make them with sparse=False, {_WAY_OUT}"
        )


def require_best_metric(task: Task, held_out: Any, checkpoint: CheckpointSpec) -> None:
    """Raise BadTask if the metric that decides which checkpoint is best cannot be measured on the
    data that are held out."""
    if checkpoint.named_metric is None:
        return
    logger.info(
        "the best checkpoint is the one with the %simum of %s",
        checkpoint.best_mode,
        checkpoint.best_metric,
    )
    if held_out is None or (not is_iterable(held_out) and len(held_out) == 0):
        raise BadTask(
            "checkpoint.best_metric is set, but the task holds nothing out to evaluate on; set it "
            "to null"
        )
    require_measured(task, checkpoint.named_metric)


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


def hooked_parameters(model: nn.Module) -> list[str]:
    """Return the names of parameters that have gradient hooks of the task."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]


# ---------------------------------------------------------------- small batches

# Micro-batches of one sample, which BatchNorm cannot train on: found before the first step, and
# not at the end of an epoch.

_NEEDS_SEVERAL = "Expected more than 1 value per channel when training"
"""How torch says it."""


def smallest_micro_batch(sampler: Sampler, total_steps: int) -> MicroBatch | None:
    """Return a micro-batch of a single sample, if the run has one."""
    ends = sorted(sampler.with_smallest(total_steps))
    micros = (micro for k in ends for micro in sampler.share(0, k, 0, 1))
    return next((micro for micro in micros if len(micro.indices) == 1), None)


@checked(Moment.FIRST_PASS, cost="a forward pass over one sample, if the model has BatchNorm")
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
            f"has one: {sampler.num_samples} samples in global batches of {size} "
            f"and micro-batches of {micro_size}. "
            f"{_remedy(sampler)}, or use GroupNorm or "
            "LayerNorm, which normalise each sample by itself"
        ) from exc
    except Exception:
        return


def trains_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _NormBase) and module.training for module in model.modules())


def _remedy(sampler: Sampler) -> str:
    """Settings under which no micro-batch of this data has a single sample."""
    if sampler.fingerprint:  # of lengths
        return "Leave out samples whose length few others have, or raise train.micro_batch_size"
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
