"""Faults on purpose: orders, and what carries them out on a node.

The driver imports it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from everstep.wire.drills import IN_RANK, DrillKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_control import DrillOrder
from storage.run_dir import RunDir
from train_fn.journal.client import ActorJournalClient
from train_fn.node.node_dir import snapshots_dir
from train_fn.recovery.history import History, RankPlace, read_history

# ---------------------------------------------------------------- node faults

# Inject faults on this node for drills. Only processes of the node's raylet are touched.


def find_raylet(node_id: str) -> psutil.Process | None:
    """Return the raylet of a node, found by its command line: a machine may run several."""
    for process in psutil.process_iter(["cmdline"]):
        cmdline = process.info["cmdline"] or []
        if cmdline and Path(cmdline[0]).name == "raylet" and f"--node_id={node_id}" in cmdline:
            return process
    return None


def signal_ranks(node_id: str, pids: Collection[int], signal_number: int) -> str | None:
    """Send a signal to ranks of this node, if all of them are there. Return why it was not sent, or
    None."""
    raylet = find_raylet(node_id)
    if raylet is None:
        return f"no raylet of node {node_id} runs here"
    try:
        workers = _workers(raylet)
        ranks = [psutil.Process(pid) for pid in pids]
        for rank in ranks:
            if rank.pid not in workers:
                return (
                    f"process {rank.pid} on node {node_id} is not one of its workers; the rank "
                    "has gone"
                )
        for rank in ranks:
            rank.send_signal(signal_number)
    except psutil.Error as exc:
        return f"a rank on node {node_id} cannot be reached: {exc}"
    return None


def _workers(raylet: psutil.Process) -> set[int]:
    """Return the pids of a raylet's descendants, and of what one of them represents and holds a
    pidfd of: forked workers, and the ranks of these."""
    found: set[int] = set()
    new = {child.pid for child in raylet.children(recursive=True)}
    while new:
        found |= new
        new = _held(new) - found - {raylet.pid}
    return found


def _held(pids: Collection[int]) -> set[int]:
    """Return the pids of the processes that these ones hold a pidfd of."""
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
                with contextlib.suppress(OSError):
                    held |= {
                        int(line.split()[1])
                        for line in entry.read_text().splitlines()
                        if line.startswith("Pid:")
                    }
    return held


def kill_ranks(run_id: str, node_id: str, pids: Collection[int]) -> str | None:
    """Kill ranks that were stopped before, and remove the run's snapshots from this machine. Return
    why that failed, or None."""
    shutil.rmtree(snapshots_dir(run_id), ignore_errors=True)
    return signal_ranks(node_id, pids, signal.SIGKILL.value)


def kill_raylet(node_id: str) -> str | None:
    """Kill a node's raylet, with which its workers end, this one too. Return why that failed, or
    None."""
    raylet = find_raylet(node_id)
    if raylet is None:
        return f"no raylet of node {node_id} runs here"
    try:
        raylet.kill()
    except psutil.Error as exc:
        return f"the raylet of node {node_id} cannot be killed: {exc}"
    return None


# ---------------------------------------------------------------- orders

# Drills in the driver: choose what an operator's order hits, or refuse it.
#
# Each order is carried out once. Its event is durable before anything is broken.

DRAIN_DEADLINE_S = 30.0
"""Seconds that the ranks of a drained node have to save and exit."""
FLUSH_S = 10.0
"""Longest wait for the event of a fault to become durable."""

logger = logging.getLogger(__name__)


class DrillRefused(Exception):
    """An order is not carried out. The message says why, and what to do."""


class Faults(Protocol):
    """The faults that a drill injects into a cluster. Every method raises DrillRefused if it
    fails."""

    def head_node_ids(self) -> Collection[str]:
        """Return the ids of the cluster's head, which no drill hits."""

    def signal(self, ranks: Sequence[RankPlace], signal_number: int) -> None:
        """Send a signal to ranks on all their nodes at once."""

    def kill_without_trace(self, ranks: Sequence[RankPlace], run_id: str) -> None:
        """Kill all ranks of a run, and remove its snapshots."""

    def kill_node(self, node_id: str) -> None:
        """Kill the node's raylet."""

    def drain_node(self, node_id: str, deadline_s: float) -> None:
        """Announce that the node will be taken away."""

    def kill_driver(self) -> None:
        """Kill this process."""


@dataclass(frozen=True)
class DrillPlan:
    """What an order hits."""

    target: RankPlace | None
    """The one rank that is hit, or whose node is; None for the driver and for all ranks."""
    ranks: tuple[RankPlace, ...]
    """All ranks of the attempt."""


