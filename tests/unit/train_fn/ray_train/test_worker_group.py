"""Which ranks of a group are killed before their node is removed, and whether a group that is
offered has begun by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from train_fn.ray_train.group.worker_group import EverstepWorkerGroup


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
    """An actor that answers at once, or is gone (None)."""

    def __init__(self, has_begun: bool | None, was_late: bool | None = None) -> None:
        late = has_begun if was_late is None else was_late
        self.has_begun = SimpleNamespace(remote=lambda within_s: (self, has_begun))
        self.withdraw_offer = SimpleNamespace(remote=lambda: (self, late))


GONE = None


@pytest.mark.parametrize(
    ("first", "second", "begun", "free"),
    [
        (Process(True), Process(True), True, []),
        (Process(True), Process(GONE), True, []),  # the new group fails, and is judged
        (Process(False), Process(False), False, [0, 1]),
        (Process(False), Process(False, was_late=True), True, []),
        (Process(GONE), Process(False), False, [1]),
        (Process(GONE), Process(True), True, []),
    ],
    ids=["both", "then one died", "none", "one was late", "one died before", "the first died"],
)
def test_a_group_has_begun_if_a_process_of_it_has(
    first: Process, second: Process, begun: bool, free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(ref: tuple[Process, bool | None]) -> bool:
        if ref[1] is GONE:
            raise RayActorError
        return ref[1]

    def wait(refs: list[Any], num_returns: int = 1, timeout: float = 0) -> Any:
        return refs[:num_returns], refs[num_returns:]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    held: list[Any] = []
    actors = SimpleNamespace(release_recruits=lambda living: list(living))
    group: Any = SimpleNamespace(
        _ranked=[SimpleNamespace(actor=first), SimpleNamespace(actor=second)],
        _stayed_start_s=10.0,
        _store="store",
        _actors=actors,
        _survivors=SimpleNamespace(hold=held.extend),
    )
    group.settle = lambda: EverstepWorkerGroup.settle(group)
    assert EverstepWorkerGroup.has_begun(group) is begun
    assert held == [(first, second)[number] for number in free]
