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


def test_bundles_of_hosts_stay_before_others_of_their_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Cluster(monkeypatch)
    bundles = Placement("run_a")
    taken = bundles.reserve({"a": 3}, {"CPU": 1.0}, 0.0)
    assert taken is not None
    kept = bundles.reserve({"a": 2}, {"CPU": 1.0}, 0.0, prefer=[taken[2], taken[0]])
    assert kept is not None
    assert [bundle.number for bundle in kept] == [taken[2].number, taken[0].number]


def test_bundles_are_added_only_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch)
    bundles = Placement("run_a")
    held = bundles.reserve({"a": 2}, {"CPU": 1.0}, 0.0)
    assert held is not None
    added = bundles.add({"a": 1, "b": 2}, {"CPU": 1.0})
    assert [bundle.node_id for bundle in added] == ["b", "b"]
    taken = bundles.reserve({"a": 1, "b": 2}, {"CPU": 1.0}, 0.0)
    assert taken is not None
    assert {bundle.number for bundle in added} < {bundle.number for bundle in taken}
