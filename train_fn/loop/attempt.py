"""The training loop of one rank."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
from collections.abc import Callable

import torch

from everstep.wire.events import BEGINNINGS, EventKind
from storage.run_control import Stop
from train_fn.checkpoints.safetensors_file import require_safetensors
from train_fn.checkpoints.saver import FINAL_PATIENCE_S, MEET_S, STOP_PATIENCE_S, Saver
from train_fn.checkpoints.state_copy import BoundaryCopies
from train_fn.context import WorkerContext
from train_fn.errors import (
    BadTask,
    NonFiniteLoss,
    StepNotWhole,
    TrainError,
    forget_frames,
)
from train_fn.loop.boundary import (
    close_boundary,
    evaluation_is_due,
    renew_best,
    require_best_metric,
    tell_epoch_ended,
)
from train_fn.loop.evaluate import try_evaluation
from train_fn.loop.replica import Replica, build_replica
from train_fn.loop.reporter import Reporter
from train_fn.loop.restore import claim, restore
from train_fn.node.gpu_memory import memory_summary
from train_fn.profiling.profiler import StepProfiler
from train_fn.recovery.rank_error import StepFailed, describe_error
from train_fn.samples.ledger import difference
from train_fn.samples.loader import Loader
from train_fn.snapshots.forgotten import sweep_forgotten
from train_fn.snapshots.last_save import newest_durable
from train_fn.snapshots.publisher import Publisher, snapshots_of
from train_fn.snapshots.store import leave_snapshot, snapshot_store
from train_fn.state.optim import drop_gradients, lr_factor
from train_fn.state.sound_state import not_finite
from train_fn.state.tensor_tree import copy_to_cpu
from train_fn.state.train_state import tree_digest
from train_fn.step.determinism import reproducibility
from train_fn.step.nccl import group_backend
from train_fn.step.peers import end_process_group
from train_fn.step.step_clock import StepClock
from train_fn.step.step_totals import StepTotals
from train_fn.step.stragglers import StragglerWatch
from train_fn.tasks.checks import told

logger = logging.getLogger(__name__)


def train(ctx: WorkerContext) -> Stop | None:
    """Train this rank's share of every global batch. None when all steps are done, else the stop
    that all ranks agreed on.

    Raises StepFailed, whatever happened: by then the rank left its state on its node, and let its
    peers go.
    """
    failed = None
    attempt = Attempt(ctx)
    try:
        attempt.begin()
        return attempt.run()
    except BaseException as exc:
        failed = attempt.leave(exc)
    # outside of the handler: a context would keep the broken attempt's frames, and the process
    # group, alive
    raise failed


class Attempt:
    """One rank's part in an attempt: begin, run, and where that fails, leave."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx
        self.phase = "start"
        self._is_restored = self._is_unsaved_fork = False
        self._replica: Replica | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._publisher: Publisher | None = None
        self._reporter: Reporter | None = None
        self._clock: StepClock | None = None
        self._own_s = 0.0
        self._stragglers: StragglerWatch | None = None
        self._profiler: StepProfiler | None = None
        self._reported_checkpoint = 0
        self._grad_clip_norm = ctx.spec.train.grad_clip_norm

    def begin(self) -> None:
        """Build the replica, and take over the state that the ranks agree on."""
        ctx = self.ctx
        sweep_forgotten(ctx)
        replica = self._replica = build_replica(ctx)
        require_best_metric(ctx, replica)
        if ctx.spec.checkpoint.safetensors:
            require_safetensors(replica.state.model.state_dict())
        self.phase = "restore"
        restored = restore(ctx, replica)
        self._is_restored = True
        if restored.source in BEGINNINGS:
            self.phase = "evaluation"
            try_evaluation(ctx, replica)
            self.phase = "restore"
        state, sampler = replica.state, replica.sampler
        copies = BoundaryCopies(state)
        self._saver, self._publisher = Saver(ctx, state, copies), Publisher(ctx, state, copies)
        if restored.source == "checkpoint":
            state.parent = restored.checkpoint
        # From the first save on a fork needs nothing of its origin. One that is about to be
        # evaluated has it thereafter.
        self._is_unsaved_fork = restored.origin is not None
        if self._is_unsaved_fork and not evaluation_is_due(ctx, replica):
            self._saver.offer(due=True, is_best=True)
            self._is_unsaved_fork = False
        elif not self._is_unsaved_fork and renew_best(ctx, replica):
            self._saver.offer(due=False, is_best=True)
        self._reporter = Reporter(ctx, state)
        self._reporter.report_again()
        self._clock = StepClock([*replica.parameters, *replica.idle_parameters], ctx.device)
        self._stragglers = self._watch_stragglers(replica)
        self._profiler = StepProfiler(ctx, replica.bucket_sizes)
        self._loader = Loader(
            replica.train_set,
            sampler.stream(state.epoch, state.k, ctx.world_rank, ctx.world_size),
            ctx.spec,
            ctx.local_world_size,
            ctx.device,
        )
        if ctx.world_rank == 0:
            claim(ctx)
            ctx.journal.emit(EventKind.TRAINING_STARTED, _facts(ctx, replica))

    def run(self) -> Stop | None:
        """All steps up to the last, or to the one after which the ranks agreed to stop; then the
        final checkpoint."""
        replica, reporter, saver, stop = self._replica, self._reporter, self._saver, None
        assert replica is not None and reporter is not None and saver is not None
        is_best = self._close_boundary()
        if (is_best or self._is_unsaved_fork) and replica.state.step < replica.total_steps:
            saver.offer(due=self._is_unsaved_fork, is_best=True)
        reporter.start_clock()
        while replica.state.step < replica.total_steps and stop is None:
            is_best, stop = self._take_step(replica)
        self.phase = "checkpoint"
        self._finish(is_best, stop)
        return stop

    def _take_step(self, replica: Replica) -> tuple[bool, Stop | None]:
        """One global batch, and what belongs between it and the next: whether its state is the best
        so far, and an agreed stop."""
        saver, publisher, reporter, profiler = (
            self._saver,
            self._publisher,
            self._reporter,
            self._profiler,
        )
        assert (
            saver is not None
            and publisher is not None
            and reporter is not None
            and profiler is not None
        )
        state, self.phase = replica.state, "step"
        profiler.boundary(state.step)
        totals = self._forward_backward(replica)  # collective: returns on every rank or on none
        values = self._commit(replica, totals)  # the gate is passed; no collective in here
        if state.bookmarks is not None:
            state.bookmarks.exchange(state.step, replica.peers.gather)
        step_s = reporter.step_done(values, totals.facts.num_samples)
        if self._stragglers is not None:
            self._stragglers.note(state.step - 1, totals.own_s, step_s)
        self._report_checkpoint(totals.facts.checkpoint_step)
        stop = totals.facts.stop if state.step < replica.total_steps else None
        is_best = stop is None and self._close_boundary(publisher.keep)
        saver.offer(due=totals.facts.save, is_best=is_best)
        publisher.offer()
        return is_best, stop

    def _forward_backward(self, replica: Replica) -> StepTotals:
        """Gradients of the global batch's mean loss on every rank, and the totals that all ranks
        now know."""
        ctx, state = self.ctx, replica.state
        assert self._loader is not None and self._saver is not None and self._clock is not None
        num_samples, share, hashes, expected = replica.plans.of(state.step)
        # DDP divides by world_size
        scale = ctx.world_size / (num_samples * replica.weight_per_sample)
        replica.carrier.begin(state.step, expected)
        num_passes = replica.num_passes(len(share))
        volatile = replica.volatile
        volatile.begin(num_samples, num_passes)
        for position in range(num_passes):
            batch, number, differs, own_samples = None, 0, None, 0
            if position < len(share):
                self.phase = "data"
                loaded = next(self._loader)
                batch = loaded.batch
                if batch is None:
                    replica.note_empty()
                differs = difference(
                    state.epoch,
                    state.step,
                    share[position].indices,
                    loaded.indices,
                    hashes[position],
                )
                if state.bookmarks is not None:
                    state.bookmarks.note(loaded)
                number, own_samples = share[position].number, len(share[position].indices)
                self.phase = "step"
            last = position == num_passes - 1
            with replica.synchronising(last):
                if position:
                    volatile.rewind()
                replica.seed(state.step, number)
                loss_sum, weight = replica.forward(batch)
                volatile.passed(own_samples)
                replica.carrier.add(loss_sum, weight, differs)
                loss = state.scaler.scale(loss_sum * scale)
                if last:  # what all need to know travels with the gradients of the last backward
                    stop, committed, save = self._saver.words(self._reported_checkpoint)
                    volatile.start()
                    stop = ctx.journal.stop_requested or stop
                    replica.carrier.backward(
                        loss,
                        stop,
                        committed,
                        save=save,
                        has_news=volatile.has_news,
                        own_s=self._own_s,
                    )
                    replica.finish_exchange()
                else:
                    loss.backward()  # type: ignore[no-untyped-call]
        self._loader.prefetch()  # the device computes meanwhile
        volatile.wait()
        known = replica.carrier.take()
        if known.facts.num_with_news and known.fault(state.step, num_samples) is None:
            volatile.agree()
        self._own_s = self._clock.gate()
        return known

    def _watch_stragglers(self, replica: Replica) -> StragglerWatch | None:
        """On rank 0 of several. A collective."""
        ctx, sampler = self.ctx, replica.sampler
        if ctx.world_size == 1:
            return None
        node_ids = replica.peers.gather(ctx.node_id)
        shares = [len(sampler.share(0, 0, rank, ctx.world_size)) for rank in range(ctx.world_size)]
        return StragglerWatch(ctx.journal.emit, node_ids, shares) if ctx.world_rank == 0 else None

    def _commit(self, replica: Replica, totals: StepTotals) -> dict[str, float | None]:
        """Take the step: every rank the same, from the same gradients. Returns the step's
        metrics."""
        spec, state = self.ctx.spec, replica.state
        fault = totals.fault(state.step, replica.plans.of(state.step).num_samples)
        if fault is not None:
            raise StepNotWhole(state.step, fault)
        if totals.facts.num_nonfinite:
            weights = not_finite(dict(state.model.named_parameters()))
            source = told(replica.task, "loss")
            raise NonFiniteLoss(
                state.step, totals.nonfinite_rank, totals.loss_sum, source, weights=weights
            )
        if not 0 < totals.weight < math.inf:
            raise BadTask(
                f"{told(replica.task, 'loss')}: the weights of step {state.step + 1} add up to "
                f"{totals.weight}; "
                "a weight is how many samples or tokens loss_sum is a sum over"
            )
        expected = totals.facts.num_samples * replica.weight_per_sample
        # sequences of several lengths, say: what the loss is a sum over is known only now
        if totals.weight != expected:
            gradients = [
                parameter.grad for parameter in replica.parameters if parameter.grad is not None
            ]
            torch._foreach_mul_(gradients, expected / totals.weight)
        state.scaler.unscale_(state.optimizer)
        grad_norm = None
        if self._grad_clip_norm is not None:
            grad_norm = float(
                torch.nn.utils.clip_grad_norm_(replica.parameters, self._grad_clip_norm)
            )
            # a scaler leaves such a step out
            if not math.isfinite(grad_norm) and not state.scaler.is_enabled():
                raise NonFiniteLoss(
                    state.step, None, grad_norm, told(replica.task, "loss"), what="gradient norm"
                )
        of_task = replica.task_state.capture()
        replica.learning_rates.check()
        lr = replica.learning_rates.set(
            lr_factor(spec.schedule, state.step, replica.total_steps, state.steps_per_epoch)
        )
        values = {"loss": _finite(totals.loss_sum / totals.weight), "lr": lr}
        with state.committing():
            state.task = of_task
            replica.volatile.adopt()  # before hooks of the optimizer's move what they move
            skipped = self._update_weights(replica)
            if state.ema is not None and not skipped:
                state.ema.update(state.step + 1)
            state.ledger.commit(state.step, totals.counted)
        replica.learning_rates.check()
        if skipped:
            is_last = state.step == replica.total_steps
            state.skipped.check(
                state.step, state.scaler, state.model.named_parameters(), last=is_last
            )
        if state.scaler.is_enabled():
            values["skipped_steps"] = state.skipped.total
        drop_gradients(state.optimizer, replica.idle_parameters)
        return values if grad_norm is None else {**values, "grad_norm": _finite(grad_norm)}

    @staticmethod
    def _update_weights(replica: Replica) -> bool:
        """Let the optimizer take its step. Return whether fp16's loss scaler left it out."""
        scaler, state = replica.state.scaler, replica.state
        scale = scaler.get_scale() if scaler.is_enabled() else 1.0
        scaler.step(state.optimizer)
        scaler.update()
        return scaler.is_enabled() and state.skipped.note(scaler, scale)

    def _close_boundary(self, keep: Callable[[], None] = lambda: None) -> bool:
        """At the end of an epoch: report it, evaluate where due. Whether this is the best state so
        far.

        ``keep`` publishes the state before that; a state that was just restored is kept already.
        """
        assert self._replica is not None and self._reporter is not None
        self.phase = "evaluation"
        state = self._replica.state
        before = state.closed_epochs, state.evaluated_step
        is_best = close_boundary(self.ctx, self._replica, self._reporter, keep)
        rested = state.evaluated_step == state.step
        # An evaluation that an attempt begins with was interrupted in the one before it, which had
        # closed the epoch.
        if state.closed_epochs > before[0] or (state.evaluated_step > before[1] and state.k == 0):
            rested = tell_epoch_ended(self._replica, self._reporter) or rested
            self._replica.volatile.renew()
            self._renew_task_state(self._replica)
        if rested and self._clock is not None:
            self._clock.restart()
        return is_best

    def _renew_task_state(self, replica: Replica) -> None:
        """``on_epoch_end`` may have changed the task's state; at an epoch's end ranks also compare
        theirs. A collective."""
        if not replica.task_state:
            return
        replica.state.task = replica.task_state.capture()
        digests = replica.peers.gather(tree_digest(replica.state.task))
        if len(set(digests)) > 1:
            logger.warning(
                "state_dict() of the task differs between ranks; a restart gives all of them that "
                "of one rank"
            )

    def _report_checkpoint(self, step: int) -> None:
        """Tell Ray Train of a checkpoint that was committed since; all ranks at the same step."""
        if step <= self._reported_checkpoint or self._replica is None:
            return
        self._reported_checkpoint = step
        state = self._replica.state
        state.parent = str(self.ctx.checkpoint_name(step))
        self.ctx.report_checkpoint(state.parent, dict(state.metrics))

    def _finish(self, is_best: bool, stop: Stop | None) -> None:
        """Commit and report the final checkpoint; the run's end leaves nothing on the node but a
        state that could not be saved."""
        replica, saver, publisher, reporter = (
            self._replica,
            self._saver,
            self._publisher,
            self._reporter,
        )
        assert (
            replica is not None
            and saver is not None
            and publisher is not None
            and reporter is not None
        )
        assert self._loader is not None and self._profiler is not None
        self._profiler.close()
        reporter.hand_over()
        # before the ranks meet below: the first to leave removes the node's snapshots
        publisher.close()
        saving = saver.begin_last(
            is_best=is_best, patience_s=FINAL_PATIENCE_S if stop is None else STOP_PATIENCE_S
        )
        while not replica.peers.share(saver.has_ended(saving, MEET_S), 0):
            pass  # met again and again: a storage may be slower than a collective may take
        error = saving.exception()
        # A run that asked to pause where saves fail stops without a last checkpoint.
        is_unsaved = error is not None and stop is not None and saver.stop is not None
        told = error, is_unsaved, saver.newest_committed(self._reported_checkpoint)
        error, is_unsaved, committed = replica.peers.share(told, 0)
        if error is not None and not is_unsaved:
            raise error
        self._report_checkpoint(committed)
        reporter.close()
        saver.close()
        self._loader.close()
        if is_unsaved:
            logger.warning(
                "stopped without a last checkpoint; its state stays on this node: %s", error
            )
            leave_snapshot(self.ctx, copy_to_cpu(replica.state.state_dict()))
        else:
            snapshot_store(self.ctx).remove_all()

    def save_last(self) -> None:
        """Commit the state of the last committed step, after an error of a rank that is alone.
        Raises nothing."""
        if self._saver is None or self._replica is None or not self._replica.state.complete:
            return
        self._replica.volatile.put_back()
        try:
            if newest_durable(self.ctx.run_dir) < self._replica.state.step:
                self._saver.save_now(patience_s=STOP_PATIENCE_S)
        except Exception as exc:  # what broke the attempt says more
            logger.warning("step %d could not be kept: %s", self._replica.state.step, exc)

    def leave(self, cause: BaseException) -> StepFailed:
        """Let the peers go, leave the state of the last committed step on this node, and describe
        what happened.

        Peers first: only a dead rank's neighbours notice by themselves, each frees the next by
        leaving, and nobody should have to wait until others have written their state.
        """
        error = describe_error(cause, self.ctx.world_rank)
        memory = memory_summary(cause, self.ctx.device)
        forget_frames(cause)
        replica = self._replica
        if self._saver is not None:
            self._saver.close()
        if replica is not None:
            replica.wrapped = None
        gc.collect()
        end_process_group()
        self._loader = None  # its processes may take a moment to end
        if self._publisher is not None:
            self._publisher.close()
        problem: str | None = "the rank had no state yet"
        step, snapshot_step = None, None
        if replica is not None:
            state = replica.state
            step = state.step if self._is_restored or state.complete else None
            problem = "the rank was between two states"
            torn = replica.volatile.put_back() if state.complete else []
            if torn:
                problem = (
                    f"the failed step changed {', '.join(torn)}, and no copy was kept of what was "
                    "there before"
                )
            elif state.complete:
                try:
                    left = copy_to_cpu(state.state_dict())
                    state.require_sound(left)
                    problem = leave_snapshot(self.ctx, left)
                except TrainError as exc:  # what broke the attempt says more
                    problem = str(exc)
                snapshot_step = step if problem is None else None
        if self._profiler is not None:
            self._profiler.give_up()
        if self._reporter is not None:
            self._reporter.close()
        self._replica = self._saver = self._publisher = self._reporter = None
        error = dataclasses.replace(
            error, step=step, phase=self.phase, snapshot_step=snapshot_step, memory=memory
        )
        return StepFailed(error, problem)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _facts(ctx: WorkerContext, replica: Replica) -> dict[str, object]:
    return {
        "total_steps": replica.total_steps,
        "steps_per_epoch": replica.sampler.steps_per_epoch,
        "num_samples": replica.sampler.num_samples,
        "num_parameters": sum(parameter.numel() for parameter in replica.state.model.parameters()),
        "micro_batch_size": replica.sampler.micro_batch_size,
        "rests": evaluation_is_due(ctx, replica),  # before the attempt's first step
        "guarantee": replica.train_set.guarantee()
        if replica.state.step == 0 or ctx.attempt == 1
        else None,
        "snapshots": snapshots_of(ctx),
        "warnings": list(replica.warnings),
        "device": str(ctx.device),
        "backend": group_backend(ctx.device),
        "reproducible": reproducibility(),
    }
