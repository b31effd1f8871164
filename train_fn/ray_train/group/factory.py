"""Create the worker group of each attempt, on the hosts of earlier ones where there are any."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.group.end import Host, Hosts
from train_fn.ray_train.group.left_states import LeftStates, may_lie_elsewhere
from train_fn.ray_train.group.node_checks import LinkChecks, PreflightChecks
from train_fn.ray_train.group.placement import Placement
from train_fn.ray_train.group.rank_actors import RankActors
from train_fn.ray_train.group.worker_group import EverstepWorkerGroup
from train_fn.ray_train.scaling import LiveNodes
from train_fn.recovery.decision import micro_batch_size_after
from train_fn.recovery.launch import Engine, RankLaunch


class GroupFactory:
    """Stand in for the worker group's class, of which Ray only calls ``create``.

    Args:
        engine: the parameters of every attempt.
        attempt_log: numbers the attempts.
        placement: the run's bundles.
        nodes: the nodes to choose from.
        on_new: called before a group is created.
        on_started: called with a group's workers once these have their ranks, and why some build
            for themselves, by node id.
        is_stopping: returns whether the run is to stop.
    """

    def __init__(
        self,
        engine: Engine,
        attempt_log: AttemptLog,
        placement: Placement,
        nodes: LiveNodes,
        on_new: Callable[[], None],
        on_started: Callable[[list[Any], dict[str, str]], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._attempt_log = attempt_log
        self._placement = placement
        self._nodes = nodes
        self._on_new = on_new
        self._on_started, self._is_stopping = on_started, is_stopping
        self._preflight = PreflightChecks(
            engine.settings, {place.node_id for place in engine.history.workers}, nodes.exclude
        )
        self.links = LinkChecks(engine.settings, nodes.exclude)
        self.keeps_hosts = not engine.job.calls_ray
        """Whether hosts serve several attempts. One in whose process the user's code runs does
        not."""
        self.hosts = Hosts()
        self.last: EverstepWorkerGroup | None = None
        """The newest group, even if its start failed."""

    def create(self, **kwargs: Any) -> EverstepWorkerGroup:
        """Create and start the next attempt's group."""
        self._on_new()
        launch = self._launch(self._attempt_log.next_attempt())
        self.last = self._new_group(launch, self.hosts.take(), **kwargs)
        self.last._start()
        return self.last

    def _launch(self, attempt: int) -> RankLaunch:
        return RankLaunch(
            attempt,
            time.time(),
            dict(self._engine.rank_env),
            self._attempt_log.recovery,
            last_step=(
                self._attempt_log.last_step(()) if self._engine.job.spec.runs_script else None
            ),
            silent_peer_s=self._engine.settings.silent_peer_s,
            micro_batch_size=micro_batch_size_after(self._attempt_log.failures),
        )

    def _new_group(
        self, launch: RankLaunch, hosts: Sequence[Host], **kwargs: Any
    ) -> EverstepWorkerGroup:
        settings = self._engine.settings
        actors = RankActors(
            launch,
            self._engine.job,
            settings,
            self._placement,
            self._nodes.read,
            self._nodes.exclude,
            self._preflight,
            self.links,
            self._bring,
            hosts,
            self._is_stopping,
        )
        return EverstepWorkerGroup(
            actors,
            self.hosts,
            settings,
            self._nodes.read,
            calls_ray=self._engine.job.calls_ray,
            on_created=self._on_started,
            **kwargs,
        )

    def _bring(self, chosen: Collection[str], used: Sequence[Any], ending: Sequence[Any]) -> None:
        """Bring the newest state to the chosen nodes, if it may lie on a node without a rank."""
        log, job = self._attempt_log, self._engine.job
        done = (log.last_step(()) or 0) if log.nodes - {*chosen} else 0
        kept, ended = ([one.step for one in each] for each in (used, ending))
        if may_lie_elsewhere(kept, ended, done, in_pieces=job.spec.train.sharding != "none"):
            processes = {one.bundle.node_id: one.actor for one in (*used, *ending)}
            nodes = log.nodes | {*chosen}
            LeftStates(job.run_dir, job.submission, nodes, processes).bring_to(chosen)
