"""The Train controller with our policies: what it notices, what it decides, and the events that
tell of both."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from typing import Any

import ray

from everstep.wire import Verdict
from storage.run_control import STOPS, Stop
from train_fn import clock as head_clock
from train_fn.journal.rank_logging import collect_log
from train_fn.node.silent_peers import watch_peers
from train_fn.ray_train.attempt_log import Chronicle
from train_fn.ray_train.checkpoint_list import ShortList
from train_fn.ray_train.nodes import node_look
from train_fn.ray_train.oom_probe import DELAY_S, ask_node
from train_fn.ray_train.placement import Placement
from train_fn.ray_train.preflight_checks import Fitness
from train_fn.ray_train.ray_internals import (
    ControllerError,
    FailureDecision,
    FailurePolicy,
    FinishedState,
    LoopResult,
    ReschedulingState,
    RunningState,
    ShuttingDownState,
    TrainController,
    WorkerGroupError,
    WorkerGroupStartupTimeoutError,
)
from train_fn.ray_train.scaling import LiveScalingPolicy
from train_fn.ray_train.warm_pool import WarmPool
from train_fn.ray_train.worker_group import EverstepWorkerGroup
from train_fn.recovery.decision import BUDGET_OF, Decision, decide
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.hang import HangWatch
from train_fn.recovery.launch import YIELDED, Engine, Outcome, RankLaunch
from train_fn.recovery.marks import WorkersLimit
from train_fn.recovery.partition import Apart
from train_fn.recovery.sizing import NodeView
from train_fn.recovery.verdict import Judgement, judge

logger = logging.getLogger(__name__)

_RELEASE_S = 0.3
"""How long the cluster's view may take to show resources that a failed start gave back."""
_FLUSH_S = 10.0
_EVIDENCE_S = 3.0
"""Longest wait for what a dead rank's node says of it, where the run ends with this failure."""
_DRAIN_MARGIN_S = 8.0
"""So long before a draining node is taken away, ranks that hold the others up are killed, so that
these can leave."""


class EvidencePolicy(FailurePolicy):  # type: ignore[misc]
    """Ray asks it what to do about an error; the controller's own ``weigh`` answers."""

    def __init__(self, controller: EverstepController, failure_config: Any) -> None:
        super().__init__(failure_config)
        self._controller = controller

    def make_decision(self, training_failed_error: Any) -> Any:
        return self._controller.weigh(training_failed_error)


class GroupFactory:
    """Stands where Ray expects the worker group's class, and gives each group its attempt."""

    def __init__(self, controller: EverstepController) -> None:
        self._controller = controller

    def create(self, **kwargs: Any) -> EverstepWorkerGroup:
        group = self._controller.new_group(**kwargs)
        group._start()
        return group


