"""Run Ray Train's control loop with Everstep's policies for size, failures, hangs and exits."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from everstep.wire import ReasonCode
from storage.run_control import STOPS, Stop
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.rank_log import collect_log
from train_fn.node.network import watch_peers
from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.failure_policy import EvidencePolicy
from train_fn.ray_train.group.factory import GroupFactory
from train_fn.ray_train.group.newcomers import Newcomers, YieldRequest
from train_fn.ray_train.group.patience import StackReports
from train_fn.ray_train.group.placement import Placement
from train_fn.ray_train.group.worker_group import EverstepWorkerGroup
from train_fn.ray_train.ray_checkpoints import ListTrimmer
from train_fn.ray_train.ray_internals import (
    FinishedState,
    LoopResult,
    ReschedulingState,
    RunningState,
    SchedulingState,
    ShuttingDownState,
    TrainController,
)
from train_fn.ray_train.scaling import GrowthRule, LiveNodes, LiveScalingPolicy
from train_fn.recovery.hang import HangWatch
from train_fn.recovery.launch import YIELDED, ControllerOutcome, Engine
from train_fn.recovery.links import SlowNodes
from train_fn.recovery.marks import WorkersLimit
from train_fn.recovery.settings import RecoverySettings

_ASK_QUIET_S = 3.0
"""Seconds between two calls to every rank while nothing has moved for as long."""

logger = logging.getLogger(__name__)


class EverstepController(TrainController):  # type: ignore[misc]
    """Start, watch and restart the worker groups of one submission. Runs as an actor on the
    driver's node, without a runtime_env."""

    _worker_group: Any

    def __init__(self, *, engine: Engine, train_run_context: Any, **kwargs: Any) -> None:
        os.environ.update(engine.controller_env)
        self._engine = engine
        self._settings = engine.settings
        self._attempt_log = AttemptLog(engine)
        self._journal = self._attempt_log.journal
        self._stopped: Stop | None = None
        self._polled_at = float("-inf")
        """When the ranks were last polled, in monotonic seconds."""
        job = engine.job
        self._driver = DriverWatch(engine, self._journal, self._has_group)
        self._hangs = HangBreaker(
            self._settings, job.spec.recovery.hang_timeout_s, self._attempt_log
        )
        self._stacks = StackReports(self._attempt_log, self._settings.stacks_after_s)
        self._slow_nodes = SlowNodes(moves=job.spec.recovery.stragglers == "move")
        self._nodes = LiveNodes(self._settings, job.run_dir.storage, self._slow_nodes)
        self._placement = Placement(job.run_dir.run_id)
        self._sizes = self._new_sizes(train_run_context.scaling_config)
        self.worker_group_cls = GroupFactory(
            engine,
            self._attempt_log,
            self._placement,
            self._nodes,
            self._on_new,
            self._attempt_log.started,
            lambda: self._driver.is_leaving or self._journal.stop_requested is not None,
        )
        self._yielding = YieldRequest(
            self._settings,
            self._sizes,
            self._attempt_log,
            lambda: self._driver.is_leaving,
            self._newcomers(),
        )
        self._failures = self._new_failures(train_run_context.run_config.failure_config)
        super().__init__(
            train_run_context=train_run_context,
            scaling_policy=self._sizes,
            failure_policy=self._failures,
            **kwargs,
        )
        self._health_check_interval_s = self._settings.poll_s
        self._checkpoint_list = ListTrimmer(job.run_dir, self._checkpoint_manager)
        self._log = collect_log("train_fn", "ray.train")
        watch_peers(ray.util.get_node_ip_address(), self._settings.silent_peer_s)
        self._driver.start()

    def _new_sizes(self, scaling_config: Any) -> LiveScalingPolicy:
        """Return the scaling policy."""
        job = self._engine.job
        return LiveScalingPolicy(
            scaling_config,
            self._settings,
            self._journal,
            self._nodes.read,
            self._placement.held,
            GrowthRule(
                job.spec.scaling.grow_every_s,
                self._attempt_log.mtbf_s,
                self._is_under_way,
            ),
            WorkersLimit(job.run_dir, job.workers_limit).value,
            self._slow_nodes,
        )

    def _is_under_way(self) -> bool:
        """Return whether the group is known to have made a step. A loop of the user's own may never
        report one."""
        log = self._attempt_log
        own = self._engine.job.spec.runs_own_function
        return own or (log.journal.phase(log.attempt) is not None and log.has_stepped)

    def _newcomers(self) -> Newcomers | None:
        """Return what makes hosts for ranks that join; None if none stays for them."""
        groups = self.worker_group_cls
        if not groups.keeps_hosts:
            return None
        return Newcomers(self._engine, self._placement, self._nodes, groups.hosts)

    def _new_failures(self, failure_config: Any) -> EvidencePolicy:
        """Return the failure policy."""
        return EvidencePolicy(
            failure_config,
            self._engine,
            self._attempt_log,
            self._sizes,
            self._nodes,
            self.worker_group_cls,
            lambda: self._worker_group,
            lambda: isinstance(self.get_state(), RunningState),
            self._patience_s,
        )

    # -- calls of drivers

    async def run(self) -> None:
        """Run the control loop until the run has ended."""
        try:
            await super().run()
        finally:
            self._driver.ended()

    async def leave(self) -> None:
        """Let the ranks save and exit, then end, as after the death of the driver. The driver of a
        newer submission calls this."""
        self._driver.leave()

    async def take_log(self, patience_s: float) -> list[tuple[int, str]]:
        """Return level and text of what was logged since the last call. Wait up to ``patience_s``
        for something if nothing was."""
        return await self._log.take(patience_s)

    def outcome(self) -> ControllerOutcome:
        """Return how the submission ended. Call this once, after ``run`` has returned."""
        self._placement.release()
        answers = self._journal.flush(FLUSH_S)
        final = self._failures.final
        paused = final is not None and final.pause
        leaving = self._driver.is_leaving
        # ranks that exited for the next submission have not finished
        finished = isinstance(self.get_state(), FinishedState) and not leaving
        stopped: Stop | None = "pause" if paused else self._stopped
        failed = final.reason if final and not paused else None
        message = final.message if final else None
        if finished and answers and stopped is None and failed is None:
            message = self._attempt_log.unfinished()
            failed = ReasonCode.USER_ERROR if message is not None else None
        return ControllerOutcome(
            finished=finished and failed is None,
            replaced=leaving,
            stopped=stopped,
            failed=failed,
            message=message,
            last_step=self._journal.last_step,
            attempts=self._attempt_log.attempt,
        )

    # -- the control loop

    async def _step(self) -> Any:
        """Make one turn of Ray's loop, with three additions: it waits for capacity without holding
        resources or using a core, a stop request ends the wait, and ranks save before a resize."""
        before = self.get_state()
        waiting = before.needs_new_run_attempt() or isinstance(before, ReschedulingState)
        stops = self._driver.is_leaving or self._journal.stop_requested is not None
        if waiting and stops:
            self._stopped = self._journal.stop_requested
            return LoopResult(
                run_attempt_id=self._get_run_attempt_id(),
                previous_state=before,
                next_state=ShuttingDownState(next_state=FinishedState()),
            )
        result = await super()._step()
        if waiting and result.next_state is before:
            if self._worker_group is not None:
                self._shutdown_worker_group()
            if self._sizes.waiting:
                # Two runs that each hold half of what both need would wait forever.
                self._placement.release()
            await asyncio.sleep(self._settings.poll_s)
        elif isinstance(before, RunningState) and isinstance(result.next_state, RunningState):
            self._yielding.check(self._worker_group)
            self._hangs.check(self._worker_group)
            self._stacks.check(self._worker_group, self._hangs.quiet_s)
            self._checkpoint_list.trim()
        return result

    async def _poll_workers(self) -> Any:
        """Poll the ranks as soon as one has news, but otherwise rarely: every poll interrupts every
        rank.

        Ranks that report to Ray are polled often, since they wait until a report is taken.
        """
        settings, reports = self._settings, self._engine.job.calls_ray
        overdue_in_s = max(settings.poll_s, self._hangs.due_at - time.monotonic())
        quiet_s = settings.poll_s if reports else min(settings.quiet_poll_s, overdue_in_s)
        news = await self._worker_group.news(settings.poll_s, quiet_s)
        if not news and not reports and time.monotonic() - self._polled_at < self._ask_after_s():
            return self._worker_group.unchanged_status()
        self._polled_at = time.monotonic()
        self._latest_poll_time = float("-inf")  # skip Ray's own pause
        return await super()._poll_workers()

    def _ask_after_s(self) -> float:
        """Return the seconds between two calls to every rank. Less while nothing moves: a rank may
        be gone without anybody noticing."""
        longest_s = self._settings.ask_ranks_s
        return min(longest_s, _ASK_QUIET_S) if self._hangs.quiet_s > _ASK_QUIET_S else longest_s

    def _is_training_succeeded(self, worker_group_status: Any) -> bool:
        """Return whether the run has ended well. Ranks that exited for a resize have not: the
        scaling policy resizes next. Those that exited for the next submission end this
        controller."""
        if not (worker_group_status.finished and not worker_group_status.errors):
            return False
        value = worker_group_status.worker_statuses[0].return_value
        if value == "pause" and self._yielding.asked and self._journal.stop_requested is None:
            # Nobody paused the run: the request to exit was lost on its way to rank 0, or late.
            value = YIELDED
        if value == YIELDED:
            return self._driver.is_leaving
        self._stopped = value if value in STOPS else None
        return True

    def _shutdown_worker_group(self) -> None:
        """Shut the group down, and report the end of its attempt unless the next driver does. The
        hosts of ranks that made room for another group stay for it."""
        is_followed = isinstance(self.get_state(), SchedulingState)
        if (
            self._attempt_log.is_open  # else its failure was judged
            and self.worker_group_cls.keeps_hosts
            and is_followed
        ):
            # Nobody has saved what they have handed over, whoever goes on with it.
            ranks = range(len(self._worker_group.get_workers()))
            self._worker_group.keep_hosts(dict.fromkeys(ranks, math.inf))
        if self._attempt_log.is_open and not self._driver.is_leaving:
            self._attempt_log.recovery = None
            if isinstance(self.get_state(), ShuttingDownState):
                self._attempt_log.ended("stopped" if self._stopped else "finished")
            elif not self._sizes.only_moves:
                self._failures.note_preemption(self._worker_group, self._yielding.asked_at)
            else:
                self._attempt_log.ended("resized")
        super()._shutdown_worker_group()
        if not is_followed:
            self._yielding.reset()
            self.worker_group_cls.hosts.end()

    # -- called by its parts

    def _patience_s(self) -> float:
        """Return how much longer ranks may take for what they do. None once the run is to stop."""
        stops = self._driver.is_leaving or self._journal.stop_requested is not None
        return 0.0 if stops else self._hangs.left_s

    def _has_group(self) -> bool:
        """Return whether ranks train, so that they can be asked to save and exit."""
        return isinstance(self.get_state(), RunningState | ShuttingDownState)

    def _on_new(self) -> None:
        self._yielding.reset()
        self._sizes.draining = frozenset()


