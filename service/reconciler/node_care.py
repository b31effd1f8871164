"""The care of nodes: update the file of marks, forget nodes that are gone, cordon nodes that fail
too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from service.cluster.ray_answers import RayNode
from service.cluster.ray_errors import RayError
from service.cluster.ray_jobs import RayJobs
from service.control_files.node_marks import MarksFile
from service.db.node_marks import NodeMarkStore
from service.model.rows import NodeMarkRow
from service.reconciler.unhealthy import CordonRule, Suspect, choose_to_cordon, find_suspects
from storage.errors import StorageError

INTERVAL_S: Final = 5.0
BY_ITSELF: Final = "everstep"
"""Author of the mark of a node that failed too often."""

log = structlog.get_logger(__name__)


class NodeCare:
    """Works beside the reconciler's ticks, so that a hanging Ray or storage does not delay them.

    Args:
        marks: Marks of nodes.
        file: File of marks for drivers.
        ray: The cluster.
        rule: When a node is cordoned automatically.
        clock: Unix seconds.
    """

    def __init__(
        self,
        marks: NodeMarkStore,
        file: MarksFile,
        ray: RayJobs,
        rule: CordonRule,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._marks = marks
        self._file = file
        self._ray = ray
        self._rule = rule
        self._clock = clock
        self._check: asyncio.Task[None] | None = None
        self._checked_at = float("-inf")
        self._spared: frozenset[str] = frozenset()

    def tick(self) -> None:
        """Start a check if one is due. Raises the error of the previous one, such as
        DatabaseError."""
        if self._check is not None:
            if not self._check.done():
                return
            check, self._check = self._check, None
            check.result()
        if time.monotonic() - self._checked_at >= INTERVAL_S:
            self._checked_at = time.monotonic()
            self._check = asyncio.create_task(self.check(), name="node-care")

    async def close(self) -> None:
        """Cancel a running check. Any part of it may be repeated."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)
            self._check = None

    async def check(self) -> None:
        """Check all nodes once. Raises DatabaseError."""
        rows = await asyncio.to_thread(self._marks.all)
        suspects = await self._suspects(rows)
        if rows or suspects:
            await self._care(rows, suspects)
        try:
            if await asyncio.to_thread(self._file.publish):
                log.info("updated the file of marked nodes for drivers")
        except StorageError as exc:
            log.warning(
                "the file of marked nodes could not be written; trying again", problem=str(exc)
            )

    async def _suspects(self, rows: Mapping[str, NodeMarkRow]) -> tuple[Suspect, ...]:
        if not self._rule.is_on:
            return ()
        now = self._clock()
        failures = await asyncio.to_thread(self._marks.failures_since, now - self._rule.window_s)
        pardoned = {node_id: row.at for node_id, row in rows.items() if row.state == "open"}
        return find_suspects(failures, self._rule, now, pardoned)

    async def _care(self, rows: Mapping[str, NodeMarkRow], suspects: tuple[Suspect, ...]) -> None:
        try:
            nodes = await self._ray.live_nodes()
        except RayError as exc:
            log.debug("the nodes could not be looked after", problem=str(exc))
            return
        living = {node.node_id for node in nodes}
        for node_id in await asyncio.to_thread(
            self._marks.note_living, living, self._rule.window_s
        ):
            log.info("forgot the mark of a node that is gone", node_id=node_id)
        marked = {node_id for node_id, row in rows.items() if row.mark is not None}
        chosen, spared = choose_to_cordon(
            suspects, {node.node_id for node in nodes if _runs_ranks(node)}, marked
        )
        for suspect in chosen:
            known = rows.get(suspect.node_id)
            known_at = known.at if known else None
            if await asyncio.to_thread(
                self._marks.cordon_if_unchanged,
                suspect.node_id,
                known_at,
                BY_ITSELF,
                suspect.reason,
            ):
                log.warning(
                    "cordoned a node that fails too often",
                    node_id=suspect.node_id,
                    reason=suspect.reason,
                )
        for suspect in spared:
            if suspect.node_id not in self._spared:
                log.warning(
                    "a node fails too often and is not cordoned; cordon it yourself if it is at "
                    "fault",
                    because=suspect.doubt
                    or "less than half of the cluster would stay open without it",
                    node_id=suspect.node_id,
                    reason=suspect.reason,
                )
        self._spared = frozenset(suspect.node_id for suspect in spared)


def _runs_ranks(node: RayNode) -> bool:
    """Return whether a node can run ranks. Half of the cluster is half of these nodes."""
    return node.resources.get("CPU", 0.0) > 0 or node.resources.get("GPU", 0.0) > 0
