"""How a group makes room for one of another size. Hosts for ranks that join it start, check their
nodes and have the task built there while the present group trains; then its ranks are asked to
leave.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from train_fn.errors import CannotBuild
from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.group.end import Host, Hosts
from train_fn.ray_train.group.node_checks import end_stopped
from train_fn.ray_train.group.placement import Bundle, Placement
from train_fn.ray_train.group.rank_actors import new_actors
from train_fn.ray_train.group.worker_group import EverstepWorkerGroup
from train_fn.ray_train.scaling import LiveNodes, LiveScalingPolicy
from train_fn.recovery.launch import Engine, RankLaunch
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import choose_nodes

logger = logging.getLogger(__name__)

READY_S = 600.0
"""Longest time in seconds for the hosts to get ready. The others then go on without them, and new
ones are made as after a failure."""


@dataclass(frozen=True)
class _Newcomer:
    actor: Any
    bundle: Bundle
    place: Any
    """Reference to where the process runs, which it tells before it gets ready."""
    pid: Any
    """Reference to the process id, which it tells once it is ready."""

    def end(self) -> None:
        """End the process. Ray first asks a process to end, and a stopped one does not hear it."""
        ray.kill(self.actor)
        threading.Thread(target=self._end_stopped, name="end-stopped", daemon=True).start()

    def _end_stopped(self) -> None:
        with contextlib.suppress(RayError):
            place = ray.get(self.place, timeout=0)
            end_stopped([(place.node_id, place.pid)])


class Newcomers:
    """The newcomers to the group that follows the present one.

    Args:
        engine: what the ranks train.
        placement: the run's bundles.
        nodes: of the cluster. One on which a process could not get ready is excluded for a while.
        hosts: takes those that are ready.
    """

    def __init__(
        self, engine: Engine, placement: Placement, nodes: LiveNodes, hosts: Hosts
    ) -> None:
        self._engine = engine
        self._placement = placement
        self._nodes = nodes
        self._hosts = hosts
        self._began: float | None = None
        """When the first were called, in monotonic seconds; None if they were not."""
        self._called_for = 0
        """The size of the group for which they were called."""
        self._coming: list[_Newcomer] = []
        self._has_failed = False
        """Whether one could not get ready."""

    def are_ready(self, num_workers: int, scaling: Any, attempt: int) -> bool:
        """Return whether all processes that a group of this size lacks are ready, or do not come in
        time. The first call for a size begins to make them. One that cannot get ready is no reason
        to leave: on its node the group would fail.

        Args:
            num_workers: ranks of the next group.
            scaling: Ray's ScalingConfig.
            attempt: of the present group.
        """
        if self._began is None:
            self._began = time.monotonic()
        if num_workers > self._called_for:
            has_room = self._call(num_workers, scaling, attempt)
            if self._has_failed and not has_room:  # there is no other node
                return False
            self._called_for = num_workers
        refs = [one.pid for one in self._coming]
        if refs and time.monotonic() - self._began < READY_S:
            _, late = ray.wait(refs, num_returns=len(refs), timeout=0)
            if late:
                return False
        return self._take()

    def end(self) -> None:
        """End those that are not ready, since a group starts, or none follows. Their bundles stay
        with the run."""
        for one in self._coming:
            one.end()
        self._coming, self._began, self._called_for, self._has_failed = [], None, 0, False

    def dismiss(self) -> None:
        """End those that are not ready, and give up their bundles, since no larger group follows.
        Another run may wait for them."""
        bundles = [one.bundle for one in self._coming]
        self.end()
        self._placement.remove(bundles)

    def _call(self, num_workers: int, scaling: Any, attempt: int) -> bool:
        """Begin to make the processes. Return whether the nodes have room for the group."""
        per_worker = scaling._resources_per_worker_not_none
        try:
            nodes = self._nodes.read()
            held = self._placement.held({node.node_id for node in nodes})
        except Exception as exc:
            logger.warning("the cluster's nodes could not be read: %s", exc)
            return False
        strategy = scaling.placement_strategy
        chosen = choose_nodes(nodes, held, per_worker, num_workers=num_workers, strategy=strategy)
        bundles = self._placement.add(chosen or {}, per_worker)
        launch = RankLaunch(
            attempt,
            time.time(),
            dict(self._engine.rank_env),
            silent_peer_s=self._engine.settings.silent_peer_s,
        )
        job, checks = self._engine.job, self._engine.settings.preflight
        self._coming += [
            _Newcomer(
                *(actor, bundle, actor.get_metadata.remote()),
                actor.get_ready.remote(launch, job, checks_node=checks),
            )
            for actor, bundle in zip(new_actors(bundles, per_worker), bundles, strict=True)
        ]
        return chosen is not None

    def _take(self) -> bool:
        """Hand over those that are ready, and end the others: those that are late, and those that
        could not build. Return whether the group may begin: no node has to be replaced."""
        ready, coming = [], self._coming
        self._coming = []
        for one in coming:
            try:
                pid = ray.get(one.pid, timeout=0)
                ready.append(Host(one.actor, one.bundle, pid))
            except RayError as exc:
                cause = getattr(exc, "cause", None) or exc
                logger.warning("a process for a rank that joins is not used: %s", cause)
                one.end()
                if isinstance(cause, CannotBuild):
                    logger.warning("node %s gets no rank for a while", one.bundle.node_id)
                    self._nodes.exclude([one.bundle.node_id])
                    self._placement.remove([one.bundle])
                    self._began, self._called_for, self._has_failed = None, 0, True
        self._hosts.hold(ready)
        return self._called_for > 0


# ---------------------------------------------------------------- yield request

# Ask the ranks of a running group to exit, so that a group of another size or a newer submission
# can follow.

_DRAIN_MARGIN_S = 8.0
"""Seconds before a draining node is removed at which ranks that hold up the others are killed, so
that the others can still exit."""


class YieldRequest:
    """The request to one group at a time. It is made once, and given up after ``yield_timeout_s``.

    Args:
        settings: the timeout.
        sizes: says whether another size is wanted, and which nodes drain.
        attempt_log: has the size of the group.
        is_leaving: returns whether the run goes on in another submission.
        newcomers: for ranks that join the next group; None if its processes are all new.
    """

    def __init__(
        self,
        settings: RecoverySettings,
        sizes: LiveScalingPolicy,
        attempt_log: AttemptLog,
        is_leaving: Callable[[], bool],
        newcomers: Newcomers | None = None,
    ) -> None:
        self._settings = settings
        self._sizes = sizes
        self._attempt_log = attempt_log
        self._is_leaving = is_leaving
        self._newcomers = newcomers
        self._since: float | None = None
        """When the pending request was made, in monotonic seconds; None without one."""
        self._overdue_killed = False
        self._hands_over = False
        """Whether its ranks were asked last to leave their states on their nodes."""
        self.asked = False
        """Whether the current group was ever asked. It may still exit after the request was given
        up."""
        self.asked_at = 0.0
        """When it was asked, in Unix seconds."""

    def reset(self) -> None:
        """Begin anew with the next group."""
        self._since = None
        self.asked = self._overdue_killed = self._hands_over = False
        if self._newcomers is not None:
            self._newcomers.end()

    def check(self, group: EverstepWorkerGroup) -> None:
        """Ask the ranks to exit once another size is wanted or the driver is gone. Call this with
        every turn of the control loop."""
        if self._sizes.wanted is None and not self._is_leaving():
            if self._since is None and self._newcomers is not None:
                self._newcomers.dismiss()
            return
        now = time.monotonic()
        if self._since is None:
            if self._is_next_ready(group):
                self._ask(group, now)
        elif not self._overdue_killed and self._sizes.must_have_left(time.time() + _DRAIN_MARGIN_S):
            self._overdue_killed = True
            ranks = group.abandon(self._sizes.draining)
            logger.warning(
                "a node is about to be removed, and ranks have not exited; killed rank %s", ranks
            )
        elif self._hands_over and not group.ranks_outside(self._sizes.draining):
            logger.info("the nodes of all ranks are drained: asking them to save and exit instead")
            self._hands_over = False
            group.ask_to_yield(hands_over=False)
        elif now - self._since > self._settings.yield_timeout_s and not self._is_leaving():
            logger.warning(
                "ranks did not exit within %g s; keeping the group as it is",
                self._settings.yield_timeout_s,
            )
            self._sizes.wanted = None
            self._since = None

    def _is_next_ready(self, group: EverstepWorkerGroup) -> bool:
        """Return whether nothing but the ranks' exit is left to wait for."""
        wanted, sizes, newcomers = self._sizes.wanted, self._sizes, self._newcomers
        if newcomers is None or wanted is None or self._is_leaving():
            return True
        if wanted <= len(group.ranks_outside(sizes.draining)):
            newcomers.dismiss()  # nobody joins it, and another run may wait for the place
            return True
        return sizes.must_have_left(time.time() + 2 * _DRAIN_MARGIN_S) or newcomers.are_ready(
            wanted, sizes.scaling_config, self._attempt_log.attempt
        )

    def _ask(self, group: EverstepWorkerGroup, now: float) -> None:
        followers = (
            "the next submission" if self._is_leaving() else f"a group of {self._sizes.wanted}"
        )
        self._hands_over = hands_over = (
            self._newcomers is not None
            and not self._is_leaving()
            and bool(group.ranks_outside(self._sizes.draining))
        )
        logger.info(
            "asking %d ranks to %s for %s",
            self._attempt_log.world_size,
            "hand over" if hands_over else "save and exit",
            followers,
        )
        self._since = now
        self.asked_at = time.time()
        self.asked = True
        group.ask_to_yield(hands_over=hands_over)
