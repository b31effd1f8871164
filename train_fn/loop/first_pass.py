"""The first forward and backward pass of an attempt. It finds out how the model behaves, and its
results are dropped.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from train_fn.elastic.exchange import TreeLateChanges, TreeValues
from train_fn.errors import BadTask, StateNotWhole
from train_fn.loop.build import owners_of
from train_fn.samples.sampler import IndexArray, MicroBatch, Sampler, torch_generators
from train_fn.state.contents import Sketch, alike, few, sketch
from train_fn.state.optim import drop_gradients
from train_fn.state.sound_state import NOT_COMPARED, numerics_of
from train_fn.state.trained_parameters import GradientWatch
from train_fn.step.buffers import VolatileBuffers
from train_fn.step.plain_attributes import PlainAttributes
from train_fn.step.untrained import TensorPlace, WarmUp, untrained_places
from train_fn.tasks.checks import check_gradients, check_moves, uses_nothing, where
from train_fn.tasks.protocol import Sum, Task

if TYPE_CHECKING:
    from train_fn.loop.replica import Replica


class _Undoing:
    """Put everything back after a first pass, also after one that failed. Raise StateNotWhole, and
    leave the state incomplete, if a run's state cannot be put back."""

    def __init__(self, replica: Replica, places: list[TensorPlace], *, is_fresh: bool) -> None:
        parts, self._replica = replica.parts, replica
        moving = parts.moving if parts.is_kept else None
        self.warm_up = WarmUp(replica.state.model, places, is_fresh=is_fresh, moving=moving)
        self.attributes = PlainAttributes(owners_of(replica.task, replica.state.model))

    def __enter__(self) -> _Undoing:
        state = self._replica.state
        self._was_complete, state.complete = state.complete, False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        state = self._replica.state
        if kind is not None and not self._was_complete:
            return  # nothing to lose
        lost = self.warm_up.put_back()
        changed = self._replica.changed_by_pass = self.attributes.changed()
        self._replica.task_state.load(state.task)
        if kind is None:
            _warn_of_unsaved_changes(self._replica, changed, self.attributes)
        self.attributes.put_back()
        if lost:
            raise StateNotWhole(state.step, f"the first pass of the attempt changed {few(lost)}")
        state.complete = self._was_complete


def run_first_pass(
    replica: Replica,
    batch: Any | None,
    loaded: Sketch,
    indices: IndexArray,
    *,
    is_fresh: bool,
) -> VolatileBuffers:
    """Run ``batch`` forward and backward, put everything back, and return what forward passes
    change. A collective.

    Also finds out what a sample weighs, and whether a forward pass draws random numbers.

    Args:
        loaded: sketch of ``batch`` as it was loaded.
        indices: of the samples in ``batch``.
        is_fresh: whether no state is loaded afterwards.
    """
    state, peers, parts = replica.state, replica.peers, replica.parts
    places = untrained_places(state.model, replica.parameters)
    with _Undoing(replica, places, is_fresh=is_fresh) as undoing:
        moving, ignored, runs_again = _pass_and_check(
            replica, batch, loaded, indices, places, undoing.warm_up
        )
    names = [place.name for place in places]
    moving |= {number for number, name in enumerate(names) if name in parts.moving}
    ignored |= {number for number, name in enumerate(names) if name in parts.ignored}
    found = peers.gather((moving, ignored))
    moving, ignored = (set[int]().union(*each) for each in zip(*found, strict=True))
    build = partial(
        VolatileBuffers, places, moving, ignored, peers, state.carry, runs_again=runs_again
    )
    if (tree := replica.exchange) is None:
        return build()
    return build(
        make_values=partial(TreeValues, exchange=tree),
        make_late=partial(TreeLateChanges, exchange=tree),
    )


