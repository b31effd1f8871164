"""Decide the run's world size from the nodes that answer now, so that the first try fits. A group
grows only after its ranks have saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import ray

from everstep.wire import ReasonCode
from everstep.wire.events import EventKind
from storage.cluster import MarkedNode
from storage.filesystem import Storage
from train_fn.journal.client import ActorJournalClient
from train_fn.node.network import ask
from train_fn.ray_train.ray_internals import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
    cluster_state,
)
from train_fn.recovery.links import ExcludedNodes, SlowNodes
from train_fn.recovery.marks import MarksReader
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import Fit, NodeView, fit_workers, is_worth_growing

logger = logging.getLogger(__name__)

_AUTOSCALER_REFRESH_S = 20.0
_WAITING_REPEAT_S = 60.0


@dataclass(frozen=True)
class _Room:
    nodes: tuple[NodeView, ...]
    held: Mapping[str, int]
    fit: Fit


class GrowthRule:
    """Say when a group may grow again, by ``scaling.grow_every_s``, what growths have cost so far,
    and how often the run fails.

    Args:
        every_s: shortest seconds between two growths, or ``auto``.
        mtbf_s: returns the mean seconds between the run's failures.
        has_stepped: returns whether the present group is known to have made a step.
    """

    def __init__(
        self,
        every_s: float | Literal["auto"],
        mtbf_s: Callable[[], float],
        has_stepped: Callable[[], bool],
    ) -> None:
        self._every_s = every_s
        self._mtbf_s = mtbf_s
        self._has_stepped = has_stepped
        self._grew_at = float("-inf")
        self._is_open = False
        """Whether the group that grew last has not made a step yet."""
        self._pause_s = 0.0
        """The longest time without a step that a growth has cost."""

    def look(self, now: float) -> None:
        """Measure the last growth's pause once the group has made a step. Called all the time while
        a group trains: nodes may become free hours later. ``now`` is in monotonic seconds."""
        if self._is_open and self._has_stepped():
            self._is_open = False
            self._pause_s = max(self._pause_s, now - self._grew_at)

    def allows(self, num_ranks: int, num_then: int, now: float) -> bool:
        """Return whether the group may grow from ``num_ranks`` to ``num_then``."""
        self.look(now)
        if self._is_open:
            return False
        if self._every_s != "auto":
            return now - self._grew_at >= self._every_s
        return is_worth_growing(num_ranks, num_then - num_ranks, self._pause_s, self._mtbf_s())

    def grows(self, now: float) -> None:
        """Note that the ranks of a group have left for a larger one."""
        self._grew_at, self._is_open = now, True


class LiveScalingPolicy(ScalingPolicy):  # type: ignore[misc]
    """Size the worker group by the resources that are available now. Runs in the controller."""

    def __init__(
        self,
        scaling_config: Any,
        settings: RecoverySettings,
        journal: ActorJournalClient,
        read_nodes: ReadNodes,
        held: Callable[[Collection[str]], Mapping[str, int]],
        growth: GrowthRule,
        limit: Callable[[], int | None] = lambda: None,
        slow_nodes: SlowNodes | None = None,
    ) -> None:
        """Set up the policy.

        Args:
            read_nodes: returns the nodes.
            held: takes the ids of live nodes, and returns the number of this run's own bundles on
                each. These count as free.
            growth: says when the group may grow again.
            limit: returns the most ranks that the run may use now; None for as many as it asks for.
            slow_nodes: says when ranks leave a node because one of them is slow; ``read_nodes``
                calls it draining then.
        """
        super().__init__(scaling_config)
        self._settings = settings
        self._journal = journal
        self._read_nodes = read_nodes
        self._held = held
        self._growth = growth
        self._limit = limit
        self._slow_nodes = slow_nodes or SlowNodes(moves=False)
        self._not_before = 0.0
        self._waiting_since: float | None = None
        self._waiting_reported_at = float("-inf")
        self._checked_at = 0.0
        self._room_since: float | None = None
        self.wanted: int | None = None
        """World size to change to once the ranks have exited; None if no change is wanted."""
        self.draining: frozenset[str] = frozenset()
        """Nodes with ranks that must exit before the nodes are removed."""
        self._leave_by: float | None = None
        """When the first of these is removed, as Unix time in seconds; None if unknown."""

    # -- without a group

    def back_off(self, seconds: float) -> None:
        """Start no group for this many seconds."""
        self._not_before = time.monotonic() + seconds

    @property
    def waiting(self) -> bool:
        """Return whether the nodes lacked resources for the smallest group when last checked."""
        return self._waiting_since is not None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self.wanted = None
        self._room_since = None
        if time.monotonic() < self._not_before:
            return NoopDecision()
        room = self._room()
        away = self._slow_nodes.away(time.monotonic())
        if room is not None and away and room.fit.num_workers < self._most_workers():
            self._slow_nodes.forgive()
            room = self._room()
        if room is None:
            return NoopDecision()
        if room.fit.missing:
            self._report_waiting(room.fit)
            return NoopDecision()
        self._waiting_since = None
        return self._resize(room.fit.num_workers)

    def _room(self) -> _Room | None:
        """Return the current nodes and what fits on them; None if the GCS does not answer. The
        caller then tries again later."""
        try:
            nodes = self._read_nodes()
            held = self._held({node.node_id for node in nodes})
        except Exception as exc:
            logger.warning("the cluster's nodes could not be read: %s", exc)
            return None
        return _Room(nodes, held, self._fit(nodes, held))

    def _fit(self, nodes: Sequence[NodeView], held: Mapping[str, int]) -> Fit:
        """Return what fits on these nodes."""
        config = self.scaling_config
        return fit_workers(
            nodes,
            held,
            config._resources_per_worker_not_none,
            min_workers=config.min_workers,
            max_workers=self._most_workers(),
            strategy=config.placement_strategy,
        )

    def dispensable(self) -> list[str]:
        """Return the nodes without which the smallest group would still fit; none if the GCS does
        not answer."""
        room = self._room()
        if room is None:
            return []
        nodes = [node.node_id for node in room.nodes]
        return [node for node in nodes if not self._fit_without(node, room).missing]

    def _fit_without(self, node_id: str, room: _Room) -> Fit:
        return self._fit([node for node in room.nodes if node.node_id != node_id], room.held)

    def _most_workers(self) -> int:
        """Return the most ranks that the run may have now, but at least its ``min_workers``."""
        least, most, limit = (
            self.scaling_config.min_workers,
            self.scaling_config.max_workers,
            self._limit(),
        )
        return int(most if limit is None else max(least, min(most, limit)))

    def _report_waiting(self, fit: Fit) -> None:
        now = time.monotonic()
        if self._waiting_since is not None and now - self._waiting_reported_at < _WAITING_REPEAT_S:
            return
        self._waiting_since = self._waiting_since or now
        self._waiting_reported_at = now
        needs = ", ".join(f"{amount:g} {name}" for name, amount in fit.missing.items())
        least = self.scaling_config.min_workers
        message = (
            f"room for {fit.num_workers} of at least {least} workers; {needs} more must become "
            "free on live nodes"
        )
        self._journal.emit(
            EventKind.WAITING,
            {
                "code": ReasonCode.WAITING_FOR_CAPACITY.value,
                "message": message,
                "missing": fit.missing,
            },
        )

    # -- with a group

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Note in ``wanted`` that the group should change. The controller first asks its ranks to
        save and exit.

        Shrinking a running group is left to the recovery from failures, which knows the cause. The
        exceptions are draining nodes and a limit set by the service.
        """
        if worker_group_status.finished:
            return self._resize_after_yield(worker_group_state.num_workers)
        now = time.monotonic()
        if now - self._checked_at < self._settings.resize_interval_s:
            return NoopDecision()
        self._checked_at = now
        self._growth.look(now)
        room = self._room()
        if room is not None and self._leaves_slow_node(room, worker_group_state.num_workers, now):
            room = self._room()
        if room is None:
            return NoopDecision()
        self.draining = self._draining(room.nodes, worker_group_state)
        if self.draining:
            self.wanted = room.fit.num_workers
        elif worker_group_state.num_workers > self._most_workers():
            # Another run needs the resources. Shrink at once, but the ranks still save first.
            self.wanted = self._most_workers()
        elif now - worker_group_state.start_time < self._settings.growth_cooldown_s:
            return NoopDecision()
        elif room.fit.num_workers <= worker_group_state.num_workers or not self._growth.allows(
            worker_group_state.num_workers, room.fit.num_workers, now
        ):
            self._room_since = self.wanted = None
        elif self._room_since is None:
            self._room_since = now
        elif now - self._room_since >= self._settings.growth_settle_s:
            self.wanted = room.fit.num_workers
        return NoopDecision()

    def _leaves_slow_node(self, room: _Room, num_ranks: int, now: float) -> bool:
        """Report a move away from a node with a slow rank, or what became of the last one. Return
        whether ranks leave a node now."""
        progress = self._journal.progress
        if progress is None or progress.attempt != self._journal.attempt:
            return False
        known, attempt = progress.speeds, progress.attempt

        def has_room(slow_node: str) -> bool:
            return self._fit_without(slow_node, room).num_workers >= num_ranks

        judged = self._slow_nodes.judge(known, attempt, now)
        move = self._slow_nodes.leave(known, attempt, now, has_room)
        for each in filter(None, (judged, move)):
            # in the attempt of the slow rank, so that a drill there is known as its cause
            facts = {**asdict(each.slow), "stays": each.stays}
            self._journal.emit(EventKind.STRAGGLER_MOVED, facts, attempt=each.attempt)
        return move is not None

    @property
    def only_moves(self) -> bool:
        """Return whether ranks leave no other nodes than those where one of them is slow."""
        return self.draining <= self._slow_nodes.away(time.monotonic())

    def must_have_left(self, now: float) -> bool:
        """Return whether a node with ranks is removed by ``now``, as Unix time in seconds."""
        return bool(self.draining) and self._leave_by is not None and self._leave_by <= now

    def _draining(self, nodes: tuple[NodeView, ...], worker_group_state: Any) -> frozenset[str]:
        """Return the nodes with ranks of this group that are draining."""
        used = {worker.metadata.node_id for worker in worker_group_state.workers}
        leaving = [node for node in nodes if node.draining and node.node_id in used]
        self._leave_by = min(
            (node.drain_deadline for node in leaving if node.drain_deadline is not None),
            default=None,
        )
        return frozenset(node.node_id for node in leaving)

    def _resize_after_yield(self, num_ranks: int) -> ScalingDecision:
        """Resize after the ranks have exited. The size fits the current nodes, not those at the
        time of the request.

        If resources are lacking, the group still ends, so that no rank stays on a draining node.
        Its next start then finds no room, and the run waits and reports this.
        """
        self.wanted = None
        self._room_since = None
        room = self._room()
        if room is None:
            return NoopDecision()
        num_then = self.scaling_config.min_workers if room.fit.missing else room.fit.num_workers
        if num_then > num_ranks:
            self._growth.grows(time.monotonic())
        return self._resize(num_then)

    def _resize(self, num_workers: int) -> ScalingDecision:
        return ResizeDecision(
            num_workers=num_workers,
            resources_per_worker=self.scaling_config._resources_per_worker_not_none,
        )

    # -- callbacks of the controller

    def after_controller_start(self, train_run_context: Any) -> None:
        """Send the run's resource requests to the autoscaler from a thread, since the coordinator's
        process may take seconds to start."""
        if not self._settings.autoscaler_requests:
            return

        def request() -> None:
            try:
                super(LiveScalingPolicy, self).after_controller_start(train_run_context)
                while self._coordinator_client is not None:
                    time.sleep(_AUTOSCALER_REFRESH_S)
                    self._maybe_send_resource_request()
            except Exception as exc:
                logger.warning(
                    "the run's resources could not be requested from the autoscaler: %s", exc
                )

        threading.Thread(target=request, name="autoscaler-requests", daemon=True).start()

    def _get_num_workers_for_resource_request(self) -> int:
        return self._most_workers()


