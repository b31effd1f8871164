"""The first forward and backward pass of an attempt. It finds out how the model behaves, and its
results are dropped.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from train_fn.checks.check import Moment
from train_fn.checks.fits import check_small_batch, smallest_micro_batch, trains_batch_norm
from train_fn.checks.order import met_by_all
from train_fn.checks.returns import check_gradients, check_moves, check_sum, uses_nothing
from train_fn.checks.trained import GradientWatch, require_samples_kept
from train_fn.context import WorkerContext
from train_fn.elastic.exchange import TreeValues
from train_fn.errors import BadTask, few
from train_fn.loop.passes import Passes, empty_like, wrap
from train_fn.loop.replica import Replica
from train_fn.loop.sharded import GatheredWeights, passes_named, require_forgotten
from train_fn.node.device import kernels
from train_fn.samples.sampler import IndexArray, MicroBatch
from train_fn.session.speed import FlopCount
from train_fn.state.contents import Sketch, sketch
from train_fn.state.optim import drop_gradients
from train_fn.state.sound_state import NOT_COMPARED, numerics_of
from train_fn.step.buffers import MovingBuffers
from train_fn.step.peers import UsedParameters
from train_fn.step.trial import TrialPass
from train_fn.step.untrained import TensorPlace, WarmUp, with_their_like
from train_fn.tasks.protocol import Sum, where


def join(
    ctx: WorkerContext, replica: Replica, *, is_fresh: bool = False, begins: bool = True
) -> None:
    """Connect the replica to its peers, and run one backward pass whose gradients are dropped.

    DDP orders its buckets, and so the summation, by the first backward pass that it sees. Every
    attempt runs this one before the state is loaded, so that a resumed run sums in the same
    order as one that was never interrupted.

    Args:
        is_fresh: whether no state is loaded afterwards.
        begins: whether nobody may have tried micro-batches of this size yet.
    """
    parts, passes, state = replica.parts, replica.passes, replica.state
    task, sampler = parts.task, parts.sampler
    kinds = replica.peers.gather(kernels(ctx.device))
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    replica.together.must_agree = len(set(kinds)) == 1 and is_deterministic
    if replica.own is not None:
        passes.wrapped = passes.module
        state.task = parts.task_state.capture()
        passes.moving = replica.own.changed_by(state, parts.trained.parameters)
        return
    if replica.peers.alone or passes.tree is not None or state.gathered is not None:
        passes.wrapped = passes.module
    else:
        passes.wrapped = wrap(passes.module, ctx.device)
    micro = sampler.first_micro_batch()
    first, batch = micro.indices, passes.load(micro).batch
    if batch is None and passes.exchanges_in_forward:
        raise BadTask(
            f"{where(task, 'collate')} returned None for the first micro-batch; a model "
            "that exchanges in its forward pass "
            "needs to see one. Return a batch of no samples in place of None"
        )
    if passes.allows_unused:
        passes.used = UsedParameters(parts.trained.with_gradient, replica.peers)
    if state.gathered is not None:
        passes.nothing = batch  # counts nothing: not every model takes a batch of no samples
    else:
        passes.nothing = empty_like(batch) if passes.exchanges_in_forward else None
    loaded = sketch(batch)
    state.task = parts.task_state.capture()
    # Samples of several lengths do not take the same, and a task's own collate may pad them.
    is_varying = sampler.tokens_in(0, 0) is not None or hasattr(task, "collate")
    known = ctx.remembered  # to count takes longer than the pass
    flops = known.get("flops")
    if begins:
        try_pieces(passes, batch, len(first))
    count = None if is_varying or batch is None or "flops" in known else FlopCount()
    passes.moving = run_first_pass(
        replica, batch, loaded, first, is_fresh=is_fresh, count=count or nullcontext()
    )
    if count is not None:
        flops = count.of_sample(len(first))
        ctx.remember("flops", flops)
    parts.flops_per_sample = flops
    if passes.tree is not None:
        passes.tree.watch()


class _Undoing:
    """Put everything back after a first pass, also after one that failed."""

    def __init__(self, replica: Replica, *, is_fresh: bool) -> None:
        self._replica, parts = replica, replica.parts
        trained = parts.trained.parameters
        self.trial = TrialPass(parts.task, replica.state.model, trained, is_fresh=is_fresh)

    def __enter__(self) -> _Undoing:
        state = self._replica.state
        self._was_complete, state.complete = state.complete, False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        state = self._replica.state
        if kind is not None and not self._was_complete:
            return  # nothing to lose
        self._replica.passes.changed = self.trial.put_back()
        self._replica.parts.task_state.load(state.task)
        state.complete = self._was_complete


def run_first_pass(
    replica: Replica,
    batch: Any | None,
    loaded: Sketch,
    indices: IndexArray,
    *,
    is_fresh: bool,
    count: AbstractContextManager[object],
) -> MovingBuffers:
    """Run ``batch`` forward and backward, put everything back, and return what forward passes
    change. A collective.

    Also finds out what a sample weighs.

    Args:
        loaded: sketch of ``batch`` as it was loaded.
        indices: of the samples in ``batch``.
        is_fresh: whether no state is loaded afterwards.
        count: the context of the forward and of the backward pass.
    """
    state, peers = replica.state, replica.peers
    with _Undoing(replica, is_fresh=is_fresh) as undoing:
        places = undoing.trial.places
        moving, ignored, runs_again = _pass_and_check(
            replica, batch, loaded, indices, places, undoing.trial.warm_up, count
        )
        if beside := undoing.trial.changed_beside():
            replica.parts.warn(
                f"the loss changes {few(beside)}, which is no part of the model. A restart begins "
                "it anew: make the module that the task holds a part of the model in build_model"
            )
    found = peers.gather((moving, ignored))
    moving, ignored = (set[int]().union(*each) for each in zip(*found, strict=True))
    tree = replica.passes.tree
    return MovingBuffers(
        places,
        with_their_like(places, moving),
        ignored,
        peers,
        state.carry,
        runs_again=runs_again,
        make_values=None if tree is None else partial(TreeValues, exchange=tree),
    )


def _pass_and_check(
    replica: Replica,
    batch: Any | None,
    loaded: Sketch,
    indices: IndexArray,
    places: list[TensorPlace],
    warm_up: WarmUp,
    count: AbstractContextManager[object],
) -> tuple[set[int], set[int], bool]:
    """Run the pass, and put nothing back. Return the numbers of the places that it changed, of
    those to ignore, and whether backward runs forward passes again."""
    parts, passes, state, peers = replica.parts, replica.passes, replica.state, replica.peers
    task, shards = parts.task, state.gathered
    assert passes.wrapped is not None
    passes.seed(0, 0)
    source = where(task, "loss")
    with replica.checks.around(Moment.FIRST_PASS, source), met_by_all(replica.order, source):
        watched = GradientWatch(parts.trained.parameters)
        gathered = None if shards is None else GatheredWeights(shards)
        with ExitStack() as stack:
            if gathered is not None:
                stack.enter_context(passes_named(task))
                stack.enter_context(gathered.watched(source))
            stack.enter_context(count)
            loss_sum, weight = passes.wrapped(batch)
        watched.require_untouched(source)
        moving, ignored = warm_up.look()
        check_moves(task, loss_sum)
        with count:
            weighed, num_ranks = _backward(replica, loss_sum, weight)
        _note_numerics(replica, loss_sum)
        if 0 < weighed < math.inf:
            passes.weight_per_sample = weighed / (len(indices) * num_ranks)
    micro = MicroBatch(0, 0, indices)
    require_samples_kept(source, loaded, batch, lambda: sketch(passes.load(micro).batch))
    if passes.used is None:
        is_whole = gathered is None or gathered.were_all_called
        may_be_unused = peers.alone or passes.tree is not None or shards is not None
        check_gradients(task, state.model, may_be_unused=may_be_unused and is_whole)
        if shards is not None:
            if unused := [
                name
                for name, each in state.model.named_parameters()
                if each.requires_grad and each.grad is None
            ]:
                parts.warn(
                    f"{len(unused)} parameters have no part in the loss of the "
                    f"first micro-batch: {few(unused)}. Their gradients are zero until one uses "
                    "them; leave them out of the model if none ever does"
                )
            shards.sum_unused()
            require_forgotten(shards, task)
    else:
        if batch is not None and not len(passes.used):
            raise uses_nothing(task)
        passes.used.drop_unused()
    drop_gradients(state.optimizer, parts.trained.idle)
    runs_again = warm_up.has_moved_again()
    later = [places[number].name for number in sorted(warm_up.look()[0] - moving)]
    if later and not peers.alone:
        parts.warn(
            f"backward changes {', '.join(later)}, which ranks do not agree on; change it in "
            "forward or on_epoch_end"
        )
    return moving, ignored, runs_again


def _note_numerics(replica: Replica, loss_sum: torch.Tensor) -> None:
    """Note the fingerprint of this rank's kernels, where the weights are as they were built."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    averaged_over = 1 if replica.passes.tree is not None else replica.peers.world_size
    if replica.state.gathered is not None:
        averaged_over = NOT_COMPARED  # of a few rows
    parts = replica.parts
    parts.numerics = numerics_of(
        loss_sum.detach(),
        parts.trained.parameters,
        averaged_over,
        parts.sampler.micro_batch_size,
    )


