"""Processes in reserve: idle ones with torch and the loop imported, and those of ranks that are
about to join a group.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
import ray
from ray.exceptions import RayError

from train_fn.errors import CannotBuild
from train_fn.ray_train.group.end import NO_STATE, SurvivingProcess, Survivors
from train_fn.ray_train.group.node_checks import end_stopped
from train_fn.ray_train.group.placement import Bundle, Placement
from train_fn.ray_train.group.rank_actors import new_actors
from train_fn.ray_train.ray_internals import (
    common_pb2,
    init_grpc_channel,
    node_manager_pb2,
    node_manager_pb2_grpc,
)
from train_fn.ray_train.scaling import LiveNodes, ReadNodes
from train_fn.recovery.launch import Engine, RankLaunch
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView, choose_nodes, fit_workers

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_CALL_S = 5.0
_KEEP_ALIVE_S = 24 * 3600


class WarmPool:
    """Keep ``warm_spares`` idle processes for each rank of a node, from a background thread of the
    controller.

    Ray does not report how many idle processes a node has. So they are counted: those requested,
    minus those that became ranks.
    """

    def __init__(
        self, settings: RecoverySettings, read_nodes: ReadNodes, per_worker: Mapping[str, float]
    ) -> None:
        self._settings = settings
        self._read_nodes = read_nodes
        self._per_worker = per_worker
        self._lock = threading.Lock()
        self._idle: Counter[str] = Counter()
        self._ranks: Counter[str] = Counter()
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warm-pool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def note_ranks(self, ranks: Mapping[str, tuple[int, int]]) -> None:
        """Note a started group. ``ranks`` gives, for each node id, the number of ranks and how many
        of them reused idle processes."""
        with self._lock:
            self._ranks = Counter({node_id: num_ranks for node_id, (num_ranks, _) in ranks.items()})
            for node_id, (_, num_taken) in ranks.items():
                self._idle[node_id] = max(0, self._idle[node_id] - num_taken)
        self._changed.set()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            if self._changed.is_set():
                self._changed.clear()
                if self._stopping.wait(self._settings.warm_delay_s):
                    return
            try:
                self.tick()
            except Exception as exc:
                # An empty pool costs only seconds at the next failure, so do not raise.
                logger.warning("the warm pool could not be refilled: %s", exc)

    def tick(self) -> None:
        """Request the missing idle processes from each usable node, even from nodes without ranks,
        since the run may have to move there."""
        with self._lock:
            if not self._ranks:
                return
        for node in self._read_nodes():
            has_room = all(
                node.total.get(key, 0.0) >= each for key, each in self._per_worker.items()
            )
            if not node.usable or not has_room:
                continue
            with self._lock:
                lacking = (
                    self._settings.warm_spares * max(1, self._ranks[node.node_id])
                    - self._idle[node.node_id]
                )
            if lacking > 0 and prestart(node, lacking):
                with self._lock:
                    self._idle[node.node_id] += lacking


def warm_first_group(
    read_nodes: ReadNodes, per_worker: Mapping[str, float], max_workers: int
) -> None:
    """Start the processes of the first ranks and their imports while the controller itself still
    starts."""
    nodes = [node for node in read_nodes() if node.usable]
    rooms = {
        node.node_id: fit_workers(
            [node], {}, per_worker, min_workers=0, max_workers=max_workers, strategy="PACK"
        ).num_workers
        for node in nodes
    }
    with_room = [node for node in nodes if rooms[node.node_id]]
    for node in with_room:
        prestart(node, min(rooms[node.node_id], math.ceil(max_workers / len(with_room))))


def prestart(node: NodeView, num_workers: int) -> bool:
    """Request idle processes of this job from a node's raylet. They are ready seconds later. Return
    False if it did not accept the request."""
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.Language.PYTHON,
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
        num_workers=num_workers,
        keep_alive_duration_secs=_KEEP_ALIVE_S,
    )
    request.runtime_env_info.serialized_runtime_env = "{}"
    channel = init_grpc_channel(f"{node.ip}:{node.port}")
    try:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(
            request, timeout=_CALL_S
        )
        return True
    except grpc.RpcError as exc:
        logger.warning(
            "node %s refused to start %d warm processes: %s",
            node.node_id,
            num_workers,
            exc,
        )
        return False
    finally:
        channel.close()


# ---------------------------------------------------------------- recruits

# Processes for ranks that join a group: they start, check their nodes and build their parts while
# the present group trains.

READY_S = 60.0
"""Longest time in seconds for the processes to get ready. The others then go on without them, and
new ones are made as after a failure."""


@dataclass(frozen=True)
class _Recruit:
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


class Recruits:
    """The recruits for the group that follows the present one.

    Args:
        engine: what the ranks train.
        placement: the run's bundles.
        nodes: of the cluster. One on which a process could not get ready is excluded for a while.
        survivors: takes the processes that are ready.
    """

    def __init__(
        self, engine: Engine, placement: Placement, nodes: LiveNodes, survivors: Survivors
    ) -> None:
        self._engine = engine
        self._placement = placement
        self._nodes = nodes
        self._survivors = survivors
        self._began: float | None = None
        """When the first were called, in monotonic seconds; None if they were not."""
        self._called_for = 0
        """The size of the group for which they were called."""
        self._coming: list[_Recruit] = []
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
            in_process=True,
        )
        job, checks = self._engine.job, self._engine.settings.preflight
        self._coming += [
            _Recruit(
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
                ready.append(SurvivingProcess(one.actor, one.bundle, pid, NO_STATE))
            except RayError as exc:
                cause = getattr(exc, "cause", None) or exc
                logger.warning("a process for a rank that joins is not used: %s", cause)
                one.end()
                if isinstance(cause, CannotBuild):
                    logger.warning("node %s gets no rank for a while", one.bundle.node_id)
                    self._nodes.exclude([one.bundle.node_id])
                    self._placement.remove([one.bundle])
                    self._began, self._called_for, self._has_failed = None, 0, True
        self._survivors.hold(ready)
        return self._called_for > 0
