"""A worker group that starts without leaking, ends without losing survivors' state, and says what
became of each rank."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from train_fn.ray_train.group_shutdown import Settling
from train_fn.ray_train.nodes import Look
from train_fn.ray_train.placement import Bundle, Placement, Reservation
from train_fn.ray_train.preflight_checks import Fitness
from train_fn.ray_train.rank_reports import reports_after_failed_start, reports_of_slow_start
from train_fn.ray_train.ray_internals import (
    BackendSetupCallback,
    Worker,
    WorkerGroup,
    WorkerGroupPollStatus,
    WorkerGroupStartupFailedError,
    WorkerGroupStateBuilder,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
    WorkerStatus,
    invoke_context_managers,
    worker_group_module,
)
from train_fn.ray_train.start_checks import (
    LeaveOut,
    check_reach,
    check_versions,
    network_reports,
    prepared,
)
from train_fn.ray_train.worker_actor import WATCH, EverstepTrainWorker, RankReady
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.hang import ABORTING_SILENT_S, SILENT_S, find_stuck, is_known_who_hangs
from train_fn.recovery.launch import RankLaunch
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView, choose_nodes
from train_fn.step.nccl import group_backend, is_known_to_fail

logger = logging.getLogger(__name__)

_START_LOOK_S = 10.0
"""So often is looked for ranks that are stopped while a group starts."""


class EverstepWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """One attempt's ranks."""

    _worker_cls = EverstepTrainWorker

    def __init__(
        self,
        launch: RankLaunch,
        settings: RecoverySettings,
        placement: Placement,
        look: Look,
        on_created: Callable[[EverstepWorkerGroup, list[Any]], None],
        on_apart: LeaveOut,
        fitness: Fitness,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._launch = launch
        self._settings = settings
        self._placement = placement
        self._look_at_nodes = look
        self._on_created = on_created
        self._on_apart = on_apart
        self._fitness = fitness
        self._watches: list[asyncio.Future[bool]] = []
        """By rank, what is done once a poll would find something."""
        self._missed_since: dict[int, float] = {}
        """By rank, since when it could not be called."""
        self._told_cut_off = False
        self._nodes: dict[str, NodeView] = {}
        self._actors: list[Any] = []
        self._ranked: list[Any] = []
        self._born_at: dict[int, float] = {}
        self.oom_kills: dict[int, int | None] = {}
        """By process id of a rank, the out-of-memory kills of its node when it began."""
        self._stacks: dict[int, str | None] = {}
        self._hung: list[int] = []
        self._hang_reason = ""
        self.start_reports: tuple[RankReport, ...] = ()
        self._bundles: list[Bundle] = []
        self._worker_group_start_timeout_s = settings.placement_s
        self._worker_health_check_timeout_s = settings.health_timeout_s

    # -- start

    def _start(self) -> None:
        """Start the group, or leave nothing of it behind.

        Ray's own start leaks the placement group when a rank dies in it, and waits for a hung rank
        without end: both are cured by killing what was created.
        """
        builder = WorkerGroupStateBuilder()
        ended = threading.Event()
        threading.Thread(
            target=self._watch_start, args=(ended,), name="start-watch", daemon=True
        ).start()
        try:
            self._start_impl(builder)
            if not self._launch.meets_to_report:
                # nobody calls it, and every process of Ray's wakes up a hundred times a second
                ray.kill(builder.sync_actor)
        except BaseException:
            self.start_reports = self.start_reports or reports_after_failed_start(
                self._ranked, self._look_at_nodes
            )
            if builder.sync_actor is not None:
                ray.kill(builder.sync_actor)
            self.kill()
            raise
        finally:
            ended.set()

    def _watch_start(self, ended: threading.Event) -> None:
        """On a thread: give a start up that takes too long, or in which a rank is stopped. With its
        actors dead it fails at once.

        Who answers says nothing of who holds the others up: they all wait for each other. Their
        nodes know who is stopped.
        """
        overdue_at = time.monotonic() + self._settings.group_start_s
        while not ended.wait(max(0.0, min(_START_LOOK_S, overdue_at - time.monotonic()))):
            reports = reports_of_slow_start(self._ranked, self._look_at_nodes)
            overdue = time.monotonic() >= overdue_at
            if ended.is_set() or not (overdue or any(report.unresponsive for report in reports)):
                continue
            why = (
                f"did not start within {self._settings.group_start_s:g} s"
                if overdue
                else "waits for a rank that is stopped"
            )
            logger.warning("the worker group %s; its processes are killed", why)
            self.start_reports = self.start_reports or reports
            for actor in list(self._actors):
                ray.kill(actor)
            return

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        """Nothing is created here: the handle reserves bundles of the run's placement when Ray
        waits for it."""
        return Reservation(self.reserve)

    def reserve(self, timeout_s: float) -> bool:
        """Take the group's bundles; False when the cluster did not give them in time."""
        context = self._worker_group_context
        nodes = self._look_at_nodes()
        self._nodes = {node.node_id: node for node in nodes}
        chosen = choose_nodes(
            nodes,
            self._placement.held({node.node_id for node in nodes}),
            context.resources_per_worker,
            num_workers=context.num_workers,
            strategy=context.placement_strategy,
        )
        bundles = (
            self._placement.reserve(chosen, context.resources_per_worker, timeout_s)
            if chosen is not None
            else None
        )
        self._bundles = bundles or []
        if bundles is None and (unfit := self._placement.unfit()):
            self._on_apart(unfit)  # else the same size would be tried for ever
        return bundles is not None

    def _create_workers(
        self,
        num_workers: int,
        placement_group: PlacementGroup | None,
        resources_per_worker: dict[str, float],
        placement_group_bundle_indices: list[int] | None = None,
        starting_world_rank: int = 0,
        world_size: int | None = None,
        replica_group_size: int | None = None,
    ) -> list[Any]:
        """Actors without a runtime_env in the reserved bundles, prepared in the same breath, with
        ranks assigned."""
        options = worker_group_module.bundle_to_remote_args(resources_per_worker)
        actor_class = ray.remote(concurrency_groups={WATCH: 1}, **options)(self._worker_cls)
        self._actors = [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=bundle.group, placement_group_bundle_index=0
                )
            ).remote()
            for bundle in self._bundles
        ]
        launch = dataclasses.replace(
            self._launch, num_nodes=len({bundle.node_id for bundle in self._bundles})
        )
        readiness = [actor.prepare.remote(launch) for actor in self._actors]
        metadata = [actor.get_metadata.remote() for actor in self._actors]
        ready: list[RankReady] = prepared(readiness, self._settings)
        metas = prepared(metadata, self._settings)
        check_versions(ready, metas, self._on_apart)
        self._begin_only_without(network_reports(ready, metas))
        check_reach(self._actors, metas, self._nodes, self._settings, self._on_apart)
        self._begin_only_without(self._fitness.look(self._actors, metas))
        self._born_at = {meta.pid: rank.born_at for rank, meta in zip(ready, metas, strict=True)}
        self.oom_kills = {meta.pid: rank.oom_kills for rank, meta in zip(ready, metas, strict=True)}
        workers = [
            Worker(actor, meta, resources_per_worker, placement_group_bundle_index=0)
            for actor, meta in zip(self._actors, metas, strict=True)
        ]
        self._ranked = WorkerGroup._assign_worker_ranks(
            workers, starting_world_rank, world_size, replica_group_size
        )
        self._on_created(self, self._ranked)
        return self._ranked

    def _begin_only_without(self, reports: tuple[RankReport, ...]) -> None:
        """Give the start up where there are reports on ranks that cannot do their part."""
        self.start_reports = reports
        if reports:
            raise WorkerGroupStartupFailedError(
                "; ".join(sorted({report.error.summary for report in reports if report.error}))
            )

    # -- while it runs

    async def news(self, poll_s: float, quiet_s: float) -> bool:
        """Wait until a rank has something to tell, ``quiet_s`` at most; whether one has, or owes
        the last poll an answer.

        Once one has trained, ended or died, that is not told any more: there is news every
        ``poll_s``.
        """
        if not self._watches:
            self._watches = [self._watch(worker) for worker in self.get_workers()]
        if any(_is_over(watch) for watch in self._watches):
            await asyncio.sleep(poll_s)
            return True
        done, _ = await asyncio.wait(
            self._watches, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED
        )
        self._watches = [
            self._watch(worker) if watch.done() and not _is_over(watch) else watch
            for worker, watch in zip(self.get_workers(), self._watches, strict=True)
        ]
        return bool(done or self._world_rank_to_ongoing_poll)

    @staticmethod
    def _watch(worker: Any) -> asyncio.Future[bool]:
        return asyncio.wrap_future(worker.actor.watch.remote().future())

    def as_it_was(self) -> WorkerGroupPollStatus:
        """What a poll would find while there is no news."""
        return WorkerGroupPollStatus(
            {rank: _still_running() for rank in range(len(self.get_workers()))}
        )

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[Any]:
        """Ray's poll, with patience for a network that fails for a while.

        Ray takes the first lost call for a lost rank. A rank that cannot be called although its
        node answers is called again for ``health_timeout_s``; and where no other host is heard at
        all, this one is cut off: the ranks train on without it.
        """
        statuses: list[Any] = super()._poll_workers_and_collect_errors(timeout)
        missed = {rank for rank, status in enumerate(statuses) if _is_missed(status.error)}
        self._missed_since = {
            rank: self._missed_since.get(rank, time.monotonic()) for rank in missed
        }
        if not missed:
            return statuses
        try:
            nodes = {node.node_id: node for node in self._look_at_nodes()}
        except Exception as exc:
            logger.warning("the cluster's nodes could not be seen: %s", exc)
            return statuses
        if self._is_cut_off(nodes.values()):
            self._world_rank_to_ongoing_poll.clear()
            self._missed_since.clear()
            patient = missed
        else:
            recent = time.monotonic() - self._settings.health_timeout_s
            patient = {
                rank
                for rank in missed
                if self._may_answer_yet(rank, nodes) and self._missed_since[rank] > recent
            }
        return [
            _still_running() if rank in patient else status for rank, status in enumerate(statuses)
        ]

    def _may_answer_yet(self, rank: int, nodes: Mapping[str, NodeView]) -> bool:
        """Whether the node of a rank that could not be called answers itself. A call that hangs had
        its time already."""
        node = nodes.get(self.get_workers()[rank].metadata.node_id)
        return node is not None and node.reachable and rank not in self._world_rank_to_ongoing_poll

    def is_cut_off(self) -> bool:
        """Whether no other host is heard although the cluster still counts on some: then it is this
        one that is cut off."""
        try:
            return self._is_cut_off(self._look_at_nodes())
        except Exception as exc:
            logger.warning("the cluster's nodes could not be seen: %s", exc)
            return False

    def _is_cut_off(self, nodes: Iterable[NodeView]) -> bool:
        others = [node for node in nodes if not node.is_head]
        ranks_on = {worker.metadata.node_id for worker in self.get_workers()}
        cut_off = (
            bool(others)
            and all(node.silent for node in others)
            and ranks_on <= {node.node_id for node in others}
        )
        if cut_off and not self._told_cut_off:
            logger.warning(
                "no other host is heard from here; the ranks are left alone until one is"
            )
        self._told_cut_off = cut_off
        return cut_off

    def processes_by_node(self) -> dict[str, tuple[int, int]]:
        """For each node id its ranks, and how many of them are processes that were there, idle,
        before the group began."""
        found: dict[str, tuple[int, int]] = {}
        for worker in self._ranked:
            ranks, taken = found.get(worker.metadata.node_id, (0, 0))
            was_idle = self._born_at[worker.metadata.pid] < self._launch.started_at
            found[worker.metadata.node_id] = (ranks + 1, taken + was_idle)
        return found

    def ask_to_yield(self) -> None:
        """Ask every rank to save and leave at the next agreed step."""
        for worker in self.get_workers():
            worker.actor.ask_to_yield.remote()

    def break_hang(self, reason: str) -> list[int]:
        """Keep every rank's stack, and kill those that hold the others up, for ``reason``; which
        they were.

        Their peers leave with a failed collective, as when a rank dies by itself; ``settle`` tells
        the difference.
        """
        pending = {
            worker.actor.stack.remote(): rank for rank, worker in enumerate(self.get_workers())
        }
        answered, _ = ray.wait(list(pending), num_returns=len(pending), timeout=SILENT_S)
        self._hang_reason = reason
        self._stacks = dict.fromkeys(pending.values())
        for ref in answered:
            with contextlib.suppress(RayError):
                self._stacks[pending[ref]] = ray.get(ref)
        self._hung = find_stuck(self._stacks)
        for rank in self._hung:
            ray.kill(self.get_workers()[rank].actor)
        return self._hung

    def abandon(self, node_ids: Collection[str]) -> list[int]:
        """Kill the ranks on nodes that are about to be taken away, that their peers leave with
        their states; which they were.

        Where all ranks are on such nodes, those that hold the others up.
        """
        ranks = [
            rank
            for rank, worker in enumerate(self.get_workers())
            if worker.metadata.node_id in node_ids
        ]
        if len(ranks) == len(self.get_workers()):
            return self.break_hang("its node is taken away, and it has not left in time")
        for rank in ranks:
            ray.kill(self.get_workers()[rank].actor)
        return ranks

    # -- end

    def settle(self) -> tuple[RankReport, ...]:
        """Hold the teardown until survivors have left their step and written their snapshots; what
        became of each rank."""
        if self._launch.meets_to_report:
            # frees ranks that wait in report() for a peer that is gone
            self.get_worker_group_state().sync_actor.reset.remote()
        polled = self._latest_poll_status.worker_statuses if self._latest_poll_status else {}
        errors = {rank: status.error for rank, status in polled.items()}
        silent_s = ABORTING_SILENT_S if self._must_abort() else SILENT_S
        settling = Settling(self.get_workers(), self._look_at_nodes, errors, silent_s)
        return tuple(
            self._with_hang(report) for report in settling.reports_within(self._settings.hold_s)
        )

    def _must_abort(self) -> bool:
        """Whether ranks are freed by an abort alone."""
        on_gpus = bool(self._worker_group_context.resources_per_worker.get("GPU"))
        backend = group_backend(torch.device("cuda" if on_gpus else "cpu"))
        return not is_known_to_fail(backend)

    def _with_hang(self, report: RankReport) -> RankReport:
        """A rank that was killed because it hung did not die; every rank's stack from then is
        evidence.

        Where its node does not answer either, the node is lost: nobody knows whether the rank hung,
        or was killed at all.
        """
        report = dataclasses.replace(report, stack=self._stacks.get(report.rank))
        if report.rank in self._hung:
            is_lost = not report.node_alive
            return dataclasses.replace(
                report,
                unresponsive=not is_lost,
                is_unproven=not is_lost and not is_known_who_hangs(self._stacks),
                died=is_lost,
                death=None,
                still_running=False,
                hang=None if is_lost else self._hang_reason,
            )
        if report.unresponsive:
            limit_s = self._settings.health_timeout_s
            no_answer = (
                "its process does not answer, though its node does: it was stopped, or is busy "
                f"outside of Python. A poll may take {limit_s:g} s "
                "(EVERSTEP_RECOVERY_HEALTH_TIMEOUT_S, or recovery.hang_timeout_s where that is "
                "shorter); raise that if it is busy"
            )
            return dataclasses.replace(report, hang=no_answer)
        return report

    def shutdown(self) -> None:
        """End the group at once: its ranks have settled, and a process that ends needs no
        farewell."""
        self._assert_active()
        with invoke_context_managers(
            [callback.on_worker_group_shutdown for callback in self._callbacks]
        ):
            for callback in self._callbacks:
                # it would wait for the ranks that are gone
                if not isinstance(callback, BackendSetupCallback):
                    callback.before_worker_group_shutdown(self)
            sync_actor = self.get_worker_group_state().sync_actor
            self._clear_state()
            ray.kill(sync_actor)
            self.kill()
            for callback in self._callbacks:
                callback.after_worker_group_shutdown(self._worker_group_context)

    def kill(self) -> None:
        """Kill what this group created; its bundles stay with the run."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


def _is_over(watch: asyncio.Future[bool]) -> bool:
    """Whether a rank tells no more news: it has trained or ended, or cannot be called, and a poll
    says why."""
    return watch.done() and (watch.exception() is not None or watch.result())


def _still_running() -> Any:
    return WorkerStatus(running=True, error=None, training_report=None)


def _is_missed(error: Any) -> bool:
    """Whether a poll says that its rank could not be called, or did not answer, and not that it is
    dead."""
    if isinstance(error, WorkerHealthCheckFailedError):
        return isinstance(error.health_check_failure, ActorUnavailableError)
    return isinstance(error, WorkerHealthCheckTimeoutError)