def _pass_and_check(
    replica: Replica,
    batch: Any | None,
    loaded: Sketch,
    indices: IndexArray,
    places: list[TensorPlace],
    warm_up: WarmUp,
) -> tuple[set[int], set[int], bool]:
    """Run the pass, and put nothing back. Return the numbers of the places that it changed, of
    those to ignore, and whether backward runs forward passes again."""
    assert replica.wrapped is not None
    state, peers, task = replica.state, replica.peers, replica.task
    replica.seed(0, 0)
    generators = torch_generators(peers.device)
    watched, before = GradientWatch(replica.parameters), replica.trained.sums()
    loss_sum, weight = replica.wrapped(batch)
    watched.require_untouched(where(task, "loss"))
    if replica.draws_from_torch_alone:
        replica.draws = not all(map(torch.equal, generators, torch_generators(peers.device)))
    moving, ignored = warm_up.look()
    check_moves(task, loss_sum)
    weighed, num_ranks = _backward(replica, loss_sum, weight)
    if torch.are_deterministic_algorithms_enabled() and not replica.parts.is_kept:
        averaged_over = 1 if replica.exchange is not None else peers.world_size
        if replica.beside_kept and averaged_over > 1:
            averaged_over = NOT_COMPARED
        replica.parts.numerics = numerics_of(loss_sum.detach(), replica.parameters, averaged_over)
    if 0 < weighed < math.inf:
        replica.weight_per_sample = weighed / (len(indices) * num_ranks)
    replica.trained.check_values(
        before,
        where(task, "loss"),
        "A rank calls it once for each of its micro-batches, so ranks would train different "
        "models. Let the optimizer change them, or on_epoch_end",
    )
    _require_samples_unchanged(replica, loaded, batch, indices)
    if replica.used is None:
        check_gradients(
            task, state.model, may_be_unused=peers.alone or replica.exchange is not None
        )
    else:
        if batch is not None and not len(replica.used):
            raise uses_nothing(task)
        replica.used.drop_unused()
    drop_gradients(state.optimizer, replica.idle_parameters)
    runs_again = warm_up.has_moved_again()
    later = warm_up.look()[0] - moving
    _warn_of_changes_in_backward(replica, [places[number].name for number in sorted(later)])
    return moving, ignored, runs_again


def _backward(replica: Replica, loss_sum: torch.Tensor, weight: Sum) -> tuple[float, int]:
    """Run the first backward pass. Return a sum of its micro-batch's weight over ranks, which all
    run the same one, and the number of these ranks."""
    if replica.exchange is not None:
        loss_sum.backward()  # type: ignore[no-untyped-call]
        return float(weight), 1
    replica.sums.add(loss_sum, weight)
    replica.sums.backward(loss_sum)
    if replica.used is not None:
        replica.finish_exchange()
    return replica.sums.take().weight, replica.peers.world_size


def _warn_of_changes_in_backward(replica: Replica, names: list[str]) -> None:
    """Warn if the first backward pass changed tensors of the model on one of several ranks."""
    if names and not replica.peers.alone:
        replica.warn(
            f"backward changes {', '.join(names)}, which ranks do not agree on; change it in "
            "forward or on_epoch_end"
        )


def _warn_of_unsaved_changes(
    replica: Replica, changed: list[str], attributes: PlainAttributes
) -> None:
    """Warn if the first pass changed attributes that are not part of the state.

    Args:
        changed: attributes after the pass. Those that the task's ``load_state_dict``, called since,
            has put back are part of its state.
    """
    still = set(attributes.changed())
    if lost := [name for name in changed if name in still]:
        replica.warn(
            f"the first pass changes {few(lost)}, which no checkpoint holds: a restart "
            "begins with the first values. "
            "Register tensors as buffers of the model, take the count of steps from the parameter "
            "step of loss, draw from the global generators, and let state_dict() and "
            "load_state_dict() of the task keep the rest"
        )


def _require_samples_unchanged(
    replica: Replica, loaded: Sketch, batch: Any | None, indices: IndexArray
) -> None:
    """Raise BadTask if the pass over ``batch`` changed the data set along with it: each rank would
    train on its own changes from then on."""
    if alike(loaded, sketch(batch)):
        return
    # Read twice: a data set that draws from a generator of its own is never the same.
    again, once_more = (sketch(replica.load(MicroBatch(0, 0, indices)).batch) for _ in range(2))
    if alike(again, once_more) and not alike(again, loaded):
        raise BadTask(
            f"{where(replica.task, 'loss')} changes its batch in place, and with it the samples: "
            "the batch shares memory with the data set. Work on a copy, x = x.clone(), or copy "
            "samples in collate"
        )


def try_smallest(replica: Replica) -> None:
    """Refuse a micro-batch that is too small for the model's BatchNorm, and put back what trying it
    changed. Raises BadTask."""
    model = replica.state.model
    micro = (
        smallest_micro_batch(replica.sampler, replica.total_steps)
        if trains_batch_norm(model)
        else None
    )
    if micro is None:
        return
    before = WarmUp(model, untrained_places(model, replica.parameters), is_fresh=False)
    attributes = PlainAttributes(owners_of(replica.task, model))
    replica.seed(0, 0)
    batch = replica.load(micro).batch
    check_small_batch(replica.task, replica.sampler, micro, replica.step_module, batch)
    before.put_back()
    attributes.put_back()
    replica.task_state.load(replica.state.task)


# ---------------------------------------------------------------- small batches

# Micro-batches of one sample, which BatchNorm cannot train on: found before the first step, and
# not at the end of an epoch.

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
