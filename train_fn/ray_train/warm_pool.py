"""Keep idle worker processes with torch and the loop already imported, for ranks that a node may
have to take over.

A fresh rank takes 4 to 5 s to start its process and import modules. A rank in an idle process
takes 0.06 s. Ray reuses an idle process only for actors of the same job without a runtime_env. It
preloads modules only if the raylets' environment asks for it (``RAY_preload_python_modules``).
Without that the pool still saves the process start.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping

import grpc  # type: ignore[import-untyped]
import ray

from train_fn.ray_train.nodes import ReadNodes
from train_fn.ray_train.ray_internals import (
    common_pb2,
    init_grpc_channel,
    node_manager_pb2,
    node_manager_pb2_grpc,
)
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView, fit_workers

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
            if not node.usable or not self._has_room_for_a_rank(node):
                continue
            with self._lock:
                lacking = (
                    self._settings.warm_spares * max(1, self._ranks[node.node_id])
                    - self._idle[node.node_id]
                )
            if lacking > 0 and prestart(node, lacking):
                with self._lock:
                    self._idle[node.node_id] += lacking

    def _has_room_for_a_rank(self, node: NodeView) -> bool:
        return all(node.total.get(name, 0.0) >= amount for name, amount in self._per_worker.items())


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
