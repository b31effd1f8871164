"""What the layer over Ray Train decides by itself, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train.torch
import torch

from everstep.wire import Verdict
from train_fn.ray_train import placement
from train_fn.ray_train import rank_process as worker
from train_fn.ray_train.group_shutdown import hold_for
from train_fn.ray_train.placement import Placement
from train_fn.ray_train.worker_group import EverstepWorkerGroup
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.verdict import judge


@pytest.mark.parametrize(("num_visible", "expected"), [(2, "cuda:1"), (1, "cuda:0")])
def test_a_rank_that_used_cuda_before_its_neighbours_were_shared_finds_its_own_gpu(
    num_visible: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    assert (
        str(worker._device(use_gpu=True)) == expected
        and str(worker._device(use_gpu=False)) == "cpu"
    )


def test_ranks_are_waited_for_by_the_size_of_what_they_leave() -> None:
    assert hold_for(20.0, 0) == 20.0
    assert hold_for(20.0, 4 << 20) == pytest.approx(20.0, abs=0.1)
    # 24 GB take an estimated 30 to 50 s: two copies, two digests and a file
    assert hold_for(20.0, 24_000_000_000) == pytest.approx(100.0)


def test_of_a_node_that_is_taken_away_its_own_ranks_are_killed_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    workers = [
        SimpleNamespace(actor=f"rank {rank}", metadata=SimpleNamespace(node_id=node))
        for rank, node in enumerate("aab")
    ]
    group: Any = SimpleNamespace(get_workers=lambda: workers, break_hang=lambda reason: [1])
    assert EverstepWorkerGroup.abandon(group, {"b"}) == [2] and killed == ["rank 2"]
    assert EverstepWorkerGroup.abandon(group, {"a", "b"}) == [1], (
        "where nobody else is left, the one that is waited for"
    )


@pytest.mark.parametrize(
    ("node_alive", "verdict"), [(True, Verdict.HANG), (False, Verdict.NODE_LOST)]
)
def test_a_rank_that_was_killed_for_a_hang_on_a_node_that_does_not_answer_is_a_lost_node(
    node_alive: bool, verdict: Verdict
) -> None:
    """A host that is cut off: nobody knows whether its rank hung, or was killed at all."""
    why = "set recovery.hang_timeout_s to more"
    group: Any = SimpleNamespace(
        _hung=[1],
        _stacks={0: "waits", 1: None},
        _hang_reason=why,
        _settings=RecoverySettings(),
    )
    killed = RankReport(1, "b", 101, died=True, death="killed by ray.kill", node_alive=node_alive)
    ranks = (RankReport(0, "a", 100), EverstepWorkerGroup._with_hang(group, killed))
    judgement = judge(Evidence(attempt=1, noticed_at=50.0, ranks=ranks))
    assert (judgement.verdict, judgement.first_rank) == (verdict, 1)
    assert judgement.exception == (why if node_alive else None)
    assert "death" not in judgement.detail


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
