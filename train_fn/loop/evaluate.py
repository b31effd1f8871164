"""Evaluation: ranks share the micro-batches, and the averages are exact, the same at any world
size. The best checkpoint so far follows from them.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from everstep.wire.events import lookup
from storage.checkpoints.reader import best_of, is_better
from storage.errors import CorruptCheckpoint, StorageError, StorageNotFound
from train_fn.checks.check import Moment
from train_fn.checks.order import met_by_all, require_same_order
from train_fn.checks.returns import NO_LOSS, measures_loss
from train_fn.checks.trained import with_samples_kept
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.loop.build import Parts
from train_fn.loop.passes import Passes
from train_fn.loop.replica import Replica
from train_fn.samples.loader import (
    KeyedDataset,
    Loaded,
    Loader,
    WholePass,
    collate_of,
    loader_options,
    num_loader_workers,
    to_device,
)
from train_fn.samples.sampler import MicroBatch, generators_kept, seed_micro_batch, share_of
from train_fn.samples.token_batches import lengths_of
from train_fn.state.run_state import BestSoFar
from train_fn.state.train_state import TrainState
from train_fn.step.peers import Peers
from train_fn.step.precision import autocast, evaluating
from train_fn.step.trial import TrialPass
from train_fn.tasks.metrics import OwnMetrics, TreeMetrics, build_own_metrics
from train_fn.tasks.protocol import Task, is_iterable, loss_arguments, where

_NO_GRADIENT = "does not require grad"
"""In torch's message where something is differentiated that has no graph."""
Sums = dict[str, tuple[float, float]]
Loss = Callable[[torch.nn.Module, Any], tuple[Any, Any]]
Numbered = Generator[tuple[int | None, Any]]
"""Micro-batches with their numbers; None for one that does not count."""

logger = logging.getLogger(__name__)


def evaluate(ctx: WorkerContext, replica: Replica) -> dict[str, float]:
    """Return the metrics over the validation set: ``val_accuracy`` and what else the task measures,
    and ``val_loss`` unless it has none; ``ema_val_…`` of the averaged weights.

    A collective. Every rank returns the same numbers, or an empty dict without a validation set.
    """
    val_set, moving = replica.parts.val_set, replica.passes.moving
    if val_set is None or (not is_iterable(val_set) and len(val_set) == 0):
        return {}
    moving.require_unchanged()
    metrics = {f"val_{name}": value for name, value in _averages(ctx, replica).items()}
    if replica.state.ema is not None:
        with replica.state.ema.in_place():
            metrics |= {f"ema_val_{name}": value for name, value in _averages(ctx, replica).items()}
    moving.undo_evaluation()
    if replica.state.frozen is not None:
        replica.state.frozen.require_unchanged(thorough=True)
    return metrics


def evaluation_is_due(ctx: WorkerContext, parts: Parts) -> bool:
    """Whether the present state is to be evaluated and was not evaluated yet."""
    state = parts.state
    at_end = state.step == parts.total_steps
    at_epoch = (
        state.step > 0 and state.k == 0 and state.epoch % ctx.spec.train.eval_every_epochs == 0
    )
    return state.evaluated_step != state.step and (at_end or at_epoch)


def _averages(ctx: WorkerContext, replica: Replica) -> dict[str, float]:
    """Return each metric's sum over its weight. Sums are rounded once, so that they do not depend
    on which rank measured which micro-batch."""
    parts, passes = replica.parts, replica.passes
    own, source = _own_metrics(passes), _measuring(parts.task)
    checks = replica.checks.around(Moment.EVALUATED, source)
    met = met_by_all(replica.order_at_first, source)
    with checks, evaluating(parts.state.model), passes.moving.kept(), met:
        batches = batches_of_whole_pass if is_iterable(parts.val_set) else batches_by_index
        mine = _measure_all(ctx, passes, own, batches(ctx, parts))
    order = 0 if replica.order is None else replica.order.take()
    shares = replica.peers.gather((mine, own.states(), order))
    require_same_order([each for *_, each in shares], source, "in an evaluation")
    return averages_of([entry for share, *_ in shares for entry in share]) | own.computed(
        [states for _, states, _ in shares]
    )


def _measuring(task: Any) -> str:
    """Return the method that measures, for errors."""
    name = "metrics" if hasattr(task, "metrics") else "loss"
    return f"{where(task, name)}, called to evaluate the model,"


