"""Create the worker group of each attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.link_checks import LinkChecks
from train_fn.ray_train.nodes import LiveNodes
from train_fn.ray_train.placement import Placement
from train_fn.ray_train.preflight_checks import PreflightChecks
from train_fn.ray_train.rank_actors import RankActors
from train_fn.ray_train.worker_group import EverstepWorkerGroup
from train_fn.recovery.launch import Engine, RankLaunch


class GroupFactory:
    """Stand in for the worker group's class, of which Ray only calls ``create``.

    Args:
        engine: the parameters of every attempt.
        attempt_log: numbers the attempts.
        placement: the run's bundles.
        nodes: the nodes to choose from.
        on_new: called before a group is created.
        on_started: called with a group and its workers once these have their ranks.
    """

    def __init__(
        self,
        engine: Engine,
        attempt_log: AttemptLog,
        placement: Placement,
        nodes: LiveNodes,
        on_new: Callable[[], None],
        on_started: Callable[[EverstepWorkerGroup, list[Any]], None],
    ) -> None:
        self._engine = engine
        self._attempt_log = attempt_log
        self._placement = placement
        self._nodes = nodes
        self._on_new = on_new
        self._on_started = on_started
        self._preflight = PreflightChecks(
            engine.settings, {place.node_id for place in engine.history.workers}, nodes.exclude
        )
        self.links = LinkChecks(engine.settings, nodes.exclude)
        self.last: EverstepWorkerGroup | None = None
        """The newest group, even if its start failed."""

    def create(self, **kwargs: Any) -> EverstepWorkerGroup:
        """Create and start the next attempt's group."""
        self._on_new()
        settings = self._engine.settings
        launch = RankLaunch(
            self._attempt_log.next_attempt(),
            time.time(),
            dict(self._engine.rank_env),
            self._attempt_log.recovery,
            last_step=(
                self._attempt_log.last_step(()) if self._engine.job.spec.runs_script else None
            ),
            silent_peer_s=settings.silent_peer_s,
            meets_to_report=self._engine.job.spec.runs_own_function,
        )
        actors = RankActors(
            launch,
            settings,
            self._placement,
            self._nodes.read,
            self._nodes.exclude,
            self._preflight,
            self.links,
        )
        self.last = EverstepWorkerGroup(
            actors,
            settings,
            self._nodes.read,
            meets_to_report=launch.meets_to_report,
            on_created=self._on_started,
            **kwargs,
        )
        self.last._start()
        return self.last