class EverstepController(TrainController):  # type: ignore[misc]
    """Runs as an actor beside the driver, without a runtime_env."""

    def __init__(self, *, engine: Engine, train_run_context: Any, **kwargs: Any) -> None:
        os.environ.update(engine.controller_env)
        self._engine = engine
        self._settings = engine.settings
        self._chronicle = Chronicle(engine)
        self._journal = self._chronicle.journal
        self._last_group: EverstepWorkerGroup | None = None  # also one whose start failed
        self._verdict: Decision | None = None
        self._stopped: Stop | None = None
        self._yield_since: float | None = None
        self._yield_at = 0.0
        self._asked_at = float("-inf")
        """When the ranks were last polled, in monotonic seconds."""
        self._asked_to_yield = False
        """Whether the present group was asked to leave; it may still do so when that was given
        up."""
        self._overdue_killed = False
        self._leaving = threading.Event()
        """The driver is gone: the ranks are to save and leave, and the next submission goes on."""
        self._ended = threading.Event()
        self._hang_watch = HangWatch(self._settings, engine.job.spec.recovery.hang_timeout_s)
        self.worker_group_cls = GroupFactory(self)
        self._placement = Placement(engine.job.run_dir.run_id)
        self._look = node_look(self._settings.probe_timeout_s, engine.job.run_dir.storage)
        self._last_look: tuple[float, tuple[NodeView, ...]] = (float("-inf"), ())
        self._apart = Apart(self._settings.apart_s)
        self._fitness = Fitness(
            self._settings, {place.node_id for place in engine.history.workers}, self._leave_out
        )
        self._sizes = LiveScalingPolicy(
            train_run_context.scaling_config,
            self._settings,
            self._journal,
            self._look_at_nodes,
            self._placement.held,
            WorkersLimit(engine.job.run_dir, engine.job.workers_limit).value,
        )
        failure_policy = EvidencePolicy(self, train_run_context.run_config.failure_config)
        super().__init__(
            train_run_context=train_run_context,
            scaling_policy=self._sizes,
            failure_policy=failure_policy,
            **kwargs,
        )
        self._health_check_interval_s = self._settings.poll_s
        self._reported = ShortList(engine.job.run_dir, self._checkpoint_manager)
        self._log = collect_log("train_fn", "ray.train")
        watch_peers(ray.util.get_node_ip_address(), self._settings.silent_peer_s)
        self._pool = WarmPool(
            self._settings,
            self._recent_look,
            train_run_context.scaling_config._resources_per_worker_not_none,
        )
        if self._settings.warm_pool:
            self._pool.start()
        threading.Thread(target=self._watch_driver, name="driver-watch", daemon=True).start()
        threading.Thread(target=self._leave, name="leave", daemon=True).start()

    async def take_log(self, patience_s: float) -> list[tuple[int, str]]:
        """Level and text of what was logged since the last call; where nothing was, of what is
        next, if it comes within so long."""
        return await self._log.take(patience_s)

    async def leave(self) -> None:
        """For the driver of a newer submission: have the ranks save and leave, and end, as when
        this one's driver dies."""
        self._leaving.set()

    async def run(self) -> None:
        """Ray's loop, to its end."""
        try:
            await super().run()
        finally:
            self._ended.set()

    def _watch_driver(self) -> None:
        self._engine.driver.wait()
        self._leaving.set()

    def _leave(self) -> None:
        """On a thread: once the driver is gone let the ranks save and leave, then end this process,
        and them with it.

        A group that is only starting has nothing to save but what its nodes keep anyway. A user's
        function would leave when it next reports, which may be never.
        """
        self._leaving.wait()
        patience_s = (
            0.0 if self._engine.job.spec.runs_own_function else self._settings.yield_timeout_s
        )
        gives_up_at = time.monotonic() + patience_s
        while (
            isinstance(self.get_state(), RunningState | ShuttingDownState)
            and time.monotonic() < gives_up_at
        ):
            if self._ended.wait(self._settings.poll_s):
                break
        self._journal.flush(_FLUSH_S)
        os._exit(0)

    def outcome(self) -> Outcome:
        """How the run was left; asked once ``run`` has returned."""
        self._pool.stop()
        self._placement.release()
        self._journal.flush(_FLUSH_S)
        given_up = (
            self._verdict if self._verdict is not None and not self._verdict.restart else None
        )
        paused = given_up is not None and given_up.pause
        leaving = self._leaving.is_set()
        return Outcome(
            # ranks that left for others have not finished
            finished=isinstance(self.get_state(), FinishedState) and not leaving,
            replaced=leaving,
            stopped="pause" if paused else self._stopped,
            failed=given_up.reason if given_up and not paused else None,
            message=given_up.message if given_up else None,
            last_step=self._journal.last_step,
            attempts=self._chronicle.attempt,
        )

    # -- the control loop

    async def _step(self) -> Any:
        """One turn of Ray's loop, with three things that it lacks: waiting for capacity without
        spinning a core and without holding resources, a stop that is heard while waiting, and
        resizes for which ranks save first."""
        before = self.get_state()
        waiting = before.needs_new_run_attempt() or isinstance(before, ReschedulingState)
        if waiting and (self._leaving.is_set() or self._journal.stop_requested is not None):
            self._stopped = self._journal.stop_requested
            return self._result(before, ShuttingDownState(next_state=FinishedState()))
        result = await super()._step()
        if waiting and result.next_state is before:
            if self._worker_group is not None:
                self._shutdown_worker_group()
            if self._sizes.waiting:
                # two runs that each hold half of what both need would wait for ever
                self._placement.release()
            await asyncio.sleep(self._settings.poll_s)
        elif isinstance(before, RunningState) and isinstance(result.next_state, RunningState):
            self._see_to_yield()
            self._see_to_hang()
            self._reported.shorten()
        return result

    async def _poll_workers(self) -> Any:
        """Ray's poll, as soon as a rank has something to tell; while none has, seldom, since every
        poll interrupts every rank.

        A user's function is asked often: it waits until what it reports is taken.
        """
        settings, own_function = self._settings, self._engine.job.spec.runs_own_function
        overdue_in_s = max(settings.poll_s, self._hang_watch.due_at - time.monotonic())
        quiet_s = settings.poll_s if own_function else min(settings.quiet_poll_s, overdue_in_s)
        news = await self._worker_group.news(settings.poll_s, quiet_s)
        if (
            not news
            and not own_function
            and time.monotonic() - self._asked_at < settings.ask_ranks_s
        ):
            return self._worker_group.as_it_was()
        self._asked_at = time.monotonic()
        self._latest_poll_time = float("-inf")  # Ray's own pause is not waited for on top
        return await super()._poll_workers()

    def _result(self, before: Any, after: Any) -> Any:
        return LoopResult(
            run_attempt_id=self._get_run_attempt_id(), previous_state=before, next_state=after
        )

    def _see_to_yield(self) -> None:
        """Ask the ranks to leave once the policy wants another size, or the driver is gone; give up
        on a size when they do not."""
        if self._sizes.wanted is None and not self._leaving.is_set():
            return
        now = time.monotonic()
        if self._yield_since is None:
            followers = (
                "the next submission"
                if self._leaving.is_set()
                else f"a group of {self._sizes.wanted}"
            )
            logger.info(
                "asking %d ranks to save and leave for %s", self._chronicle.world_size, followers
            )
            self._yield_since = now
            self._yield_at = time.time()
            self._asked_to_yield = True
            self._worker_group.ask_to_yield()
        elif not self._overdue_killed and self._sizes.must_have_left(time.time() + _DRAIN_MARGIN_S):
            self._overdue_killed = True
            ranks = self._worker_group.abandon(self._sizes.draining)
            logger.warning(
                "a node is about to be taken away, and ranks have not left; killed rank %s", ranks
            )
        elif (
            now - self._yield_since > self._settings.yield_timeout_s and not self._leaving.is_set()
        ):
            logger.warning(
                "ranks did not leave within %g s; the group stays as it is",
                self._settings.yield_timeout_s,
            )
            self._sizes.wanted = None
            self._yield_since = None

    def _see_to_hang(self) -> None:
        """Kill the rank that holds the others up once nothing has moved for too long; the failure
        path does the rest."""
        progress = self._journal.take_progress()
        if progress is None or progress.attempt != self._chronicle.attempt:
            return
        overdue_s = self._hang_watch.overdue_s(progress, time.monotonic())
        if overdue_s is not None and self._worker_group.is_cut_off():
            self._hang_watch = HangWatch(
                self._settings, self._engine.job.spec.recovery.hang_timeout_s
            )
        elif overdue_s is not None:
            reason = self._hang_watch.reason(progress, overdue_s)
            ranks = self._worker_group.break_hang(reason)
            logger.warning("%s; killed rank %s", reason, ranks)
            self._hang_watch = HangWatch(
                self._settings, self._engine.job.spec.recovery.hang_timeout_s
            )

    def _is_training_succeeded(self, worker_group_status: Any) -> bool:
        """Ranks that left for a resize have not succeeded: the scaling policy is asked next, and
        resizes. Those that left because the driver is gone end this controller."""
        if not (worker_group_status.finished and not worker_group_status.errors):
            return False
        value = worker_group_status.worker_statuses[0].return_value
        if value == "pause" and self._asked_to_yield and self._journal.stop_requested is None:
            # the call to rank 0 was lost, or came after the others': nobody asked for a pause
            value = YIELDED
        if value == YIELDED:
            return self._leaving.is_set()
        self._stopped = value if value in STOPS else None
        return True

    # -- groups

    def new_group(self, **kwargs: Any) -> EverstepWorkerGroup:
        """The next attempt's group, not yet started."""
        self._yield_since = None
        self._asked_to_yield = self._overdue_killed = False
        self._sizes.draining = frozenset()
        launch = RankLaunch(
            self._chronicle.next_attempt(),
            time.time(),
            dict(self._engine.rank_env),
            self._chronicle.recovery,
            silent_peer_s=self._settings.silent_peer_s,
            meets_to_report=self._engine.job.spec.runs_own_function,
        )
        self._last_group = EverstepWorkerGroup(
            launch,
            self._settings,
            self._placement,
            self._look_at_nodes,
            self._note_started,
            self._leave_out,
            self._fitness,
            **kwargs,
        )
        return self._last_group

    def _note_started(self, group: EverstepWorkerGroup, workers: list[Any]) -> None:
        self._chronicle.started(workers)
        self._pool.note_ranks(group.processes_by_node())

    def _look_at_nodes(self) -> tuple[NodeView, ...]:
        nodes = self._apart.mark(self._look(), time.monotonic())
        self._last_look = time.monotonic(), nodes
        return nodes

    def _recent_look(self) -> tuple[NodeView, ...]:
        """What was seen just now, for whom that is new enough: while ranks train, the scaling
        policy looks every second."""
        looked_at, nodes = self._last_look
        return (
            nodes
            if time.monotonic() - looked_at < 2 * self._settings.resize_interval_s
            else self._look_at_nodes()
        )

    def _try_elsewhere(self, node_id: str | None) -> None:
        """Let the next attempt do without a node whose GPU failed, where there is another node."""
        others = [
            node
            for node in self._look_at_nodes()
            if node.reachable and not node.is_head and node.node_id != node_id
        ]
        if node_id is not None and others:
            self._leave_out([node_id])

    def _leave_out(self, node_ids: list[str]) -> None:
        """Nodes that others do not reach, or that are not fit, get no rank for a while."""
        self._apart.leave_out(node_ids, time.monotonic())

    def _shutdown_worker_group(self) -> None:
        # else the next driver tells its end
        if self._chronicle.is_open and not self._leaving.is_set():
            self._chronicle.recovery = None
            if isinstance(self.get_state(), ShuttingDownState):
                self._chronicle.ended("stopped" if self._stopped else "finished")
            elif self._sizes.draining:
                self._tell_moved()
            else:
                self._chronicle.ended("resized")
        super()._shutdown_worker_group()

    # -- failures

    def weigh(self, error: Any) -> Any:
        """Ray's question about an error: gather the evidence, judge, decide, and tell all of it."""
        try:
            return self._weigh(error)
        except Exception:
            logger.exception("the failure could not be weighed; the run goes on from what survives")
            return FailureDecision.RETRY

    def _weigh(self, error: Any) -> Any:
        noticed_at = head_clock.now()
        if isinstance(error, ControllerError) and isinstance(
            error.controller_failure, WorkerGroupStartupTimeoutError
        ):
            # What was seen free is not: a matter of waiting, not a failure.
            self._sizes.back_off(_RELEASE_S)
            return FailureDecision.RETRY
        running = isinstance(self.get_state(), RunningState)
        reports = self._reports(running)
        evidence = Evidence(
            attempt=self._chronicle.attempt,
            noticed_at=noticed_at,
            ranks=reports,
            last_step=self._chronicle.last_step(reports),
            control_error=None if isinstance(error, WorkerGroupError) else str(error),
        )
        judgement = judge(evidence)
        self._verdict = decide(
            judgement,
            self._chronicle.failures,
            self._engine.job.spec.recovery,
            no_progress_limit=self._settings.no_progress_limit,
            backoff_max_s=self._settings.backoff_max_s,
            checkpoint=self._engine.job.spec.checkpoint,
        )
        self._chronicle.failed(evidence, judgement, self._verdict)
        if judgement.verdict is Verdict.HARDWARE:
            self._try_elsewhere(judgement.node_id)
        self._look_for_oom(judgement, self._verdict)
        self._sizes.back_off(max(self._verdict.backoff_s, 0.0 if running else _RELEASE_S))
        return FailureDecision.RETRY if self._verdict.restart else FailureDecision.RAISE

    def _reports(self, running: bool) -> tuple[RankReport, ...]:
        if running and self._worker_group is not None:
            settled: tuple[RankReport, ...] = self._worker_group.settle()
            return settled
        return self._last_group.start_reports if self._last_group is not None else ()

    def _look_for_oom(self, judgement: Judgement, decision: Decision) -> None:
        """Where a rank just vanished, ask its node why, beside the recovery; told as another
        event."""
        pid, node_id = judgement.detail.get("pid"), judgement.node_id
        if (
            judgement.verdict is not Verdict.WORKER_LOST
            or pid is None
            or node_id is None
            or self._last_group is None
        ):
            return
        place = {"rank": judgement.first_rank, "node_id": node_id, "pid": pid}
        tell = functools.partial(self._chronicle.evidence, self._chronicle.attempt, place)
        kills_before = self._last_group.oom_kills.get(pid)
        find_rank = functools.partial(self._rank_on, node_id)
        asking = ask_node(
            node_id, pid, kills_before, find_rank, tell, DELAY_S if decision.restart else 0.0
        )
        if not decision.restart:
            asking.join(_EVIDENCE_S)

    def _rank_on(self, node_id: str) -> Any | None:
        """The actor of a rank on that node, as of the group that runs; None without one."""
        group = self._worker_group
        workers = group.get_workers() if group is not None and group.has_started() else ()
        return next(
            (worker.actor for worker in workers if worker.metadata.node_id == node_id), None
        )

    def _tell_moved(self) -> None:
        """Ranks have saved and left a node that is about to be taken away: told as the preemption
        that it is."""
        draining, self._sizes.draining = self._sizes.draining, frozenset()
        workers = self._worker_group.get_workers()
        reports = tuple(
            RankReport(
                rank,
                worker.metadata.node_id,
                worker.metadata.pid,
                node_draining=worker.metadata.node_id in draining,
            )
            for rank, worker in enumerate(workers)
        )
        evidence = Evidence(
            self._chronicle.attempt, self._yield_at, reports, self._chronicle.last_step(reports)
        )
        decision = Decision(True, BUDGET_OF[Verdict.PREEMPTION], "moved away before the deadline")
        self._chronicle.failed(evidence, judge(evidence), decision)