# ---------------------------------------------------------------- hang breaker

# Kill the ranks that hold up a group without progress.


class HangBreaker:
    """Compare the journal's progress with the limits of the current phase.

    Killing only ends the wait. The failure path then judges and restarts.
    """

    def __init__(
        self, settings: RecoverySettings, hang_timeout_s: float | None, attempt_log: AttemptLog
    ) -> None:
        self._settings = settings
        self._hang_timeout_s = hang_timeout_s
        self._attempt_log = attempt_log
        self._watch = self._new_watch()

    @property
    def due_at(self) -> float:
        """Return when the group is overdue without progress until then, in monotonic seconds."""
        return self._watch.due_at

    @property
    def left_s(self) -> float:
        """Return the seconds that the group has until it is overdue; 0 if there is no limit."""
        left_s = self.due_at - time.monotonic()
        return 0.0 if math.isinf(left_s) else max(0.0, left_s)

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the group was last seen to move; 0 before it was."""
        return self._watch.quiet_s(time.monotonic())

    def check(self, group: EverstepWorkerGroup) -> None:
        """Kill the ranks that hold up the others once nothing has moved for too long. Call this
        with every turn of the control loop."""
        progress = self._attempt_log.journal.take_progress()
        if progress is None or progress.attempt != self._attempt_log.attempt:
            return
        overdue_s = self._watch.overdue_s(progress, time.monotonic())
        if overdue_s is None:
            return
        if not group.is_cut_off():
            reason = self._watch.reason(progress, overdue_s)
            ranks = group.break_hang(reason)
            logger.warning("%s; killed rank %s", reason, ranks)
        self._watch = self._new_watch()

    def _new_watch(self) -> HangWatch:
        return HangWatch(self._settings, self._hang_timeout_s)


# ---------------------------------------------------------------- driver watch

# End a controller whose driver is gone, after its ranks had time to save and exit.

FLUSH_S = 10.0
"""Timeout in seconds for the controller's last events to become durable."""


