"""Create the actors of a group's ranks on the chosen nodes, and check that they can work there."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from train_fn.ray_train.group.end import NO_STATE, SurvivingProcess, end_processes, leave_states
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
from train_fn.recovery.launch import RankLaunch
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView, choose_nodes

_ANSWER_S = 2.0
"""Seconds in which processes of earlier ranks answer, unless they are busy or stopped."""


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
        bring: brings a newer state to the group's nodes, given these, the processes that it uses,
            and those that end.
        survivors: processes of earlier ranks, newest state first. Those on chosen nodes serve this
            attempt; the others are ended.
        answer_s: longest time in seconds for one of them to begin this attempt.
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
        bring: Callable[..., None],
        survivors: Sequence[SurvivingProcess] = (),
        answer_s: float = float("inf"),
    ) -> None:
        self.launch = launch
        self._survivors = list(survivors)
        self._answer_s = answer_s
        self._settings = settings
        self._placement = placement
        self._read_nodes = read_nodes
        self._exclude = exclude
        self._preflight = preflight
        self._links = links
        self._bring = bring
        self._nodes: dict[str, NodeView] = {}
        self._bundles: list[Bundle] = []
        self._actors: list[Any] = []
        self._born_at: dict[int, float] = {}
        """The start of each rank's process, by its process id, in Unix seconds."""
        self.oom_kills: dict[int, int | None] = {}
        """The out-of-memory kills of a rank's node when the rank began, by its process id."""
        self.reports: tuple[RankReport, ...] = ()
        """Reports on the ranks if the start failed."""
        self.is_refused = False
        """Whether a check of the nodes found why ranks cannot work there."""
        self._processes = {(one.bundle.node_id, one.pid) for one in survivors}
        """The processes of the group that are known, each with its node."""
        self._was_silent = False
        """Whether a process did not answer in time, or is stopped."""

    @property
    def num_stayed(self) -> int:
        """Return the number of ranks in processes of earlier ranks."""
        return len(self._survivors)

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
        used = _on(chosen or {}, self._survivors)
        self._end_all_but(used, chosen or {})
        bundles = (
            self._placement.reserve(
                chosen,
                context.resources_per_worker,
                timeout_s,
                prefer=[one.bundle for one in self._survivors],
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
        stayed = {one.bundle.number: one.actor for one in self._survivors}
        actors = self._actors = self._with_new_actors(resources_per_worker, stayed)
        self.launch = launch = dataclasses.replace(
            self.launch,
            num_nodes=len({bundle.node_id for bundle in self._bundles}),
            num_stayed=sum(one.step != NO_STATE for one in self._survivors),
        )
        readiness = [actor.prepare.remote(launch) for actor in actors]
        metadata = [actor.get_metadata.remote() for actor in actors]
        from_before = [
            ref
            for bundle, ref in zip(self._bundles, readiness, strict=True)
            if bundle.number in stayed
        ]
        self._require_none_stopped(from_before)
        try:
            prepared(from_before, self._settings, self._answer_s)
            ready: list[RankReady] = prepared(readiness, self._settings)
            metas = prepared(metadata, self._settings)
        except WorkerGroupStartupFailedError as exc:
            self._was_silent = isinstance(exc.__cause__, GetTimeoutError)
            raise
        self._processes |= {(meta.node_id, meta.pid) for meta in metas}
        self._check(ready, metas)
        self._born_at = {meta.pid: rank.born_at for rank, meta in zip(ready, metas, strict=True)}
        self.oom_kills = {meta.pid: rank.oom_kills for rank, meta in zip(ready, metas, strict=True)}
        return [
            Worker(actor, meta, resources_per_worker, placement_group_bundle_index=0)
            for actor, meta in zip(actors, metas, strict=True)
        ]

    def was_idle(self, pid: int) -> bool:
        """Return whether a rank runs in a process that was there, idle, before the group began. The
        processes of earlier ranks were not idle."""
        stayed = any(one.pid == pid for one in self._survivors)
        return not stayed and self._born_at[pid] < self.launch.started_at

    def as_survivor(self, actor: Any, pid: int, step: int) -> SurvivingProcess:
        """Return an actor of this group as one that can serve another attempt.

        Args:
            actor: of one of its ranks.
            pid: of its process.
            step: of the state that the rank left.
        """
        number = next(place for place, each in enumerate(self._actors) if each is actor)
        return SurvivingProcess(actor, self._bundles[number], pid, step)

    def give_up(self, reports: tuple[RankReport, ...]) -> None:
        """Make the start fail at once by killing the actors. ``reports`` say why, unless a check
        found a reason before. May be called from another thread than ``create``."""
        self.reports = self.reports or reports
        self._end(self._actors)

    def kill(self, keep: Collection[Any] = (), at_once: Collection[Any] = ()) -> None:
        """Kill the actors, except those in ``keep``. The run keeps their bundles.

        Args:
            at_once: actors that cannot answer, so that they are not asked for a state first. A node
                that has just died would take a second to fail.
        """
        for actor in at_once:
            ray.kill(actor)
        doomed = [actor for actor in self._actors if actor not in keep and actor not in at_once]
        unused = [one.actor for one in self._survivors if one.actor not in self._actors]
        self._actors, self._survivors = [], []
        self._end([*doomed, *unused])
        if self._was_silent or any(report.unresponsive for report in self.reports):
            # Ray first asks a process to end, and a stopped one does not hear it. It would hold
            # what its successor waits for.
            end_stopped(self._processes)
            self._placement.release()

    def _end(self, actors: Sequence[Any]) -> None:
        """End processes. Ranks that may keep their state in their process first write it."""
        if self.launch.in_process:
            end_processes(list(actors), self._settings.hold_s)
        else:
            for actor in list(actors):
                ray.kill(actor)

    def _end_all_but(self, used: Sequence[SurvivingProcess], chosen: Collection[str]) -> None:
        """End the survivors that this group does not use, before their bundles are removed and
        before a rank looks for their states. A state that two used ones have is not written; one
        that no used one has is brought to the ``chosen`` nodes."""
        unused = [one for one in self._survivors if one not in used]
        self._survivors = list(used)
        asked = []
        for one in unused:
            if one.step == NO_STATE or sum(other.step >= one.step for other in used) > 1:
                ray.kill(one.actor)
            else:
                asked.append(one)
        leave_states([one.actor for one in asked], self._settings.hold_s)
        if chosen:
            self._bring(chosen, used, asked)
        for one in asked:
            ray.kill(one.actor)

    def _require_none_stopped(self, answers: Sequence[Any]) -> None:
        """Raise WorkerGroupStartupFailedError if a process of an earlier rank is stopped. The
        others answer at once.

        Args:
            answers: references to what these processes answer.
        """
        if not answers:
            return
        _, late = ray.wait(list(answers), num_returns=len(answers), timeout=_ANSWER_S)
        stopped = find_stopped(self._processes) if late else set()
        if stopped:
            self._was_silent = True
            who = ", ".join(f"{pid} on node {node_id}" for node_id, pid in sorted(stopped))
            raise WorkerGroupStartupFailedError(f"the process of a rank is stopped: {who}")

    def _with_new_actors(
        self, resources_per_worker: dict[str, float], stayed: Mapping[int, Any]
    ) -> list[Any]:
        """Return an actor for each bundle: the one that stayed there, else a new one.

        Args:
            stayed: actors by the number of their bundle.
        """
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
            self.is_refused = True
            raise
        self._raise_for(unfit)

    def _raise_for(self, reports: tuple[RankReport, ...]) -> None:
        """Raise WorkerGroupStartupFailedError if there are reports on ranks that cannot work."""
        self.reports = reports
        if reports:
            self.is_refused = True
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


def _on(chosen: Mapping[str, int], survivors: Sequence[SurvivingProcess]) -> list[SurvivingProcess]:
    """Return the survivors for which there is room: on each node at most as many as it takes."""
    room, used = Counter(chosen), []
    for one in survivors:
        if room[one.bundle.node_id] > 0:
            room[one.bundle.node_id] -= 1
            used.append(one)
    return used
