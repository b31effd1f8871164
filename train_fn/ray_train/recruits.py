"""Processes for ranks that join a group: they start, check their nodes and build their parts while
the present group trains."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from train_fn.ray_train.nodes import ReadNodes
from train_fn.ray_train.placement import Bundle, Placement
from train_fn.ray_train.rank_actors import new_actors
from train_fn.ray_train.survivors import NO_STATE, Survivor, Survivors
from train_fn.recovery.launch import Engine, RankLaunch
from train_fn.recovery.sizing import choose_nodes

READY_S = 60.0
"""Longest time in seconds for the processes to get ready. The others then go on without them, and
new ones are made as after a failure."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recruit:
    actor: Any
    bundle: Bundle
    pid: Any
    """Reference to the process id, which it tells once it is ready."""


class Recruits:
    """The recruits for the group that follows the present one.

    Args:
        engine: what the ranks train.
        placement: the run's bundles.
        read_nodes: returns the current nodes of the cluster.
        survivors: takes the processes that are ready.
    """

    def __init__(
        self, engine: Engine, placement: Placement, read_nodes: ReadNodes, survivors: Survivors
    ) -> None:
        self._engine = engine
        self._placement = placement
        self._read_nodes = read_nodes
        self._survivors = survivors
        self._began: float | None = None
        """When they were called, in monotonic seconds; None if they were not."""
        self._coming: list[_Recruit] = []

    def are_ready(self, num_workers: int, scaling: Any, attempt: int) -> bool:
        """Return whether all processes that a group of this size lacks are ready, or do not come in
        time. The first call begins to make them.

        Args:
            num_workers: ranks of the next group.
            scaling: Ray's ScalingConfig.
            attempt: of the present group.
        """
        if self._began is None:
            self._began = time.monotonic()
            self._call(num_workers, scaling, attempt)
        refs = [one.pid for one in self._coming]
        if refs and time.monotonic() - self._began < READY_S:
            _, late = ray.wait(refs, num_returns=len(refs), timeout=0)
            if late:
                return False
        self._take()
        return True

    def end(self) -> None:
        """End those that are not ready, since a group starts, or none follows. Their bundles stay
        with the run."""
        for one in self._coming:
            ray.kill(one.actor)
        self._coming, self._began = [], None

    def _call(self, num_workers: int, scaling: Any, attempt: int) -> None:
        per_worker = scaling._resources_per_worker_not_none
        try:
            nodes = self._read_nodes()
            held = self._placement.held({node.node_id for node in nodes})
        except Exception as exc:
            logger.warning("the cluster's nodes could not be read: %s", exc)
            return
        strategy = scaling.placement_strategy
        chosen = choose_nodes(nodes, held, per_worker, num_workers=num_workers, strategy=strategy)
        bundles = self._placement.add(chosen or {}, per_worker)
        launch = RankLaunch(
            attempt,
            time.time(),
            dict(self._engine.rank_env),
            silent_peer_s=self._engine.settings.silent_peer_s,
            in_process=True,
        )
        job, checks = self._engine.job, self._engine.settings.preflight
        self._coming = [
            _Recruit(actor, bundle, actor.get_ready.remote(launch, job, checks_node=checks))
            for actor, bundle in zip(new_actors(bundles, per_worker), bundles, strict=True)
        ]

    def _take(self) -> None:
        """Hand over those that are ready, and end the others: those that are late, and those that
        could not build."""
        ready, coming = [], self._coming
        self._coming = []
        for one in coming:
            try:
                pid = ray.get(one.pid, timeout=0)
                ready.append(Survivor(one.actor, one.bundle, pid, NO_STATE))
            except RayError as exc:
                cause = getattr(exc, "cause", None) or exc
                logger.warning("a process for a rank that joins is not used: %s", cause)
                ray.kill(one.actor)
        self._survivors.hold(ready)