def _backward(replica: Replica, loss_sum: torch.Tensor, weight: Sum) -> tuple[float, int]:
    """Run the first backward pass. Return a sum of its micro-batch's weight over ranks, which all
    run the same one, and the number of these ranks."""
    passes, shards = replica.passes, replica.state.gathered
    if shards is not None:
        with passes_named(replica.parts.task):
            loss_sum.backward()  # type: ignore[no-untyped-call]
        shards.finish_backward()
        return float(weight), 1
    if passes.tree is not None:
        loss_sum.backward()  # type: ignore[no-untyped-call]
        return float(weight), 1
    passes.sums.add(loss_sum, weight)
    passes.sums.backward(loss_sum)
    if passes.used is not None:
        passes.finish()
    return passes.sums.take().weight, replica.peers.world_size


def try_pieces(passes: Passes, batch: Any, num_samples: int) -> None:
    """Refuse a loss that returns a mean, and a micro-batch that is too small for the model's
    BatchNorm, and put back what trying it changed. Raises BadTask.

    Args:
        batch: the first micro-batch, of ``num_samples`` samples.
    """
    parts, task, sampler = passes.parts, passes.parts.task, passes.parts.sampler
    model, micro = parts.state.model, None
    if trains_batch_norm(model):
        micro = smallest_micro_batch(sampler, parts.total_steps)
    may_cut = parts.state.gathered is None and not passes.exchanges_in_forward
    if micro is None and not may_cut:
        return
    trial = TrialPass(task, model, parts.trained.parameters, is_fresh=False)
    if may_cut:
        check_sum(task, passes.module, batch, num_samples)
    if micro is not None:
        passes.seed(0, 0)
        smallest = passes.load(micro).batch
        check_small_batch(task, sampler, micro, passes.module, smallest)
    trial.put_back()
    parts.task_state.load(parts.state.task)
