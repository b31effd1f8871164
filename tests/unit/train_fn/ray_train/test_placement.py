"""Which nodes count as unfit because they do not give the resources that are free there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train.group import placement
from train_fn.ray_train.group.placement import Placement


class Cluster:
    """Gives bundles on some nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.giving = {"a", "b"}
        monkeypatch.setattr(placement, "placement_group", self.create)
        monkeypatch.setattr(placement, "remove_placement_group", lambda group: None)
        monkeypatch.setattr(placement, "placement_group_table", lambda group: {"state": "CREATED"})

    def create(self, bundles: Any, bundle_label_selector: list[dict[str, str]], name: str) -> Any:
        node_id = bundle_label_selector[0]["ray.io/node-id"]
        return SimpleNamespace(wait=lambda timeout_s: node_id in self.giving)


def test_a_node_that_does_not_give_what_is_free_there_is_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, bundles = Cluster(monkeypatch), Placement("run_a")
    cluster.giving = {"a"}
    assert bundles.reserve({"a": 2, "b": 1}, {"GPU": 1.0}, 0.0) is None
    assert bundles.unfit() == [] and bundles.held({"a", "b"}) == {"a": 2}, (
        "once may be a matter of the moment; what came is held"
    )
    assert bundles.reserve({"a": 2, "b": 1}, {"GPU": 1.0}, 0.0) is None and bundles.unfit() == ["b"]
    cluster.giving = {"a", "b"}
    taken = bundles.reserve({"a": 2, "b": 1}, {"GPU": 1.0}, 0.0)
    assert (
        taken is not None
        and [bundle.node_id for bundle in taken] == ["a", "b", "a"]
        and bundles.unfit() == []
    )
