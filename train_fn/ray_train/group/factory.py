"""Create the worker group of each attempt: in the processes of earlier ranks if there are any, else
in fresh ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.group.end import SurvivingProcess, Survivors
from train_fn.ray_train.group.left_states import LeftStates, may_lie_elsewhere
from train_fn.ray_train.group.node_checks import LinkChecks, PreflightChecks
from train_fn.ray_train.group.placement import Placement
from train_fn.ray_train.group.rank_actors import RankActors
from train_fn.ray_train.group.worker_group import EverstepWorkerGroup
from train_fn.ray_train.ray_internals import WorkerGroupStartupTimeoutError
from train_fn.ray_train.scaling import LiveNodes
from train_fn.recovery.launch import Engine, RankLaunch


class StayedStarts:
    """Learn how long groups with processes of earlier ranks take to start."""

    FIRST_S = 30.0
    """Limit in seconds while nothing is known."""
    LEAST_S = 10.0
    """Lowest limit in seconds."""
    FACTOR = 5.0
    """Limit as a multiple of the longest recent start."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=10)

    def note(self, seconds: float) -> None:
        """Note the duration of a start that went well."""
        self._recent.append(seconds)

    @property
    def limit_s(self) -> float:
        """Return the longest start in seconds before fresh processes take over."""
        if not self._recent:
            return self.FIRST_S
        return max(self.LEAST_S, self.FACTOR * max(self._recent))


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
        spec, settings = engine.job.spec, engine.settings
        self.in_process = (
            spec.recovery.in_process and settings.in_process and not spec.runs_own_function
        )
        """Whether the processes of survivors may serve the next attempt."""
        self.survivors = Survivors(settings.hold_s)
        self._starts = StayedStarts()
        self.last: EverstepWorkerGroup | None = None
        """The newest group, even if its start failed."""

    def create(self, **kwargs: Any) -> EverstepWorkerGroup:
        """Create and start the next attempt's group.

        If it cannot start in the processes of earlier ranks, these are ended, and fresh ones take
        over. That counts as no failure, unless a node is gone or was found unfit.
        """
        survivors = self.survivors.take()
        if survivors:
            began = time.monotonic()
            try:
                group = self._start(survivors, **kwargs)
                self._starts.note(time.monotonic() - began)
                return group
            except Exception as exc:
                if not self._falls_back(exc):
                    raise
                self._attempt_log.fell_back(f"ranks could not start there: {exc}")
        return self._start([], **kwargs)

    def _falls_back(self, exc: Exception) -> bool:
        """Return whether fresh processes may do better than the group whose start failed."""
        group = self.last
        if group is None or isinstance(exc, WorkerGroupStartupTimeoutError):
            return False
        return not group.is_refused and all(report.node_alive for report in group.start_reports)

    def _start(self, survivors: Sequence[SurvivingProcess], **kwargs: Any) -> EverstepWorkerGroup:
        self._on_new()
        launch = self._launch(self._attempt_log.next_attempt())
        self.last = self._new_group(launch, survivors, **kwargs)
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
            meets_to_report=self._engine.job.spec.runs_own_function,
            in_process=self.in_process,
        )

    def _new_group(
        self, launch: RankLaunch, survivors: Sequence[SurvivingProcess], **kwargs: Any
    ) -> EverstepWorkerGroup:
        settings = self._engine.settings
        actors = RankActors(
            launch,
            settings,
            self._placement,
            self._nodes.read,
            self._nodes.exclude,
            self._preflight,
            self.links,
            self._bring,
            survivors,
            self._starts.limit_s,
        )
        return EverstepWorkerGroup(
            actors,
            self.survivors,
            settings,
            self._nodes.read,
            stayed_start_s=self._starts.limit_s,
            meets_to_report=launch.meets_to_report,
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
