"""Remove the placement groups of a lost controller. Otherwise they would stay in the cluster while
the driver lives."""

from __future__ import annotations

import logging

from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from train_fn.ray_train.ray_internals import PlacementGroupID

logger = logging.getLogger(__name__)

_STATES = frozenset({"PENDING", "PREPARED", "CREATED", "RESCHEDULING"})


def placement_group_name(run_id: str, number: int) -> str:
    return f"everstep/{run_id}/{number}"


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