def _own_metrics(passes: Passes) -> OwnMetrics:
    """Return the task's own metrics, merged as ``train.exactness`` says."""
    kind = OwnMetrics if passes.tree is None else TreeMetrics
    return build_own_metrics(passes.parts.task, kind)


def averages_of(measured: list[tuple[int, Sums]]) -> dict[str, float]:
    """Return each metric's sum over its weight, from the micro-batches that have it, in the order
    in which names first occur.

    Args:
        measured: (number of the micro-batch, its sums), in any order.
    """
    in_order = [sums for _, sums in sorted(measured, key=itemgetter(0))]
    averages = {}
    for name in dict.fromkeys(name for sums in in_order for name in sums):
        having = [sums[name] for sums in in_order if name in sums]
        weight = math.fsum(weight for _, weight in having)
        averages[name] = math.fsum(total for total, _ in having) / weight if weight else math.nan
    return averages


def try_evaluation(ctx: WorkerContext, replica: Replica) -> None:
    """Measure one validation micro-batch on each rank and drop the result, so that errors appear
    now and not at the end of an epoch. Raise BadTask for what it changes and cannot be put back.

    The model's buffers and modes, the task's state and the global random generators stay as they
    were. An iterable data set is read in a loader process, or from a copy.
    """
    parts, passes, val_set = replica.parts, replica.passes, replica.parts.val_set
    if val_set is None or (not is_iterable(val_set) and len(val_set) == 0):
        return
    if is_iterable(val_set) and num_stream_workers(ctx, val_set) == 0:
        try:
            val_set = copy.deepcopy(val_set)
        except Exception as exc:
            # Open files, say: reading them would take samples from the first evaluation.
            logger.info(
                "no validation batch is tried before the first step, since the data set cannot be "
                "copied: %s",
                exc,
            )
            return
    model, own = parts.state.model, _own_metrics(passes)

    def first() -> Numbered:
        if is_iterable(val_set):
            return first_batch(ctx, parts.task, val_set)
        return batches_by_index(ctx, parts, most=1)

    trial = TrialPass(parts.task, model, parts.trained.parameters, is_fresh=False)
    source = _measuring(parts.task)
    try:
        checks, met = replica.checks.around(Moment.TRIED, source), met_by_all(replica.order, source)
        with checks, generators_kept(ctx.device), evaluating(model), met:
            _measure_all(ctx, passes, own, with_samples_kept(source, first))
        lost = trial.warm_up.changed_without_copy()
    finally:
        trial.put_back()
        parts.task_state.load(parts.state.task)
    if lost:
        raise BadTask(
            f"the first validation batch changed {', '.join(lost)}, of which no copy is kept "
            "because it is large, so that ranks would train on different values. Change it in "
            "training only: if self.training"
        )


@torch.no_grad()
def _measure_all(
    ctx: WorkerContext, passes: Passes, own: OwnMetrics, numbered: Numbered
) -> list[tuple[int, Sums]]:
    spec, device, task, state = ctx.spec, ctx.device, passes.parts.task, passes.parts.state
    measured: list[tuple[int, Any]] = []
    num_empty = 0
    loss = _loss_of(task, state) if measures_loss(task) else None
    own.to(device)
    with closing(numbered) as batches:
        for number, batch in batches:
            if batch is None:  # left out, as in training
                if state.gathered is not None:
                    raise BadTask(
                        "collate returned None for a batch of the validation set, and all ranks "
                        "must call a sharded model equally often. Leave broken samples out of the "
                        "data set, or set train.sharding to none"
                    )
                num_empty += 1
                continue
            passes.moving.rewind()  # a model may change its buffers in eval mode as well
            seed_micro_batch(spec.train.seed, state.step, number or 0, device)
            with autocast(spec.train.precision, device):
                found = _measured(task, state.model, batch, loss)
                if number is not None:
                    measured.append((number, own.update(found, number)))
    if state.gathered is not None:
        state.gathered.reshard()
    if num_empty:
        logger.warning(
            "collate returned None for %d batches of the validation set; they are left out",
            num_empty,
        )
    return [
        (number, {name: _pair(task, name, value) for name, value in sums.items()})
        for number, sums in measured
    ]


def _pair(task: Any, name: str, value: Any) -> tuple[float, float]:
    """Return a metric of one micro-batch as two numbers. Raises BadTask."""
    try:
        total, weight = value
        return float(total), float(weight)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise BadTask(
            f"{where(task, 'metrics')} returned {value!r:.100} for {name!r}; it must be (sum, "
            "weight), two numbers: the sum over "
            f"the batch, and how many it is a sum of ({exc})"
        ) from exc


