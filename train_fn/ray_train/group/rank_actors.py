"""Create the actors of a group's ranks on the chosen nodes, and check that they can work there."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from train_fn.ray_train.group.end import Host
from train_fn.ray_train.group.node_checks import (
    ExcludeNodes,
    LinkChecks,
    LinksBroken,
    PreflightChecks,
    check_reach,
    check_versions,
    end_stopped,
    find_stopped,
    link_reports,
    network_reports,
    prepared,
)
from train_fn.ray_train.group.placement import Bundle, Placement
from train_fn.ray_train.ray_internals import (
    Worker,
    WorkerGroupStartupFailedError,
    worker_group_module,
)
from train_fn.ray_train.scaling import ReadNodes
from train_fn.ray_train.worker_actor import KEPT, WATCH, EverstepTrainWorker, RankReady
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.launch import RankJob, RankLaunch
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView, choose_nodes

_LOOK_S = 0.2
_ANSWER_S = 2.0
"""Seconds in which hosts of earlier attempts answer, unless they are busy or stopped."""


class RankActors:
    """The hosts of one attempt's ranks, from their bundles to their end.

    Args:
        launch: the attempt's parameters.
        job: what the ranks train.
        settings: timeouts.
        placement: the run's bundles.
        read_nodes: returns the current nodes of the cluster.
        exclude: called with nodes that get no ranks for a while.
        preflight: checks nodes that are new to the run.
        links: checks nodes between which an earlier attempt failed.
        bring: brings a newer state to the group's nodes, given these, the hosts that it uses, and
            those that end.
        hosts: of earlier attempts. Those on chosen nodes serve this one; the others are ended.
        is_stopping: returns whether the run is to stop, so that no build is waited for.
    """

    def __init__(
        self,
        launch: RankLaunch,
        job: RankJob,
        settings: RecoverySettings,
        placement: Placement,
        read_nodes: ReadNodes,
        exclude: ExcludeNodes,
        preflight: PreflightChecks,
        links: LinkChecks,
        bring: Callable[..., None],
        hosts: Sequence[Host],
        is_stopping: Callable[[], bool],
    ) -> None:
        self.launch, self._job = launch, job
        self._hosts = list(hosts)
        self._settings = settings
        self._placement = placement
        self._read_nodes = read_nodes
        self._exclude = exclude
        self._preflight = preflight
        self._links = links
        self._bring = bring
        self._is_stopping = is_stopping
        self.prolong: Callable[[float], None] = lambda seconds: None
        """Lets the start take so many seconds more."""
        self._nodes: dict[str, NodeView] = {}
        self._bundles: list[Bundle] = []
        self._actors: list[Any] = []
        self.oom_kills: dict[int, int | None] = {}
        """The out-of-memory kills of a rank's node when the rank began, by its process id."""
        self.built_apart: dict[str, str] = {}
        """Why ranks build for themselves, by node id."""
        self.reports: tuple[RankReport, ...] = ()
        """Reports on the ranks if the start failed."""
        self._processes = {(one.bundle.node_id, one.pid) for one in hosts}
        """The processes of the group that are known, each with its node."""
        self._was_silent = False
        """Whether a process did not answer in time, or is stopped."""

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
        used = _on(chosen or {}, self._hosts)
        self._end_all_but(used, chosen or {})
        bundles = (
            self._placement.reserve(
                chosen,
                context.resources_per_worker,
                timeout_s,
                prefer=[one.bundle for one in self._hosts],
            )
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
        self._actors = actors = self._with_new_actors(resources_per_worker)
        self.launch = launch = dataclasses.replace(
            self.launch, num_nodes=len({bundle.node_id for bundle in self._bundles})
        )
        self._require_none_stopped()
        self._wait_for_builds([actor.build.remote(launch, self._job) for actor in actors])
        readiness = [actor.prepare.remote(launch, self._job) for actor in actors]
        metadata = [actor.get_metadata.remote() for actor in actors]
        try:
            ready: list[RankReady] = prepared(readiness, self._settings)
            metas = prepared(metadata, self._settings)
        except WorkerGroupStartupFailedError as exc:
            self._was_silent = isinstance(exc.__cause__, GetTimeoutError)
            raise
        self._processes |= {
            (meta.node_id, rank.host_pid) for rank, meta in zip(ready, metas, strict=True)
        }
        self._check(ready, metas)
        self.oom_kills = {meta.pid: rank.oom_kills for rank, meta in zip(ready, metas, strict=True)}
        self.built_apart = {
            meta.node_id: rank.built_apart
            for rank, meta in zip(ready, metas, strict=True)
            if rank.built_apart is not None
        }
        return [
            Worker(actor, meta, resources_per_worker, placement_group_bundle_index=0)
            for actor, meta in zip(actors, metas, strict=True)
        ]

    def _wait_for_builds(self, builds: Sequence[Any]) -> None:
        """Wait until the task is built on every node. That may take ``hang_start_s`` beside the
        start. Raise WorkerGroupStartupFailedError if a host is gone, or the run is to stop."""
        left, began = list(builds), time.monotonic()
        while left:
            looked_at = time.monotonic()
            done, left = ray.wait(left, num_returns=len(left), timeout=_LOOK_S)
            if looked_at - began < self._settings.hang_start_s:
                self.prolong(time.monotonic() - looked_at)
            prepared(done, self._settings)
            if left and self._is_stopping():
                raise WorkerGroupStartupFailedError("the run is to stop while its task is built")

    def as_host(self, actor: Any, pid: int, step: float) -> Host:
        """Return an actor of this group as one that can serve another attempt.

        Args:
            pid: of its process.
            step: of the state that its rank has left; -1 for none.
        """
        number = next(place for place, each in enumerate(self._actors) if each is actor)
        return Host(actor, self._bundles[number], pid, step)

    def give_up(self, reports: tuple[RankReport, ...]) -> None:
        """Make the start fail at once by killing the actors. ``reports`` say why, unless a check
        found a reason before. May be called from another thread than ``create``."""
        self.reports = self.reports or reports
        _end(self._actors)

    def kill(self, keep: Collection[Any] = ()) -> None:
        """Kill the actors, except those in ``keep``. The run keeps their bundles."""
        doomed = [actor for actor in self._actors if actor not in keep]
        unused = [one.actor for one in self._hosts if one.actor not in self._actors]
        self._actors, self._hosts = [], []
        _end([*doomed, *unused])
        if self._was_silent or any(report.unresponsive for report in self.reports):
            # Ray first asks a process to end, and a stopped one does not hear it. It would hold
            # what its successor waits for.
            end_stopped(self._processes)
            self._placement.release()

    def _end_all_but(self, used: Sequence[Host], chosen: Collection[str]) -> None:
        """End the hosts that this group does not use, before their bundles are removed and before a
        rank looks for their states. A state that no used one has is brought to the ``chosen``
        nodes."""
        unused = [one for one in self._hosts if one not in used]
        self._hosts = list(used)
        if chosen:
            self._bring(chosen, used, unused)
        _end([one.actor for one in unused])

    def _require_none_stopped(self) -> None:
        """Raise WorkerGroupStartupFailedError if a host of an earlier attempt is stopped. The
        others answer at once."""
        if not self._hosts:
            return
        pings = [one.actor.get_metadata.remote() for one in self._hosts]
        _, late = ray.wait(pings, num_returns=len(pings), timeout=_ANSWER_S)
        stopped = find_stopped(self._processes) if late else set()
        if stopped:
            self._was_silent = True
            who = ", ".join(f"{pid} on node {node_id}" for node_id, pid in sorted(stopped))
            raise WorkerGroupStartupFailedError(f"the host of a rank is stopped: {who}")

    def _with_new_actors(self, resources_per_worker: dict[str, float]) -> list[Any]:
        """Return an actor for each bundle: the host that stayed there, else a new one."""
        stayed = {one.bundle.number: one.actor for one in self._hosts}
        new = iter(
            new_actors(
                [bundle for bundle in self._bundles if bundle.number not in stayed],
                resources_per_worker,
            )
        )
        return [
            stayed[bundle.number] if bundle.number in stayed else next(new)
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


def new_actors(bundles: Sequence[Bundle], per_worker: Mapping[str, float]) -> list[Any]:
    """Create an actor in each bundle, without a runtime_env, so that an idle process can run it."""
    options = worker_group_module.bundle_to_remote_args(dict(per_worker))
    actor_class = ray.remote(concurrency_groups={WATCH: 1, KEPT: 2}, **options)(EverstepTrainWorker)
    return [
        actor_class.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=bundle.group, placement_group_bundle_index=0
            )
        ).remote()
        for bundle in bundles
    ]


def _end(actors: Sequence[Any]) -> None:
    """End hosts, and so their ranks."""
    for actor in list(actors):
        ray.kill(actor)


def _on(chosen: Mapping[str, int], hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts for which there is room: on each node at most as many as it takes."""
    room, used = Counter(chosen), []
    for one in hosts:
        if room[one.bundle.node_id] > 0:
            room[one.bundle.node_id] -= 1
            used.append(one)
    return used
