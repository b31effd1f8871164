"""``es.protect``: a user's own loop under the machinery that keeps, elects and restores states.

The order within a step is what makes it safe. The user's backward pass sums the gradients. Before
the first optimizer steps, ``_settle`` reads what the ranks said of the step before: from here on
the state is torn. ``step`` makes it whole again. Between the two lies no collective of one
optimizer's loop, so all ranks get past it, or none.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import torch

from everstep.wire.events import EventKind
from storage.run_control import Stop
from train_fn.checks.check import Moment
from train_fn.errors import BadTask, StepNotWhole, few
from train_fn.own_loop import Left, StopAgreed
from train_fn.protect.arguments import LoopParts, Torn
from train_fn.protect.batches import Batches, Share
from train_fn.protect.loop_state import LoopState, Values, numbers_of
from train_fn.protect.training import (
    Home,
    LoopTraining,
    OnItsOwn,
    find_home,
    leave,
    prepare,
    report_training,
    training_facts,
)
from train_fn.samples.sampler import seed_micro_batch
from train_fn.state.tensor_tree import size_bytes

logger = logging.getLogger(__name__)


class Held(NamedTuple):
    """What waits for what the loop does after a commit."""

    due: bool
    """A checkpoint is due."""
    stop: Stop | None
    """The loop is to end."""


class Protected:
    """The state of a user's loop. ``with state:`` takes over the newest trustworthy one, and leaves
    one if anything breaks. ``state.step(loss=loss)`` commits a step."""

    def __init__(
        self,
        parts: LoopParts,
        torn: Torn,
        settings: OnItsOwn,
        total_steps: int | None = None,
    ) -> None:
        self._parts, self._torn, self._settings = parts, torn, settings
        self._state = LoopState(parts)
        self._device = next(parts.parameters(), torch.empty(0)).device
        self.left: Left | None = None
        """How an error ended the loop."""
        self.rank, self.world_size = 0, 1
        self.seeds_differ = False
        """Whether torch was seeded differently on the ranks when the loop began."""
        self.draws_differ = False
        """Whether generators that samplers own had other states on other ranks then."""
        self.must_be_alike = False
        """Whether only the loop that began the run may go on."""
        self.is_told_of_updates = False
        """Whether an adapter calls ``before_update`` inside of the closure of ``optimizer.step``,
        after its backward pass."""
        self._home: Home | None = None
        self._training: LoopTraining | None = None
        """None before and after ``with state:``."""
        self._hooks: list[Any] = []
        self._share: Share | None = None
        """What the present step trains on, from Everstep's loader."""
        self._waited_s: float | None = None
        """How long the present step has waited for data; None if no loader says it."""
        self._is_settled = False
        """Whether what the ranks said of the last commit was read."""
        self._held: Held | None = None
        """What follows the newest commit once the next step begins."""
        self.ends_with_commit = False
        """Whether nothing but the commit ends a step: an adapter's trainer does again what it does
        between two steps."""
        self._was_asked_for_epoch = False
        """Whether the loop knows at which epoch it goes on."""
        self._said_total = self._total_steps = total_steps
        self._stop: Stop | None = None
        """The stop that the ranks agreed on, once the final state is saved."""
        self._broken: BaseException | None = None
        """What a commit raised. The loop cannot go on from it, even if its code catches it."""
        self._data_error: Exception | None = None
        """What ended the newest iteration of Everstep's loader. The code may begin another one."""

    @property
    def is_open(self) -> bool:
        """Return whether the loop has begun, and has not ended in any way."""
        return self._training is not None

    @property
    def step_number(self) -> int:
        """Return the steps done."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Return the epoch of the next step, as ``es.loader`` counts; else 0."""
        self._was_asked_for_epoch = self.is_open
        return self._state.epoch

    @property
    def parts(self) -> LoopParts:
        """Return what the state is made of."""
        return self._parts

    @property
    def ends_epoch(self) -> bool:
        """Return whether the newest step ended an epoch, as far as a loader says."""
        return self._state.ends_epoch

    @property
    def num_updates(self) -> int:
        """Return the optimizer steps of this attempt; used by adapters."""
        return self._open().commits.updates.num

    @property
    def seed(self) -> int:
        """Return the run's seed, the same on all ranks and in all attempts."""
        return self._state.seed

    def holds(self, part: object) -> bool:
        """Return whether this object is part of the state; used by ``es.loader``."""
        return any(part is each for each in self._parts.others.values())

    # -- the beginning

    def __enter__(self) -> Protected:
        if self._home is not None:
            raise BadTask("`with state:` was entered twice; make a new run for another training")
        self._home = find_home(self, self._settings, self._device)
        try:
            self._begin(self._home)
        except BaseException as exc:
            self._fail(self._home, exc)
            raise
        return self

    def _begin(self, home: Home) -> None:
        ctx, state = home.ctx, self._state
        self.rank, self.world_size = ctx.world_rank, ctx.world_size
        own = (state.seed, state.own_draws)
        state.why_alike = home.why_alike
        self.must_be_alike = home.why_alike is not None
        self._training = training = prepare(ctx, state, self._torn)
        session = training.session
        if state.unlike and self.rank == 0:
            logger.warning(
                "the run was begun with another %s: the learning rate, other options and the seed "
                "are those of its state. To use what is given now, begin anew, or set it after "
                "`with state:`",
                few(state.unlike),
            )
        session.begin(training_facts(session, state, self._total_steps))
        seeds, draws = zip(*training.peers.gather(own), strict=True)
        self.seeds_differ, self.draws_differ = len(set(seeds)) > 1, len(set(draws)) > 1
        if training.copies is not None:
            training.copies.take()
        session.keeper.begin()
        ctx.report_state_bytes(size_bytes(state.state_dict()))
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update)
            for optimizer in self._parts.optimizers.values()
        ]
        if self.ends_with_commit:
            training.boundary.is_open = False
        else:
            training.boundary.watch(self._parts.called(), partial(self._end_commit, training))
        if session.restored.origin is not None:
            # After its first save a fork no longer depends on the run that it comes from.
            session.save(is_due=True, is_best=True)
        self.reseed(state.seeds_at)
        session.reporter.start_clock()

    def follow(self, *wrapped: torch.nn.Module) -> None:
        """Take these as the models that are called; used by adapters whose library wraps a model
        by DDP after ``with state:``."""
        self._open().buffers.follow(wrapped)

    def expect(self, total_steps: int) -> None:
        """Report how many steps the loop will make; used by adapters."""
        if self._total_steps != total_steps:
            self._total_steps = total_steps
            report_training(self._open().session, self._state, total_steps)

    def finish(self) -> None:
        """Save the final state now; what the loop changes afterwards is not kept. A collective."""
        if self._training is not None:
            self._end_loop(self._training)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value. A collective; used by loaders that go on."""
        return self._open().peers.gather(value)

    def attach(self, data: Batches, end: int) -> None:
        """Let the state follow this data; called by ``es.loader``. ``end`` is the last step of the
        run, or of the epoch in a loop over epochs."""
        training = self._open()
        if self._share is not None and self._state.data not in (None, data):
            raise BadTask(
                f"two es.loader(dataset) give batches to step {self.step_number + 1}: the state "
                "follows one. Join them in one data set whose samples hold both, or pass both as "
                'DataLoaders: es.loader(DataLoader(…)), extra={"one": …, "other": …}'
            )
        self._data_error = None
        is_first = self._state.data is not data
        self._state.attach(data, training.peers)
        is_of_epoch = self._was_asked_for_epoch and end == (self._state.epoch + 1) * len(data)
        total_steps = self._said_total or (None if is_of_epoch else end)
        is_known = not is_first and total_steps in (None, self._total_steps)
        self._total_steps, self._share = total_steps, None
        if self._state.is_closing and self._held is None:
            self._close_epoch(training)  # the state was left before that, by an older Everstep
        if not is_known:
            report_training(training.session, self._state, total_steps)

    def note_data_error(self, error: Exception) -> None:
        """Keep what ends an iteration of the data: a loop that catches it has not finished; called
        by ``es.loader``."""
        self._data_error = error

    def waited(self, seconds: float) -> None:
        """Note how long the loop waited for a batch; called by ``es.loader``."""
        self._waited_s = (self._waited_s or 0.0) + seconds

    def take(self, share: Share) -> None:
        """Begin the step that trains on this share; called by ``es.loader``."""
        if self._share is not None:
            raise BadTask(
                f"es.loader: the batch of step {self.step_number + 1} was not committed; call "
                "state.step() once for every batch. To accumulate gradients, use a larger "
                "global_batch_size and cut the batch in the loop"
            )
        self.begin_step()
        self._share = share
        self.reseed()

    def begin_step(self) -> None:
        """Let what the loop has done since its last commit be part of that, and keep what is due.
        Called by ``es.loader`` before it hands out a batch."""
        training = self._open()
        training.boundary.unwatch()
        training.boundary.sees_steps = True
        self._end_commit(training)

    def _end_commit(self, training: LoopTraining) -> None:
        """End what follows a commit. Raises StopAgreed if the loop is to end with it."""
        if not training.boundary.is_open:
            return
        held, self._held = self._held, None
        try:
            if training.boundary.ends_epoch:
                training.commits.read()
                if training.commits.ends_epoch:
                    training.arrive()
                    training.peers.exchange(b"1")  # a rank that still evaluates may yet die
            training.boundary.close()
            if held is not None:
                self._keep(training, held)
        except StopAgreed:
            raise
        except BaseException as exc:
            self._broken = exc
            raise

    def reseed(self, step: int | None = None) -> None:
        """Seed Python's, numpy's and torch's generators by the number of the next step and the
        rank. Call it if a loop with a loader of its own draws between two steps.

        Args:
            step: another number of steps done; used by ``es.loader``.
        """
        at = self._state.step if step is None else step
        seed_micro_batch(self._state.seed, at, self.rank, self._device)

    # -- a step

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Mark the state torn; called before an optimizer changes anything."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._torn == "refuse" and closure is not None:
            if self.is_told_of_updates:
                return
            raise BadTask(
                "optimizer.step(closure) runs forward and backward inside of the step: pass "
                "torn='shadow' to es.protect"
            )
        self.before_update()

    def before_update(self) -> None:
        """Mark the state torn, once gradients are there and before anything changes."""
        training = self._open()
        if not self._is_settled:
            try:
                self._settle(training)
            except BaseException as exc:
                self._broken = exc
                raise
        training.session.change()
        training.commits.updates.count()

    def _settle(self, training: LoopTraining) -> None:
        """Read what the ranks said of the last commit, before anything of it changes. A collective:
        every rank has run its backward pass."""
        training.arrive()
        training.session.require_current()
        if training.session.keeper.has_gate:
            self._end_commit(training)  # what is about to change must be kept by now
        training.commits.read()
        if training.copies is None:
            training.buffers.share()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        training.peers.require_whole()
        if not self.ends_with_commit:  # an adapter's trainer does it again, after a restart too
            training.boundary.require_unchanged()
        training.report_safe_steps()
        self._is_settled = True

    def step(self, **metrics: Any) -> None:
        """Commit a step: its state is whole, and the same on all ranks. Reports ``metrics`` of rank
        0, saves a checkpoint if one is due, and ends the loop if the run is to stop.

        Call it on every rank, once for each step, right after the optimizer and the scheduler.
        """
        training = self._open()
        values = numbers_of(metrics)
        if self._state.data is not None and self._share is None:
            raise BadTask(
                "state.step() was called without a batch of es.loader; call it once for every batch"
            )
        try:
            self._commit(training, values)
        except StopAgreed:
            raise
        except BaseException as exc:
            self._broken = exc
            raise

    def _commit(self, training: LoopTraining, values: Values) -> None:
        """Commit the step, and keep what is due."""
        state, share, commits = self._state, self._share, training.commits
        training.arrive()
        training.checks.at(Moment.LOSS)
        if not self._is_settled:
            self._settle(training)
        if training.copies is not None:
            # Not before: a graph that waits for another optimizer's step may hold them.
            training.buffers.share()
        self._held = Held(training.session.saver.is_due(), commits.stop)
        with training.session.commit():
            state.count_step(None if share is None else share.whole)
            state.note_batch(self.rank, self.world_size)
            training.boundary.commit()
            state.note_parts()
            if training.copies is not None:
                training.copies.take()
        self._is_settled, self._share = False, None
        waited_s, self._waited_s = self._waited_s, None
        commits.start(share, values, waited_s, saves=self._held.due)
        training.checks.at(Moment.STEP)
        commits.report()
        training.ctx.on_commit()  # what follows may wait for a peer that has died
        if not training.boundary.sees_steps:
            self._end_commit(training)
        self.reseed()

    def _keep(self, training: LoopTraining, held: Held) -> None:
        """Save and publish what is due, and end the loop if it is to stop. Nothing of a step is
        kept before the ranks have agreed on it."""
        session, is_closing = training.session, self._state.is_closing
        if session.keeper.has_gate:
            training.commits.read()
            held = held._replace(due=training.commits.saves_agreed)
        publishes = session.keeper.is_due()
        nears_end = self._state.ends_epoch_in(1) and not publishes
        if held.due or is_closing or held.stop is not None or publishes or nears_end:
            training.commits.read()
        if is_closing:
            self._close_epoch(training)
        session.keep(is_due=held.due, publishes=publishes)
        if nears_end:  # a death at the epoch's end costs one step then
            session.keeper.publish_now(if_soon=True)
        if held.stop is not None:
            self._finish(training, held.stop)
            raise StopAgreed(held.stop)

    def _close_epoch(self, training: LoopTraining) -> None:
        """Report the epoch that ended, and begin the next one."""
        reporter = training.session.reporter
        seconds = round(reporter.seconds_of_epoch(), 3)
        facts = {**self._state.close_epoch(), "seconds": seconds, "rests": False}
        reporter.emit(EventKind.EPOCH_COMPLETED, facts)
        if training.copies is not None:
            training.copies.renew()

    # -- the end

    def __exit__(self, kind: Any, exc: BaseException | None, trace: Any) -> None:
        training, home = self._training, self._home
        if training is None or home is None:
            return  # the ranks agreed to stop
        cause = exc if self._broken is None else self._broken
        if cause is not None:
            fault = self._fail(home, cause)
            if fault is not None:
                raise fault from cause
            if exc is None:
                raise cause  # the loop caught it
            return
        try:
            self._end_loop(training)
        except StopAgreed:
            raise
        except BaseException as broken:
            self._fail(home, broken)
            raise

    def _end_loop(self, training: LoopTraining) -> None:
        if not self._state.complete or self._share is not None:
            raise BadTask(
                f"the loop ended within step {self.step_number + 1}: call state.step() after the "
                "optimizer's step, before `break` or the end of `with state:`"
            )
        if self._data_error is not None:
            raise self._data_error  # the loop caught it
        training.arrive()
        self._end_commit(training)
        self._finish(training, None)

    def _finish(self, training: LoopTraining, stop: Stop | None) -> None:
        """Commit the final checkpoint. A collective."""
        assert self._home is not None
        commits = training.commits
        commits.read()
        training.report_safe_steps()
        # A rank that leaves its loop before its peers must not meet them in a collective below.
        commits.end()
        commits.read()
        training.session.finish(stop)
        commits.close()
        self._close()
        # What follows draws the same after a restart, which makes no step of this training.
        rank = self.rank if self.seeds_differ else 0
        seed_micro_batch(self._state.seed, self._state.step, rank, self._device)
        self._stop = stop
        step, total = self._state.step, self._total_steps
        if stop is None and total is not None and step < total:
            logger.info("the loop ended by itself at step %d of %d", step, total)
            report_training(training.session, self._state, step)
        self._home.finished(stop)

    def _fail(self, home: Home, cause: BaseException) -> StepNotWhole | None:
        """Let the peers go, leave the state of the last commit on this node, and return the fault
        that the ranks' last words show."""
        training = self._training
        self._close()
        self._broken = self._data_error = None  # their frames hold the process group
        torch.default_generator.manual_seed(
            self._state.seed
        )  # for a loop that tries again in this process
        self.left, fault = leave(home.ctx, training, cause)
        home.failed(self.left)
        return fault

    def _close(self) -> None:
        """Let nothing of the loop count as a step any more."""
        if self._training is not None:
            self._training.boundary.unwatch()
        self._training = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _open(self) -> LoopTraining:
        training = self._training
        if training is None:
            if self._stop is not None:
                raise StopAgreed(self._stop)  # the loop caught the first one
            raise BadTask("es.protect: use the state inside of `with state:`")
        if self._broken is not None:
            raise self._broken
        return training