def _loss_of(task: Any, state: TrainState) -> Loss:
    """Return the task's ``loss`` as an evaluation calls it: with the number of steps done, and the
    epoch of the last one, if it takes them."""
    numbers = {"step": state.step, "epoch": max(0, state.step - 1) // state.steps_per_epoch}
    asked = {name: numbers[name] for name in loss_arguments(task)}

    def loss(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
        try:
            answer: Any = task.loss(model, batch, **asked)
        except Exception:
            logger.warning("%s failed in eval mode. %s", where(task, "loss"), NO_LOSS)
            raise
        if isinstance(answer, tuple) and len(answer) == 2:
            return answer
        raise BadTask(
            f"{where(task, 'loss')}, called to evaluate the model, must return (loss_sum, weight), "
            f"not {answer!r:.100}. {NO_LOSS}"
        )

    return loss


def _measured(
    task: Any, model: torch.nn.Module, batch: Any, loss: Loss | None
) -> dict[str, tuple[Any, Any]]:
    """Return what ``_measure`` does. Raise BadTask if the task differentiates, which an evaluation
    does not allow by itself."""
    try:
        return _measure(task, model, batch, loss)
    except RuntimeError as exc:
        if _NO_GRADIENT not in str(exc):
            raise
        name = "metrics" if hasattr(task, "metrics") else "loss"
        raise BadTask(
            f"{where(task, name)} computes a gradient, and an evaluation runs without them: {exc}. "
            "Put `with torch.enable_grad():` around what is differentiated, as forces need it, and "
            "detach() the input first"
        ) from exc


def _measure(
    task: Any, model: torch.nn.Module, batch: Any, loss: Loss | None
) -> dict[str, tuple[Any, Any]]:
    """Return what the task measures of one micro-batch. Its loss is measured by ``loss``, unless
    that is None or ``metrics`` returns one."""
    sums: dict[str, tuple[Any, Any]] = (
        task.metrics(model, batch) if hasattr(task, "metrics") else {}
    )
    if not isinstance(sums, dict):
        raise BadTask(
            f"{where(task, 'metrics')} must return a dict of (sum, weight) by name, not "
            f"{sums!r:.200}"
        )
    sums = {name: value for name, value in sums.items() if value is not None}
    return sums if "loss" in sums or loss is None else {"loss": loss(model, batch), **sums}


# ---------------------------------------------------------------- validation batches

# The micro-batches of the validation set that one rank measures, with their numbers.

MIN_MICRO_BATCH = 128
"""Smallest micro-batch here. Evaluation keeps no gradients, so its micro-batches may be larger than
in training: unless these may become smaller, which must help here, too."""


def batches_by_index(ctx: WorkerContext, parts: Parts, most: int | None = None) -> Numbered:
    """Yield this rank's contiguous share of the micro-batches, with their numbers. With ``most``,
    yield that many, read by one loader process.

    A sharded model is called equally often on all ranks: where others have one more, yield the
    first one of all without a number. It does not count.
    """
    spec, val_set = ctx.spec, parts.val_set
    size, num_samples = _size(ctx, val_set), ctx.limited(len(val_set))
    if spec.train.batch_by == "tokens" and ctx.most_samples is not None:
        num_samples = len(lengths_of(val_set, "val", ctx.most_samples))
    count = -(-num_samples // size)
    part = parts.sampler.part(count, ctx.world_rank, ctx.world_size)
    numbers: list[int | None] = [*part[:most]]
    if parts.state.gathered is not None:
        longest = len(share_of(count, 0, ctx.world_size)[:most])
        numbers += [None] * (longest - len(numbers))
    if most is not None:
        workers = spec.train.loader.model_copy(
            update={"num_workers": num_stream_workers(ctx, val_set)}
        )
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"loader": workers})})
    keys = [
        MicroBatch(0, at, np.arange(at * size, min((at + 1) * size, num_samples), dtype=np.int64))
        for at in (number or 0 for number in numbers)
    ]
    dataset = KeyedDataset(val_set, spec.train.seed, collate_of(parts.task), training=False)
    loader = Loader(dataset, keys, spec, ctx.local_world_size, ctx.device)
    try:
        for number, loaded in zip(numbers, loader, strict=True):
            yield number, loaded.batch
    finally:
        loader.close()


