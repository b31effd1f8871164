"""The states that a run's ranks left on its nodes: bring the newest one to the nodes of the next
group, or save it and remove the others once no group follows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.retention import attempt_starts
from storage.run_dir import RunDir
from train_fn.snapshots.election import Candidate, elect, in_lineage, snapshot_name, trusted
from train_fn.snapshots.last_save import (
    LastSave,
    Unreadable,
    WrittenPiece,
    save_last,
    write_piece,
)
from train_fn.snapshots.links import take_in
from train_fn.snapshots.store import Label, node_snapshots

logger = logging.getLogger(__name__)

ASK_S = 20.0
"""Timeout in seconds for the nodes to list their snapshots."""
SAVE_S = 600.0
"""Timeout in seconds for the last save, and for a state to come to another node."""
_Store = tuple[RunDir, str, int]
_BLOCK_BYTES = 32 << 20
"""Bytes of a state that travel at once."""


class LeftStates:
    """Access the snapshots of one run on live nodes, whatever may be placed there. A node that does
    not answer in time is left out. Ray starts nothing on a node that it drains, but ``processes``
    of earlier ranks, by their nodes, still answer there."""

    def __init__(
        self,
        run_dir: RunDir,
        submission: int,
        node_ids: Collection[str],
        processes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._node_ids, self._processes = sorted(node_ids), processes

    def save_newest(self, spec: RunSpec, world_size: int) -> LastSave | None:
        """Commit the newest state as a checkpoint (see ``save_last``). The node that holds it
        writes it. Never raises."""
        held = self._asked(_labels, ASK_S)
        nodes = list(held)
        candidates = [
            Candidate(number, label)
            for number, node_id in enumerate(nodes)
            for label in held[node_id]
        ]

        def write(candidate: Candidate, directory: str) -> Any:
            node = nodes[candidate.rank]
            store = self._run_dir, node, self._submission
            ref = self._on(node, _write_piece, store, spec, candidate, directory)
            try:
                return ray.get(ref, timeout=SAVE_S)
            except ray.exceptions.GetTimeoutError:
                ray.cancel(ref)
                raise TimeoutError(f"the state was not written within {SAVE_S:g} s") from None

        return save_last(self._run_dir, self._submission, candidates, world_size, write)

    def bring_to(self, targets: Collection[str]) -> None:
        """Bring the newest state to one of these nodes, whose ranks elect among what lies there,
        unless it is there. Of a sharded model, bring the pieces that they lack. Never raises."""
        try:
            found = self._asked(_labels, ASK_S)
            nodes = sorted({*found, *targets}, key=lambda node: (node not in targets, node))
            candidates = [
                Candidate(at, each) for at, node in enumerate(nodes) for each in found.get(node, ())
            ]
            standing, _ = trusted(candidates, self._run_dir.distrusted())
            standing, _ = in_lineage(standing, attempt_starts(self._run_dir))
            while lacking := pieces_to_bring(standing, len(targets), self._submission):
                for candidate in lacking:
                    standing.remove(candidate)
                    at = candidate.label.piece.number % len(targets)
                    if self._is_carried(candidate.label, nodes[candidate.rank], nodes[at]):
                        standing.append(replace(candidate, rank=at))
        except Exception as exc:
            logger.warning("states on nodes without ranks could not be brought: %s", exc)

    def _is_carried(self, label: Label, source: str, target: str) -> bool:
        """Copy a snapshot from one node to another. Return whether it is there."""
        place, store = ((self._run_dir, node, self._submission) for node in (source, target))
        try:
            read = partial(self._on, source, _block, place, label)
            problem = ray.get(self._on(target, _take_in, store, label, read), timeout=SAVE_S)
        except RayError as exc:
            problem = str(exc)
        where = f"{snapshot_name(label)} on node {source}, which gets no rank"
        logger.info("%s: %s", where, problem or f"brought to node {target}")
        return problem is None

    def remove(self, patience_s: float) -> None:
        """Remove the snapshots of this and older submissions. Never raises."""
        self._asked(_remove, patience_s)

    def _asked(
        self, action: Callable[[RunDir, str, int], Any], patience_s: float
    ) -> dict[str, Any]:
        """Run ``action`` on each live node, and return the results by node id."""
        try:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            asked = {
                self._on(node_id, action, self._run_dir, node_id, self._submission): node_id
                for node_id in self._node_ids
                if node_id in alive
            }
            ready, late = (
                ray.wait(list(asked), num_returns=len(asked), timeout=patience_s)
                if asked
                else ([], [])
            )
        except RayError as exc:
            logger.warning("the run's nodes could not be asked for the states on them: %s", exc)
            return {}
        for ref in late:
            logger.warning("node %s did not answer within %g s", asked[ref], patience_s)
            ray.cancel(ref)
        answers = {}
        for ref in ready:
            try:
                answers[asked[ref]] = ray.get(ref)
            except Exception as exc:  # from the node, or from the action
                logger.warning("node %s did not return the run's states on it: %s", asked[ref], exc)
        return answers

    def _on(self, node_id: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Start ``action`` on that node, in a process of an earlier rank or as a task. Return the
        reference to its result."""
        if node_id in self._processes:
            return self._processes[node_id].execute.remote(action, *arguments)
        task = ray.remote(num_cpus=0, max_retries=0)(action)
        return task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(*arguments)