def plan(order: DrillOrder, history: History, head_node_ids: Collection[str]) -> DrillPlan:
    """Return what ``order`` hits, from the run's journals.

    Raises DrillRefused if the order's ranks are gone, or the node is the cluster's head.
    """
    if not history.attempt_open or history.last_attempt != order.attempt:
        raise DrillRefused(
            f"attempt {order.attempt}, for whose ranks the drill was ordered, has ended; order it "
            "again once the run trains"
        )
    if order.kind in (DrillKind.KILL_DRIVER, DrillKind.CORRUPT_CHECKPOINT):
        return DrillPlan(None, history.workers)
    target = next((place for place in history.workers if place.rank == order.rank), None)
    if target is None:
        raise DrillRefused(
            f"attempt {order.attempt} has no rank {order.rank}; it has {len(history.workers)}, "
            "from 0"
        )
    if order.kind in IN_RANK and len(history.workers) < 2:
        raise DrillRefused(
            f"{order.kind} needs at least two ranks: a rank alone has no other to compare with"
        )
    if (
        order.kind in (DrillKind.KILL_NODE, DrillKind.DRAIN_NODE)
        and target.node_id in head_node_ids
    ):
        message = (
            f"rank {order.rank} is on node {target.node_id}, the cluster's head; choose a rank on "
            "another node"
        )
        raise DrillRefused(message)
    return DrillPlan(target, history.workers)


def checkpoint_to_damage(lineage: Sequence[str]) -> str:
    """Return the newest checkpoint of the lineage, which is sorted oldest first. Raises
    DrillRefused if it is the only one."""
    if len(lineage) < 2:
        found = f"the run has {len(lineage)} so far"
        raise DrillRefused(
            f"corrupt_checkpoint needs two checkpoints, the older one to fall back to; {found}"
        )
    return lineage[-1]


class Drills:
    """Read orders from the run directory and carry them out. Not thread-safe."""

    def __init__(
        self,
        run_dir: RunDir,
        submission: int,
        journal: ActorJournalClient,
        make_faults: Callable[[], Faults],
    ) -> None:
        """``make_faults`` is called for the first order, and imports Ray's parts only then."""
        self._run_dir = run_dir
        self._checkpoints = CheckpointStore(run_dir)
        self._submission = submission
        self._journal = journal
        self._make_faults = make_faults
        self._taken: str | None = None
        """Id of the newest order that was read."""

    def tick(self) -> None:
        """Carry out the newest order, unless any driver of this run did so before.

        Raises StorageError if the run directory cannot be read. The next tick tries again.
        """
        order = self._run_dir.drill_ordered(self._submission)
        if order is None or order.id == self._taken:
            return
        history = read_history(self._run_dir)
        self._taken = order.id
        if order.id in history.drills:
            return
        try:
            faults = self._make_faults()
            self._carry_out(order, plan(order, history, faults.head_node_ids()), faults)
        except Exception as exc:
            # The operator sees every failure, and the run goes on.
            logger.warning(
                "drill %s, %s of rank %d, was not carried out: %s",
                order.id,
                order.kind,
                order.rank,
                exc,
            )
            self._journal.emit(
                EventKind.DRILL_FAILED,
                {**_named(order), "problem": str(exc)},
                attempt=order.attempt,
            )

    def _carry_out(self, order: DrillOrder, drill: DrillPlan, faults: Faults) -> None:
        if order.kind is DrillKind.CORRUPT_CHECKPOINT:
            self._corrupt(order, drill.ranks, faults)
            return
        if order.kind is DrillKind.KILL_DRIVER:
            self._record(order, pid=os.getpid())
            faults.kill_driver()
            return
        assert drill.target is not None
        self._record(order, drill.target.node_id, drill.target.pid)
        match order.kind:
            case DrillKind.KILL_WORKER:
                faults.signal([drill.target], signal.SIGKILL)
            case DrillKind.HANG_WORKER:
                faults.signal([drill.target], signal.SIGSTOP)
            case DrillKind.KILL_NODE:
                faults.kill_node(drill.target.node_id)
            case DrillKind.DRAIN_NODE:
                faults.drain_node(drill.target.node_id, DRAIN_DEADLINE_S)
            # The others are up to the rank itself, which learns of the event from the journal.

    def _corrupt(self, order: DrillOrder, ranks: Sequence[RankPlace], faults: Faults) -> None:
        """Damage the newest checkpoint and kill all ranks.

        They are stopped first: a rank that saw a peer die would leave its state in shared memory,
        and rank 0 might commit a newer checkpoint meanwhile.
        """
        checkpoint_to_damage(self._lineage())  # before anything is touched
        try:
            faults.signal(ranks, signal.SIGSTOP)
            name = checkpoint_to_damage(self._lineage())
            self._record(order, checkpoint=name)
            self._checkpoints.damage(name)
        except Exception:
            with contextlib.suppress(DrillRefused):  # the first problem says more
                faults.signal(ranks, signal.SIGCONT)
            raise
        faults.kill_without_trace(ranks, self._run_dir.run_id)

    def _lineage(self) -> list[str]:
        return [manifest.name for manifest in self._checkpoints.lineage()]

    def _record(
        self,
        order: DrillOrder,
        node_id: str | None = None,
        pid: int | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """Make the drill's event durable, so that the drill happens once. Raises DrillRefused if
        that fails."""
        what = {"node_id": node_id, "pid": pid, "checkpoint": checkpoint}
        logger.warning("drill %s: %s of rank %d, %s", order.id, order.kind, order.rank, what)
        self._journal.emit(
            EventKind.DRILL_STARTED, {**_named(order), **what}, attempt=order.attempt
        )
        if not self._journal.flush(FLUSH_S):
            raise DrillRefused(
                f"the journal did not take the drill within {FLUSH_S:g} s; is the storage writable?"
            )


def _named(order: DrillOrder) -> dict[str, Any]:
    return {"id": order.id, "kind": order.kind.value, "rank": order.rank}