def batches_of_whole_pass(ctx: WorkerContext, parts: Parts) -> Numbered:
    """Read an iterable set whole on every rank, and yield every world-size-th micro-batch."""
    val_set, seed, collate = parts.val_set, ctx.spec.train.seed, collate_of(parts.task)
    size = _size(ctx, val_set)
    whole = WholePass(val_set, size, ctx.world_rank, ctx.world_size, seed, collate)
    yield from _read(ctx, whole, num_stream_workers(ctx, val_set))


def first_batch(ctx: WorkerContext, task: Task, val_set: Any) -> Numbered:
    """Yield the first micro-batch of an iterable set, the same on every rank. Nothing after it is
    read."""
    first = WholePass(
        val_set, _size(ctx, val_set), 0, 1, ctx.spec.train.seed, collate_of(task), most=1
    )
    yield from _read(ctx, first, num_stream_workers(ctx, val_set))


def _read(ctx: WorkerContext, whole: WholePass, num_workers: int) -> Numbered:
    loaded: Loaded
    for loaded in DataLoader(
        whole, batch_size=None, **loader_options(ctx.spec, num_workers, ctx.device)
    ):
        yield int(loaded.indices[0]), to_device(loaded.batch, ctx.device)


def num_stream_workers(ctx: WorkerContext, val_set: Any) -> int:
    """Return the number of loader processes for data that is read as one stream, or only tried."""
    return min(1, num_loader_workers(ctx.spec, val_set, ctx.local_world_size))


def _size(ctx: WorkerContext, val_set: Any) -> int:
    """Return the samples of a micro-batch."""
    if ctx.spec.train.batch_by == "tokens":
        return max(1, ctx.spec.micro_batch_size // int(lengths_of(val_set, "val").max()))
    is_fixed = ctx.spec.train.on_out_of_memory == "fail"
    return max(ctx.spec.micro_batch_size, MIN_MICRO_BATCH if is_fixed else 1)


# ---------------------------------------------------------------- best

# The best checkpoint so far, by the metric that the spec names.


def note_best(ctx: WorkerContext, state: TrainState, metrics: dict[str, float]) -> bool:
    """Record the present state as the best one if no evaluation was better. Return whether it is.

    Raises BadTask if ``metrics`` lacks the metric that decides.
    """
    best_by = ctx.spec.best_by
    if best_by is None:
        return False
    wanted, mode = best_by
    name = wanted if wanted in metrics else f"val_{wanted}"
    if name not in metrics:
        if ctx.spec.checkpoint.best_metric is None:
            return False
        raise BadTask(
            f"checkpoint.best_metric {wanted!r} is not measured; evaluation gives {sorted(metrics)}"
        )
    value = metrics[name]
    if not is_better(value, state.best.value if state.best else None, mode):
        return False
    state.best = BestSoFar(name, value, state.step, str(ctx.checkpoint_name(state.step)))
    return True


def renew_best(ctx: WorkerContext, state: TrainState, peers: Peers) -> bool:
    """Make sure, when an attempt begins, that the best state so far has a checkpoint.

    A rank may have died before it committed that checkpoint. If the present state is the best one,
    the caller saves it. If the best one is lost, the best checkpoint that exists takes its place.

    A collective. Return whether the present state is the best one and must be saved.
    """
    best = state.best
    if best is None or ctx.spec.best_by is None:
        return False
    kept = peers.share(_kept_best(ctx, best) if ctx.world_rank == 0 else None, 0)
    if kept != best and best.step == state.step:
        state.best = replace(best, checkpoint=str(ctx.checkpoint_name(best.step)))
        return True
    state.best = kept
    return False


def _kept_best(ctx: WorkerContext, best: BestSoFar) -> BestSoFar | None:
    """Return ``best`` if its checkpoint exists or the storage does not answer, else the best
    checkpoint that exists."""
    store, best_by = ctx.checkpoints, ctx.spec.best_by
    assert best_by is not None
    try:
        try:
            store.manifest(best.checkpoint)
            return best
        except (StorageNotFound, CorruptCheckpoint):
            found = best_of(store.lineage(), *best_by)
    except StorageError as exc:
        logger.warning(
            "cannot read whether the best checkpoint %s still exists, so it is assumed to: %s",
            best.checkpoint,
            exc,
        )
        return best
    value = None if found is None else lookup(found.metrics, best_by[0])
    return (
        None
        if found is None or value is None
        else BestSoFar(best.metric, value, found.step, found.name)
    )
