"""One attempt's worker group: start it without leaking, run it, end it without losing survivors'
state, and report on each of its ranks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup

from train_fn.ray_train.group.end import (
    GroupShutdown,
    Hosts,
    end_rank,
    reports_after_failed_start,
    reports_of_slow_start,
    with_unheard,
)
from train_fn.ray_train.group.node_checks import end_stopped
from train_fn.ray_train.group.patience import HungRanks, PollPatience, answers, watched_start
from train_fn.ray_train.group.placement import Reservation, end_barrier, no_barrier
from train_fn.ray_train.group.rank_actors import RankActors
from train_fn.ray_train.ray_internals import (
    BackendSetupCallback,
    WorkerGroup,
    WorkerGroupPollStatus,
    WorkerGroupStateBuilder,
    WorkerStatus,
    invoke_context_managers,
)
from train_fn.ray_train.scaling import ReadNodes
from train_fn.ray_train.worker_actor import EverstepTrainWorker
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.hang import ABORTING_SILENT_S, SILENT_S
from train_fn.recovery.settings import RecoverySettings
from train_fn.step.nccl import group_backend, is_known_to_fail


class EverstepWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """The ranks of one attempt.

    Args:
        actors: creates the ranks' actors.
        hosts: takes the hosts that serve the next attempt.
        settings: timeouts.
        read_nodes: returns the current nodes of the cluster.
        calls_ray: as of ``RankJob``.
        on_created: called with its workers once these have their ranks, and why some build for
            themselves, by node id.
        kwargs: Ray's own arguments.
    """

    _worker_cls = EverstepTrainWorker

    def __init__(
        self,
        actors: RankActors,
        hosts: Hosts,
        settings: RecoverySettings,
        read_nodes: ReadNodes,
        *,
        calls_ray: bool,
        on_created: Callable[[list[Any], dict[str, str]], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._actors = actors
        self._hosts = hosts
        self._steps: dict[int, float] = {}
        self._keep: dict[int, int] = {}
        """Ranks whose host serves the next attempt, with its process id."""
        """Ranks that died or do not answer."""
        self._settings = settings
        self._read_nodes = read_nodes
        self._calls_ray = calls_ray
        self._on_created = on_created
        self._news = RankNews()
        self._patience = PollPatience(read_nodes, settings.health_timeout_s)
        self._hung = HungRanks(settings.health_timeout_s)
        self._ranked: list[Any] = []
        """The workers by rank, once ranks are assigned."""
        self._worker_group_start_timeout_s = settings.placement_s
        self._worker_health_check_timeout_s = settings.health_timeout_s

    # -- start

    @property
    def start_reports(self) -> tuple[RankReport, ...]:
        """Return reports on the ranks if the start failed."""
        return self._actors.reports

    @property
    def oom_kills(self) -> dict[int, int | None]:
        """Return the out-of-memory kills of each rank's node when the rank began, by process id."""
        return self._actors.oom_kills

    def _start(self) -> None:
        """Start the group, or leave nothing of it behind.

        Ray's own start leaks the placement group if a rank dies meanwhile, and waits forever for a
        rank that hangs. Killing what was created cures both.
        """
        builder = WorkerGroupStateBuilder()
        with watched_start(
            self._settings.group_start_s,
            lambda: reports_of_slow_start(self._ranked, self._read_nodes),
            self._actors.give_up,
        ) as limit:
            self._actors.prolong = limit.add
            try:
                with nullcontext() if self._calls_ray else no_barrier():
                    self._start_impl(builder)
            except BaseException:
                self._actors.reports = self._actors.reports or reports_after_failed_start(
                    self._ranked, self._read_nodes
                )
                end_barrier(builder.sync_actor)
                self._actors.kill()
                raise

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        """Return a handle that reserves bundles of the run's placement when Ray waits for it."""
        return Reservation(self._reserve)

    def _reserve(self, timeout_s: float) -> bool:
        return self._actors.reserve(self._worker_group_context, timeout_s)

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
        """Create the actors in the reserved bundles, and assign ranks."""
        self._ranked = WorkerGroup._assign_worker_ranks(
            self._actors.create(resources_per_worker),
            starting_world_rank,
            world_size,
            replica_group_size,
        )
        self._on_created(self._ranked, self._actors.built_apart)
        return self._ranked

    # -- while it runs

    async def news(self, poll_s: float, quiet_s: float) -> bool:
        """Wait for news of a rank (see ``RankNews``). A rank that has not answered the last poll
        yet counts as news."""
        has_news = await self._news.wait(self.get_workers(), poll_s, quiet_s)
        return has_news or bool(self._world_rank_to_ongoing_poll)

    def unchanged_status(self) -> WorkerGroupPollStatus:
        """Return what a poll would find while there is no news."""
        return WorkerGroupPollStatus(
            {rank: _still_running() for rank in range(len(self.get_workers()))}
        )

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[Any]:
        """Poll as Ray does, but with patience while the network fails (see ``PollPatience``)."""
        statuses: list[Any] = super()._poll_workers_and_collect_errors(timeout)
        running = self._patience.still_running(
            statuses, self.get_workers(), self._world_rank_to_ongoing_poll
        )
        return [
            _still_running() if rank in running else status for rank, status in enumerate(statuses)
        ]

    def is_cut_off(self) -> bool:
        """Return whether this host is cut off from all others."""
        return self._patience.is_cut_off(self.get_workers())

    def ask_to_yield(self, *, hands_over: bool) -> None:
        """Ask every rank to exit at the next step that all agree on: with a final checkpoint, or,
        if the group hands over, with their states in their processes."""
        for worker in self.get_workers():
            worker.actor.ask_to_yield.remote(self._actors.launch.attempt, hands_over)

    def ranks_outside(self, node_ids: Collection[str]) -> list[int]:
        """Return the ranks that are on none of these nodes."""
        workers = enumerate(self.get_workers())
        return [rank for rank, worker in workers if worker.metadata.node_id not in node_ids]

    def break_hang(self, reason: str) -> list[int]:
        """Kill the ranks that hold up the others, and return them. ``wait_for_survivors`` reports
        ``reason`` for them."""
        return self._hung.kill(self.get_workers(), reason, self._end)

    def abandon(self, node_ids: Collection[str]) -> list[int]:
        """Kill the ranks on nodes that are about to be removed, so that their peers exit with their
        states. Return the killed ranks.

        If all ranks are on such nodes, kill those that hold up the others.
        """
        ranks = [
            rank
            for rank, worker in enumerate(self.get_workers())
            if worker.metadata.node_id in node_ids
        ]
        if len(ranks) == len(self.get_workers()):
            return self.break_hang("its node is about to be removed, and it did not exit in time")
        for rank in ranks:
            self._end(self.get_workers()[rank].actor)
        return ranks

    @property
    def _end(self) -> Callable[[Any], object]:
        """Return what ends a rank: it, or the host in whose process it runs."""
        return ray.kill if self._calls_ray else end_rank

    # -- end

    def keep_hosts(self, steps: Mapping[int, float]) -> None:
        """Let the hosts that answer serve the next attempt. Their ranks end.

        Args:
            steps: the step of the state that each rank has left.
        """
        self._steps = dict(steps)
        alive = {node.node_id for node in self._read_nodes() if node.reachable}
        asked = {
            rank: worker.actor.release.remote()
            for rank, worker in enumerate(self.get_workers())
            if worker.metadata.node_id in alive
        }
        pids = answers(list(asked.values()))
        self._keep = {
            rank: pids[number] for number, rank in enumerate(asked) if pids[number] is not None
        }

    def wait_for_survivors(self, patience_s: Callable[[], float]) -> tuple[RankReport, ...]:
        """Delay the shutdown until survivors have left their step and written their snapshots.
        Return a report on each rank.

        Args:
            patience_s: returns how much longer ranks may take for what they do.
        """
        if self._calls_ray:
            # This frees ranks that wait in report() for a peer that is gone.
            self.get_worker_group_state().sync_actor.reset.remote()
        polled = self._latest_poll_status.worker_statuses if self._latest_poll_status else {}
        errors = {rank: status.error for rank, status in polled.items()}
        silent_s = ABORTING_SILENT_S if self.must_abort else SILENT_S
        shutdown = GroupShutdown(self.get_workers(), self._read_nodes, errors, silent_s, self._end)
        reports = with_unheard(
            shutdown.reports_within(self._settings.hold_s, patience_s),
            {worker.metadata.node_id: worker.metadata.node_ip for worker in self.get_workers()},
        )
        reports = tuple(map(self._hung.explain, reports))
        silent = [(each.node_id, each.pid) for each in reports if each.unresponsive]
        if silent and self._calls_ray:
            end_stopped(silent)  # what Ray has given up to kill would keep out its successor
        return reports

    @property
    def must_abort(self) -> bool:
        """Return whether only an abort frees the ranks from their collectives."""
        on_gpus = bool(self._worker_group_context.resources_per_worker.get("GPU"))
        backend = group_backend(torch.device("cuda" if on_gpus else "cpu"))
        return not is_known_to_fail(backend)

    def shutdown(self) -> None:
        """End the group at once, except for hosts that serve the next attempt. Its ranks have
        settled by then, and a process that ends needs no orderly shutdown."""
        self._assert_active()
        with invoke_context_managers(
            [callback.on_worker_group_shutdown for callback in self._callbacks]
        ):
            for callback in self._callbacks:
                # That one would wait for ranks that are gone.
                if not isinstance(callback, BackendSetupCallback):
                    callback.before_worker_group_shutdown(self)
            barrier = self.get_worker_group_state().sync_actor
            kept = [
                self._actors.as_host(worker.actor, self._keep[rank], self._steps.get(rank, -1))
                for rank, worker in enumerate(self.get_workers())
                if rank in self._keep
            ]
            self._clear_state()
            end_barrier(barrier)
            self._actors.kill(keep=[one.actor for one in kept])
            self._hosts.hold(kept)
            for callback in self._callbacks:
                callback.after_worker_group_shutdown(self._worker_group_context)


