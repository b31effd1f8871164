"""Create the actors of a group's ranks on the chosen nodes, and check that they can work there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from train_fn.ray_train.link_checks import LinkChecks
from train_fn.ray_train.nodes import ReadNodes
from train_fn.ray_train.placement import Bundle, Placement
from train_fn.ray_train.preflight_checks import PreflightChecks
from train_fn.ray_train.ray_internals import (
    Worker,
    WorkerGroupStartupFailedError,
    worker_group_module,
)
from train_fn.ray_train.start_checks import (
    ExcludeNodes,
    LinksBroken,
    check_reach,
    check_versions,
    link_reports,
    network_reports,
    prepared,
)
from train_fn.ray_train.worker_actor import WATCH, EverstepTrainWorker, RankReady
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.launch import RankLaunch
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView, choose_nodes


class RankActors:
    """The actors of one attempt, from their bundles to their end.

    Args:
        launch: the attempt's parameters.
        settings: timeouts.
        placement: the run's bundles.
        read_nodes: returns the current nodes of the cluster.
        exclude: called with nodes that get no ranks for a while.
        preflight: checks nodes that are new to the run.
        links: checks nodes between which an earlier attempt failed.
    """

    def __init__(
        self,
        launch: RankLaunch,
        settings: RecoverySettings,
        placement: Placement,
        read_nodes: ReadNodes,
        exclude: ExcludeNodes,
        preflight: PreflightChecks,
        links: LinkChecks,
    ) -> None:
        self._launch = launch
        self._settings = settings
        self._placement = placement
        self._read_nodes = read_nodes
        self._exclude = exclude
        self._preflight = preflight
        self._links = links
        self._nodes: dict[str, NodeView] = {}
        self._bundles: list[Bundle] = []
        self._actors: list[Any] = []
        self._born_at: dict[int, float] = {}
        """The start of each rank's process, by its process id, in Unix seconds."""
        self.oom_kills: dict[int, int | None] = {}
        """The out-of-memory kills of a rank's node when the rank began, by its process id."""
        self.reports: tuple[RankReport, ...] = ()
        """Reports on the ranks if the start failed."""

    def reserve(self, context: Any, timeout_s: float) -> bool:
        """Take the group's bundles. Return False if the cluster did not grant them in time.

        Args:
            context: Ray's WorkerGroupContext: number, resources and strategy.
            timeout_s: longest wait in seconds.
        """
        nodes = self._read_nodes()
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
            self._exclude(unfit)  # otherwise the same size would be tried forever
        return bundles is not None

    def create(self, resources_per_worker: dict[str, float]) -> list[Worker]:
        """Create an actor in each reserved bundle, and return Ray's workers, without ranks yet.

        Raise WorkerGroupStartupFailedError if an actor does not start or its node does not fit.
        """
        self._actors = self._create_actors(resources_per_worker)
        launch = dataclasses.replace(
            self._launch, num_nodes=len({bundle.node_id for bundle in self._bundles})
        )
        readiness = [actor.prepare.remote(launch) for actor in self._actors]
        metadata = [actor.get_metadata.remote() for actor in self._actors]
        ready: list[RankReady] = prepared(readiness, self._settings)
        metas = prepared(metadata, self._settings)
        self._check(ready, metas)
        self._born_at = {meta.pid: rank.born_at for rank, meta in zip(ready, metas, strict=True)}
        self.oom_kills = {meta.pid: rank.oom_kills for rank, meta in zip(ready, metas, strict=True)}
        return [
            Worker(actor, meta, resources_per_worker, placement_group_bundle_index=0)
            for actor, meta in zip(self._actors, metas, strict=True)
        ]

    def was_idle(self, pid: int) -> bool:
        """Return whether a rank runs in a process that was there, idle, before the group began."""
        return self._born_at[pid] < self._launch.started_at

    def give_up(self, reports: tuple[RankReport, ...]) -> None:
        """Make the start fail at once by killing the actors. ``reports`` say why, unless a check
        found a reason before. May be called from another thread than ``create``."""
        self.reports = self.reports or reports
        for actor in list(self._actors):
            ray.kill(actor)

    def kill(self) -> None:
        """Kill the actors. The run keeps their bundles."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _create_actors(self, resources_per_worker: dict[str, float]) -> list[Any]:
        """Return new actors without a runtime_env, so that idle processes can run them."""
        options = worker_group_module.bundle_to_remote_args(resources_per_worker)
        actor_class = ray.remote(concurrency_groups={WATCH: 1}, **options)(EverstepTrainWorker)
        return [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=bundle.group, placement_group_bundle_index=0
                )
            ).remote()
            for bundle in self._bundles
        ]

    def _check(self, ready: Sequence[RankReady], metas: Sequence[Any]) -> None:
        """Check versions, networks and health of the nodes."""
        check_versions(ready, metas, self._exclude)
        self._raise_for(network_reports(ready, metas))
        try:
            check_reach(self._actors, metas, self._nodes, self._settings, self._exclude)
            self._links.run(self._actors, metas)
            unfit = self._preflight.run(self._actors, metas)
        except LinksBroken as exc:
            self.reports = link_reports(exc, metas)
            raise
        self._raise_for(unfit)

    def _raise_for(self, reports: tuple[RankReport, ...]) -> None:
        """Raise WorkerGroupStartupFailedError if there are reports on ranks that cannot work."""
        self.reports = reports
        if reports:
            raise WorkerGroupStartupFailedError(
                "; ".join(sorted({report.error.summary for report in reports if report.error}))
            )
