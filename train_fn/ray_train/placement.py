"""The bundles that a run holds: they outlive its worker groups, so that a restart need not wait for the cluster to hand back and
give out again what the run already has."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from train_fn.ray_train.leftovers import placement_group_name

logger = logging.getLogger(__name__)

_GONE = "REMOVED"


@dataclass(frozen=True)
class Slot:
    """One bundle, where it lies now."""

    group: PlacementGroup
    index: int
    node_id: str


@dataclass(frozen=True)
class Wanted:
    """What a worker group needs. ``selector`` keeps new bundles off nodes that must not be used."""

    num_workers: int
    per_worker: Mapping[str, float]
    strategy: str
    usable_nodes: Collection[str]
    selector: Mapping[str, str] | None = None


class Placement:
    """The placement groups of one run: usually one, a second one beside it after growth. Never more bundles than ``max_workers``.

    When a node dies, the GCS moves its bundles to other nodes as soon as there is room: then they are simply there to grow onto.
    """

    def __init__(self, run_id: str, max_workers: int) -> None:
        self._run_id = run_id
        self._max_workers = max_workers
        self._groups: list[PlacementGroup] = []
        self._number = 0

    def held(self) -> Counter[str]:
        """Bundles on each node, by node id."""
        return Counter(slot.node_id for slot in self._slots())

    def reserve(self, wanted: Wanted, timeout_s: float) -> list[Slot] | None:
        """Bundles for a worker group, those that are held first; None when the cluster did not give the rest in time."""
        slots = [slot for slot in self._slots() if slot.node_id in wanted.usable_nodes]
        lacking = wanted.num_workers - len(slots)
        if lacking <= 0:
            return _spread(slots)[: wanted.num_workers]
        total = sum(group.bundle_count for group in self._groups)
        if slots and (wanted.strategy.startswith("STRICT") or total + lacking > self._max_workers):
            self.release()
            slots, lacking = [], wanted.num_workers
        elif not slots:
            self.release()
        added = self._add(wanted, lacking, timeout_s)
        return None if added is None else _spread([*slots, *added])

    def release(self) -> None:
        """Give all bundles back."""
        for group in self._groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)
        self._groups = []

    def _add(self, wanted: Wanted, num_bundles: int, timeout_s: float) -> list[Slot] | None:
        began = time.monotonic()
        self._number += 1
        group = placement_group(
            bundles=[dict(wanted.per_worker)] * num_bundles,
            strategy=wanted.strategy,
            bundle_label_selector=[dict(wanted.selector)] * num_bundles if wanted.selector else None,
            name=placement_group_name(self._run_id, self._number),
        )
        self._groups.append(group)
        if not group.wait(timeout_s):
            self._groups.remove(group)
            remove_placement_group(group)
            return None
        logger.info("%d new bundles were placed in %.2f s", num_bundles, time.monotonic() - began)
        return [slot for slot in self._slots() if slot.group is group]

    def _slots(self) -> list[Slot]:
        slots = []
        for group in list(self._groups):
            table: dict[str, Any] = placement_group_table(group)
            if table.get("state", _GONE) == _GONE:
                self._groups.remove(group)
                continue
            placed: dict[int, str] = table["bundles_to_node_id"]
            slots += [Slot(group, index, node_id) for index, node_id in sorted(placed.items()) if node_id]
        return slots


def _spread(slots: list[Slot]) -> list[Slot]:
    """The same slots, each node's first before any node's second: fewer ranks than slots are then spread over the nodes."""
    seen: Counter[str] = Counter()
    ordered = []
    for position, slot in enumerate(slots):
        ordered.append((seen[slot.node_id], position, slot))
        seen[slot.node_id] += 1
    return [slot for _, _, slot in sorted(ordered, key=lambda entry: entry[:2])]
