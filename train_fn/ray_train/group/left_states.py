"""Save the newest state that a run's ranks left on its nodes, once none of them trains any more,
and remove the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.manifest import Manifest
from storage.run_dir import RunDir
from train_fn.snapshots.election import (
    LastSave,
    Offer,
    Unreadable,
    WrittenPiece,
    commit_elected,
    commit_snapshot,
    save_last,
    write_piece,
)
from train_fn.snapshots.store import Label, node_snapshots

logger = logging.getLogger(__name__)

ASK_S = 20.0
"""Timeout in seconds for the nodes to list their snapshots."""
SAVE_S = 600.0
"""Timeout in seconds for the last save."""


class LeftStates:
    """Access the snapshots of one run on live nodes. A node that does not answer in time is left
    out."""

    def __init__(self, run_dir: RunDir, submission: int, node_ids: Collection[str]) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._node_ids = sorted(node_ids)

    def save_newest(self, spec: RunSpec, world_size: int) -> LastSave | None:
        """Commit the newest state as a checkpoint (see ``save_last``). The node that holds it
        writes it. Never raises."""
        held = self._asked(_labels, ASK_S)
        nodes = list(held)
        offers = [
            Offer(number, label) for number, node_id in enumerate(nodes) for label in held[node_id]
        ]

        def on_node(action: Callable[..., Any], offer: Offer, *arguments: Any) -> Any:
            node = nodes[offer.rank]
            store = self._run_dir, node, self._submission
            ref = _on_node(action, node, store, offer, *arguments)
            try:
                return ray.get(ref, timeout=SAVE_S)
            except ray.exceptions.GetTimeoutError:
                ray.cancel(ref, force=True)
                raise TimeoutError(f"the state was not written within {SAVE_S:g} s") from None

        return save_last(
            self._run_dir,
            self._submission,
            offers,
            lambda elected: commit_elected(
                self._run_dir,
                self._submission,
                elected,
                lambda offer: on_node(_commit, offer, spec, world_size),
                lambda offer, directory: on_node(_write_piece, offer, directory),
            ),
        )

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
                _on_node(action, node_id, self._run_dir, node_id, self._submission): node_id
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
            ray.cancel(ref, force=True)
        answers = {}
        for ref in ready:
            try:
                answers[asked[ref]] = ray.get(ref)
            except Exception as exc:  # from the node, or from the action
                logger.warning("node %s did not return the run's states on it: %s", asked[ref], exc)
        return answers


def _on_node(action: Callable[..., Any], node_id: str, *arguments: Any) -> Any:
    """Start ``action`` as a task on that node. Return the reference to its result."""
    task = ray.remote(num_cpus=0, max_retries=0)(action)
    return task.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    ).remote(*arguments)


def _labels(run_dir: RunDir, node_id: str, submission: int) -> list[Label]:
    return node_snapshots(run_dir, node_id, submission).labels()


def _commit(
    store: tuple[RunDir, str, int], offer: Offer, spec: RunSpec, world_size: int
) -> Manifest | Unreadable:
    return commit_snapshot(store[0], spec, node_snapshots(*store), offer, world_size)


def _write_piece(
    store: tuple[RunDir, str, int], offer: Offer, directory: str
) -> WrittenPiece | Unreadable:
    return write_piece(store[0], node_snapshots(*store), offer, directory)


def _remove(run_dir: RunDir, node_id: str, submission: int) -> None:
    node_snapshots(run_dir, node_id, submission).remove_all()
