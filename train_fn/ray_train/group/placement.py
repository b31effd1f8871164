"""Hold a run's bundles. They outlive its worker groups, so that a restart does not wait for the
cluster to release and reserve resources that the run already has.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from train_fn.ray_train.ray_internals import (
    PlacementGroupHandle,
    PlacementGroupID,
    SynchronizationActor,
    worker_group_module,
)

logger = logging.getLogger(__name__)


_PLACED_PER_S = 10.0
"""Lowest number of bundles that a cluster is assumed to place in a second."""


@dataclass(frozen=True)
class Bundle:
    """Reserve resources for one rank on a chosen node."""

    group: PlacementGroup
    node_id: str
    number: int
    """No other bundle of the run has this number."""


class Placement:
    """Hold the bundles of one run. Each is its own placement group, pinned to its node.

    A placement group of several bundles cannot be kept after the death of a node: the GCS retries
    to place the lost bundle without a pause, which takes a whole core, until the group is removed
    (Ray 2.60).
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._bundles: list[Bundle] = []
        self._number = 0
        self._misses: Counter[str] = Counter()
        """Consecutive failures to place a bundle on a node that should have had room for it."""

    def held(self, living: Collection[str]) -> Counter[str]:
        """Return the number of bundles on each node, by node id. Bundles on nodes that are not in
        ``living`` are removed."""
        self.remove([bundle for bundle in self._bundles if bundle.node_id not in living])
        return Counter(bundle.node_id for bundle in self._bundles)

    def reserve(
        self,
        wanted: Mapping[str, int],
        per_worker: Mapping[str, float],
        timeout_s: float,
        prefer: Sequence[Bundle] = (),
    ) -> list[Bundle] | None:
        """Return exactly the wanted number of bundles on each node, held ones first; None if the
        cluster did not place them in time.

        Bundles that were placed are kept for the next try.

        Args:
            wanted: number of bundles by node id.
            per_worker: resources of a bundle.
            timeout_s: longest wait in seconds.
            prefer: held bundles that are used before others of their node, in this order.
        """
        states = [(each, placement_group_table(each.group).get("state")) for each in self._bundles]
        self.remove([bundle for bundle, state in states if state != "CREATED"])
        lacking, kept = Counter(wanted), []
        places = {bundle.number: place for place, bundle in enumerate(prefer)}
        self._bundles.sort(key=lambda bundle: places.get(bundle.number, len(places)))
        for bundle in self._bundles:
            if lacking[bundle.node_id] > 0:
                lacking[bundle.node_id] -= 1
                kept.append(bundle)
        self.remove([bundle for bundle in self._bundles if bundle not in kept])
        added = [self._create(node_id, per_worker) for node_id in lacking.elements()]
        began = time.monotonic()
        deadline = began + timeout_s + len(added) / _PLACED_PER_S
        missing = [
            bundle
            for bundle in added
            if not bundle.group.wait(max(0.0, deadline - time.monotonic()))
        ]
        late = {bundle.node_id for bundle in missing}
        self._misses = Counter({node_id: self._misses[node_id] + 1 for node_id in late})
        if missing:
            logger.warning(
                "%d of %d new bundles were not placed, on nodes %s",
                len(missing),
                len(added),
                sorted(late),
            )
            self.remove(missing)
            return None
        if added:
            logger.info(
                "%d new bundles were placed in %.2f s", len(added), time.monotonic() - began
            )
        return _in_turns(self._bundles)

    def add(self, wanted: Mapping[str, int], per_worker: Mapping[str, float]) -> list[Bundle]:
        """Begin to reserve more bundles, up to the wanted number on each node. All that are held
        stay. Return the new ones, which may not be placed yet.

        Args:
            wanted: number of bundles by node id.
            per_worker: resources of a bundle.
        """
        lacking = Counter(wanted) - Counter(bundle.node_id for bundle in self._bundles)
        return [self._create(node_id, per_worker) for node_id in lacking.elements()]

    def unfit(self) -> list[str]:
        """Return the nodes that failed to place a bundle at least twice in a row although they
        should have had room. This happens if whole GPUs are wanted but only halves are free."""
        return [node_id for node_id, misses in self._misses.items() if misses > 1]

    def release(self) -> None:
        """Release all bundles."""
        self.remove(list(self._bundles))

    def remove(self, bundles: Sequence[Bundle]) -> None:
        """Release these bundles, so that other runs can have the resources."""
        for bundle in bundles:
            with contextlib.suppress(RayError):
                remove_placement_group(bundle.group)
        self._bundles = [bundle for bundle in self._bundles if bundle not in bundles]

    def _create(self, node_id: str, per_worker: Mapping[str, float]) -> Bundle:
        self._number += 1
        group = placement_group(
            bundles=[dict(per_worker)],
            bundle_label_selector=[{"ray.io/node-id": node_id}],
            name=f"everstep/{self._run_id}/{self._number}",
        )
        self._bundles.append(Bundle(group, node_id, self._number))
        return self._bundles[-1]


def _in_turns(bundles: list[Bundle]) -> list[Bundle]:
    """Return the bundles with each node's first one before any node's second."""
    by_node = groupby(sorted(bundles, key=attrgetter("node_id")), key=attrgetter("node_id"))
    return [
        bundle
        for turn in zip_longest(*(list(group) for _, group in by_node))
        for bundle in turn
        if bundle is not None
    ]


class Reservation(PlacementGroupHandle):  # type: ignore[misc]
    """Stand in for a worker group's own placement group. It reserves the group's bundles once Ray
    waits for it.

    Args:
        reserve: reserves the bundles within the given seconds; returns False if the cluster did not
            place them in time.
    """

    placement_group = None

    def __init__(self, reserve: Callable[[float], bool]) -> None:
        self._reserve = reserve

    def ready(self) -> Any:
        raise NotImplementedError("Ray Train waits by wait() only")

    def wait(self, timeout_seconds: float = 30) -> bool:
        return self._reserve(timeout_seconds)

    def shutdown(self) -> None:
        """Do nothing, since the bundles stay with the run."""


# ---------------------------------------------------------------- stale placement groups

# Remove the placement groups of a lost controller. Otherwise they would stay in the cluster while
# the driver lives.

_STATES = frozenset({"PENDING", "PREPARED", "CREATED", "RESCHEDULING"})


def remove_placement_groups(run_id: str) -> int:
    """Remove every live placement group of this run, and return their number. Call this only while
    no controller runs."""
    removed = 0
    for group_id, group in placement_group_table().items():
        if group["name"].startswith(f"everstep/{run_id}/") and group["state"] in _STATES:
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))
            removed += 1
    if removed:
        logger.warning(
            "removed %d placement groups that an earlier controller left behind", removed
        )
    return removed


# ---------------------------------------------------------------- no barrier

# Start a group without Ray Train's barrier: an actor of its own, at which ranks meet when they
# report. Ranks that never do would pay for its process in every start.


class NoBarrier:
    """Stands for the barrier, its class and its handle. Nobody calls it."""

    def options(self, **_: Any) -> NoBarrier:
        return self

    def remote(self, **_: Any) -> NoBarrier:
        return self


@contextmanager
def no_barrier() -> Iterator[None]:
    """Let Ray create no barrier inside the block. One group starts at a time."""
    worker_group_module.SynchronizationActor = NoBarrier()
    try:
        yield
    finally:
        worker_group_module.SynchronizationActor = SynchronizationActor


def end_barrier(barrier: Any) -> None:
    """End a group's barrier, if it has one."""
    if barrier is not None and not isinstance(barrier, NoBarrier):
        ray.kill(barrier)