# ---------------------------------------------------------------- nodes

# Read the current state of the cluster's nodes, rather than the one that the GCS last recorded.

_HEAD_RESOURCE = "node:__internal_head__"

ReadNodes = Callable[[], tuple[NodeView, ...]]
"""``read_nodes`` with its arguments bound."""


def node_reader(probe_timeout_s: float, storage: Storage) -> ReadNodes:
    """Return ``read_nodes`` with its own reader of the service's node marks."""
    return partial(read_nodes, probe_timeout_s, MarksReader(storage))


def head_node_ids() -> set[str]:
    """Return the head's node id; an empty set if the GCS knows no live head. Raise Ray's error if
    the GCS does not answer."""
    return {
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and _HEAD_RESOURCE in node["Resources"]
    }


def read_nodes(probe_timeout_s: float, reader: MarksReader) -> tuple[NodeView, ...]:
    """Return every node that the GCS considers alive, with whether its raylet accepts a connection
    now, and the node's mark.

    Ray or the service can drain a node. Only the service can cordon one. Raise Ray's error if the
    GCS does not answer.
    """
    reader.ask()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    available = cluster_state.available_resources_per_node()
    draining = cluster_state.get_draining_nodes() or {}
    answers = ask([(n["NodeManagerAddress"], n["NodeManagerPort"]) for n in nodes], probe_timeout_s)
    marks = reader.marks()
    marked = {node_id: mark.state for node_id, mark in marks.items()}
    return tuple(
        NodeView(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
            is_head=_HEAD_RESOURCE in node["Resources"],
            reachable=answer is True,
            silent=answer is None,
            draining=node["NodeID"] in draining or marked.get(node["NodeID"]) == "draining",
            drain_deadline=_earliest(
                draining.get(node["NodeID"], 0) / 1000, marks.get(node["NodeID"])
            ),
            cordoned=marked.get(node["NodeID"]) == "cordoned",
        )
        for node, answer in zip(nodes, answers, strict=True)
    )