def may_lie_elsewhere(
    kept: Collection[int], ending: Collection[int], done: int, *, in_pieces: bool
) -> bool:
    """Return whether the newest state may lie on a node where the next group has no rank.

    Args:
        kept: steps of the states that the ranks of its hosts have left.
        ending: those of hosts that end.
        done: the steps done.
        in_pieces: whether no rank leaves all of a state.
    """
    return done > 0 and (in_pieces or max(kept, default=0) < max([done, *ending]))


def pieces_to_bring(candidates: list[Candidate], num_here: int, submission: int) -> list[Candidate]:
    """Return the candidates that have to be brought to the next group's nodes, whose numbers are
    below ``num_here``: one of each piece of the newest state that none of these nodes has."""
    found: dict[int, Candidate] = {}
    for candidate in sorted(elect(candidates, submission).candidates, key=lambda each: each.rank):
        found.setdefault(candidate.label.piece.number, candidate)
    return [candidate for candidate in found.values() if candidate.rank >= num_here]


def _labels(run_dir: RunDir, node_id: str, submission: int) -> list[Label]:
    return node_snapshots(run_dir, node_id, submission).labels()


def _block(store: _Store, label: Label, at: int) -> tuple[int, bytes]:
    """Return the size of a snapshot's file on this node, and its bytes from ``at``."""
    with node_snapshots(*store).open(label) as file:
        file.seek(at)
        return os.fstat(file.fileno()).st_size, file.read(_BLOCK_BYTES)


def _take_in(store: _Store, label: Label, read: Callable[[int], Any]) -> str | None:
    """Keep a snapshot of another node on this one. Return why that cannot be done, or None."""
    snapshots, (size, first) = node_snapshots(*store), ray.get(read(0))

    def blocks() -> Iterator[memoryview]:
        yield memoryview(first)
        for at in range(len(first), size, _BLOCK_BYTES):
            yield memoryview(ray.get(read(at))[1])

    snapshots.remove_older(label, keep=1)
    return take_in(snapshots, label, size, blocks())


def _write_piece(
    store: _Store, spec: RunSpec, candidate: Candidate, directory: str
) -> WrittenPiece | Unreadable:
    return write_piece(store[0], spec, node_snapshots(*store), candidate, directory)


def _remove(run_dir: RunDir, node_id: str, submission: int) -> None:
    node_snapshots(run_dir, node_id, submission).remove_all()
