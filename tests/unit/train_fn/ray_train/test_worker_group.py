"""Which ranks of a group are killed before their node is removed, and whether a group that is
offered has begun by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch.distributed as dist
from ray.exceptions import RayActorError

from train_fn.ray_train.group.worker_group import EverstepWorkerGroup
from train_fn.step.peers import GoingOver


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


class Process:
    """An actor that answers at once, late (None), or is gone (an error)."""

    def __init__(self, answer: bool | Exception | None = True) -> None:
        self.answer = answer
        self.withdrawn: list[int] = []
        self.withdraw_offer = SimpleNamespace(remote=self._withdraw)
        self.kept_state = SimpleNamespace(remote=lambda: self)

    def _withdraw(self, number: int) -> Process:
        self.withdrawn.append(number)
        return self


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: Any) -> Any:
        for ref in refs if isinstance(refs, list) else [refs]:
            if isinstance(ref.answer, Exception):
                raise ref.answer

    def wait(refs: list[Any], num_returns: int = 1, timeout: float = 0) -> Any:
        return [ref for ref in refs if ref.answer], [ref for ref in refs if not ref.answer]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)


def group_of(trains: Process, *joining: Process, store: Any) -> Any:
    """Return a group that is offered, what it gave back, and what it left alone."""
    recruits = [
        SimpleNamespace(actor=each, bundle=SimpleNamespace(node_id="a")) for each in joining
    ]
    group = SimpleNamespace(number=5, held=[], _store=store, _asked=[], _asked_at=0.0)
    group._ranked = [SimpleNamespace(actor=each) for each in (trains, *joining)]
    group._survivors = SimpleNamespace(hold=group.held.extend)
    group._actors = SimpleNamespace(recruits=lambda: recruits, release_recruits=list)
    return group


@pytest.mark.usefixtures("answers")
def test_a_group_to_which_nobody_has_gone_over_is_withdrawn_and_its_recruits_are_free() -> None:
    trains, ready, late = Process(), Process(), Process(None)
    gone = Process(RayActorError())
    group = group_of(trains, ready, late, gone, store=dist.HashStore())
    store = group._store
    assert EverstepWorkerGroup.has_begun(group, 0.0) is False
    assert trains.withdrawn and set(trains.withdrawn + ready.withdrawn) == {5}
    assert group.held == [ready] and group._store is None
    assert not GoingOver(store).make(goes=True), "nobody goes over to it any more"


@pytest.mark.usefixtures("answers")
def test_a_group_to_which_a_rank_has_gone_over_has_begun_whoever_answers() -> None:
    trains = Process(RayActorError())
    group = group_of(trains, Process(None), store=dist.HashStore())
    assert GoingOver(group._store).make(goes=True)
    assert EverstepWorkerGroup.has_begun(group, 0.0) is True
    assert EverstepWorkerGroup.has_begun(group, 0.0) is True
    assert group._store is not None and trains.withdrawn == [] and group.held == []


@pytest.mark.usefixtures("answers")
def test_a_group_that_could_not_be_offered_has_not_begun_and_keeps_its_living_recruits() -> None:
    ready = Process()
    group = group_of(Process(), ready, Process(RayActorError()), store=None)
    group._ranked = []
    assert EverstepWorkerGroup.has_begun(group, 0.0) is False
    assert group.held == [ready]


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize(
    ("answer", "after_s", "stands"),
    [(True, 0.0, True), (None, 0.0, True), (None, 60.0, False), (RayActorError(), 0.0, False)],
    ids=["answers", "is asked", "is stopped", "is gone"],
)
def test_a_process_that_is_to_join_is_watched(answer: Any, after_s: float, stands: bool) -> None:
    joining = Process()
    group = group_of(Process(RayActorError()), joining, store=None)
    assert EverstepWorkerGroup.joining_answer(group), "who trains is watched as ever"
    joining.answer = answer
    group._asked_at -= after_s
    assert EverstepWorkerGroup.joining_answer(group) is stands