def _earliest(ray_deadline: float, mark: MarkedNode | None) -> float | None:
    """Return the earlier drain deadline of Ray (0 for none) and the service, as Unix time in
    seconds; None if there is none."""
    said = [ray_deadline, mark.deadline if mark is not None and mark.state == "draining" else None]
    return min((deadline for deadline in said if deadline), default=None)


class LiveNodes:
    """Read the nodes for one run's controller. Nodes that were excluded get no ranks for a
    while."""

    def __init__(self, settings: RecoverySettings, storage: Storage, slow_nodes: SlowNodes) -> None:
        self._settings = settings
        self._slow_nodes = slow_nodes
        self._read = node_reader(settings.probe_timeout_s, storage)
        self._excluded = ExcludedNodes(settings.apart_s)
        self._last_read: tuple[float, tuple[NodeView, ...]] = (float("-inf"), ())

    def read(self) -> tuple[NodeView, ...]:
        """Return the nodes as they are now. Raise Ray's error if the GCS does not answer."""
        now = time.monotonic()
        nodes = self._slow_nodes.mark(self._excluded.mark(self._read(), now), now)
        self._last_read = now, nodes
        return nodes

    def recent(self) -> tuple[NodeView, ...]:
        """Return the nodes as last read, if that is recent: while ranks train, the scaling policy
        reads them every second."""
        read_at, nodes = self._last_read
        is_recent = time.monotonic() - read_at < 2 * self._settings.resize_interval_s
        return nodes if is_recent else self.read()

    def exclude(self, node_ids: Collection[str]) -> None:
        """Exclude nodes for a while that others do not reach, or that are not fit."""
        self._excluded.exclude(node_ids, time.monotonic())
