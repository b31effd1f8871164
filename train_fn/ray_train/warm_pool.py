"""Idle worker processes with torch and the loop already imported, one for each rank that a node may have to take over.

A fresh rank costs 4 to 5 s of process start and imports; one that an idle process becomes costs 0.06 s. Ray reuses an idle
process only for actors of the same job without a runtime_env, and preloads modules only where the raylets' environment says
so (``RAY_preload_python_modules``); elsewhere the pool still saves the process start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import grpc  # type: ignore[import-untyped]
import ray

from train_fn.ray_train.nodes import look_at_nodes
from train_fn.ray_train.seam import common_pb2, init_grpc_channel, node_manager_pb2, node_manager_pb2_grpc
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_CALL_S = 5.0
_KEEP_ALIVE_S = 24 * 3600


class WarmPool:
    """Refills each node's pool a moment after ranks were taken from it, from a background thread of the controller."""

    def __init__(self, settings: RecoverySettings, ranks_by_node: Callable[[], dict[str, frozenset[int]]]) -> None:
        """``ranks_by_node`` tells the process ids of the running group's ranks on each node; empty while there is none."""
        self._settings = settings
        self._ranks_by_node = ranks_by_node
        self._taken: dict[str, frozenset[int]] = {}
        self._warmed: set[str] = set()
        self._stopping = threading.Event()
        self._job_id = bytes.fromhex(ray.get_runtime_context().get_job_id())
        self._thread = threading.Thread(target=self._run, name="warm-pool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def is_warm(self, node_id: str) -> bool:
        """Whether this node was asked for an idle process; it may take seconds more to import."""
        return node_id in self._warmed

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            try:
                self.tick()
            except Exception as exc:  # a pool that is not filled costs seconds at the next failure, never the run
                logger.warning("the warm pool could not be refilled: %s", exc)

    def tick(self) -> None:
        """Ask every node for one idle process whose ranks are new since the last look, and every node seen for the first time."""
        ranks = self._ranks_by_node()
        if not ranks:
            return
        needy = {node_id for node_id, pids in ranks.items() if pids - self._taken.get(node_id, frozenset())}
        nodes = [node for node in look_at_nodes(self._settings.probe_timeout_s) if node.usable]
        cold = [node for node in nodes if node.node_id in needy or node.node_id not in self._warmed]
        self._taken = ranks
        if not cold or self._stopping.wait(self._settings.warm_delay_s):
            return
        for node in cold:
            try:
                self._prestart(node, max(1, len(ranks.get(node.node_id, ()))))
                self._warmed.add(node.node_id)
            except grpc.RpcError as exc:
                logger.warning("node %s did not take the request for a warm process: %s", node.node_id, exc)

    def _prestart(self, node: NodeView, num_workers: int) -> None:
        request = node_manager_pb2.PrestartWorkersRequest(
            language=common_pb2.Language.PYTHON,
            job_id=self._job_id,
            num_workers=num_workers,
            keep_alive_duration_secs=_KEEP_ALIVE_S,
        )
        request.runtime_env_info.serialized_runtime_env = "{}"
        channel = init_grpc_channel(f"{node.ip}:{node.port}")
        try:
            node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_CALL_S)
        finally:
            channel.close()
