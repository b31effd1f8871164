"""Which ranks of a group are killed before their node is removed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from train_fn.ray_train.group.worker_group import EverstepWorkerGroup


def test_of_a_node_that_is_taken_away_its_own_ranks_are_killed_and_no_others() -> None:
    killed: list[str] = []
    workers = [
        SimpleNamespace(actor=f"rank {rank}", metadata=SimpleNamespace(node_id=node))
        for rank, node in enumerate("aab")
    ]
    group: Any = SimpleNamespace(
        get_workers=lambda: workers, break_hang=lambda reason: [1], _end=killed.append
    )
    assert EverstepWorkerGroup.abandon(group, {"b"}) == [2] and killed == ["rank 2"]
    assert EverstepWorkerGroup.abandon(group, {"a", "b"}) == [1], (
        "where nobody else is left, the one that is waited for"
    )