def _still_running() -> Any:
    return WorkerStatus(running=True, error=None, training_report=None)


# ---------------------------------------------------------------- rank news

# Wait until a rank of a running group has news for the controller.

_FIRST_PAUSE_S = 0.01
_SHARE = 0.2
"""Pauses between polls once a rank is over: short at first, then this share of the time since."""


class RankNews:
    """Keep one pending call to each rank of a group. It returns once a poll would find
    something."""

    def __init__(self) -> None:
        self._watches: list[asyncio.Future[bool]] = []
        """The pending calls, by rank."""
        self._over_at: float | None = None
        """When the first rank was over, in monotonic seconds."""

    async def wait(self, workers: Sequence[Any], poll_s: float, quiet_s: float) -> bool:
        """Wait for news of any rank. Return False if there is none.

        Once a rank has finished training, ended or died, its call has no more to say: from then on
        there is news at short intervals, which grow to ``poll_s``, and when another rank has some.

        Args:
            workers: the group's workers, by rank.
            poll_s: longest interval in seconds once a rank is over.
            quiet_s: longest wait in seconds.
        """
        if not self._watches:
            self._watches = [_watch(worker) for worker in workers]
        pending = [watch for watch in self._watches if not _is_over(watch)]
        is_over = len(pending) < len(workers)
        if is_over:
            now = time.monotonic()
            self._over_at = self._over_at or now
            quiet_s = min(poll_s, _FIRST_PAUSE_S + _SHARE * (now - self._over_at))
        if not pending:
            await asyncio.sleep(quiet_s)
            return True
        done, _ = await asyncio.wait(pending, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED)
        self._watches = [
            _watch(worker) if watch.done() and not _is_over(watch) else watch
            for worker, watch in zip(workers, self._watches, strict=True)
        ]
        return is_over or bool(done)


def _watch(worker: Any) -> asyncio.Future[bool]:
    return asyncio.wrap_future(worker.actor.watch.remote().future())


def _is_over(watch: asyncio.Future[bool]) -> bool:
    """Return whether a rank has no more news: it has finished training or ended, or it cannot be
    called, and a poll finds out why."""
    return watch.done() and (watch.exception() is not None or watch.result())