class DriverWatch:
    """Notice that the driver died or a newer submission takes over, then end this process.

    Ranks end with their controller. The next submission continues from what they saved.

    Args:
        engine: its ``driver`` is watched.
        journal: flushed before the process ends.
        has_group: returns whether ranks run or are shut down. A group that only starts has nothing
            to save that its nodes do not keep anyway.
    """

    def __init__(
        self, engine: Engine, journal: ActorJournalClient, has_group: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._has_group = has_group
        self._leaving = threading.Event()
        self._ended = threading.Event()

    @property
    def is_leaving(self) -> bool:
        """Return whether the ranks should save and exit, since the next submission continues."""
        return self._leaving.is_set()

    def start(self) -> None:
        """Watch the driver on a thread. Another thread ends this process later."""
        threading.Thread(target=self._watch, name="driver-watch", daemon=True).start()
        threading.Thread(target=self._leave, name="leave", daemon=True).start()

    def leave(self) -> None:
        """Act as if the driver had died."""
        self._leaving.set()

    def ended(self) -> None:
        """Note that the control loop has returned, so that nothing is waited for any more."""
        self._ended.set()

    def _watch(self) -> None:
        self._engine.driver.wait()
        self._leaving.set()

    def _leave(self) -> None:
        """Wait until the driver is gone, then for the ranks, then end this process and so theirs.

        A user's function exits only at its next report, which may never come, so it gets no time.
        """
        self._leaving.wait()
        patience_s = (
            0.0
            if self._engine.job.spec.runs_own_function
            else self._engine.settings.yield_timeout_s
        )
        gives_up_at = time.monotonic() + patience_s
        while self._has_group() and time.monotonic() < gives_up_at:
            if self._ended.wait(self._engine.settings.poll_s):
                break
        self._journal.flush(FLUSH_S)
        os._exit(0)
