"""Processes that outlive their attempt: which ones serve the next, and that none takes a state with
it when it ends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from train_fn.ray_train.group.end import SurvivingProcess, Survivors, end_processes
from train_fn.ray_train.group.placement import Bundle
from train_fn.ray_train.group.rank_actors import _on


class Actor:
    """A rank's process that keeps a state, and what happened to it, in order."""

    def __init__(self, step: int | None, *, answers: bool = True, problem: str | None = None):
        self.did: list[str] = []
        self.answers = answers
        self.kept_state = self._call("asked", lambda: (step, 1000))
        self.leave_kept_state = self._call("wrote", lambda: problem)

    def _call(self, name: str, answer: Callable[[], Any]) -> Any:
        def remote() -> SimpleNamespace:
            if self.answers:
                self.did.append(name)
            return Ref(self.answers, answer)

        return SimpleNamespace(remote=remote)


class Ref(SimpleNamespace):
    def __init__(self, is_done: bool, answer: Callable[[], Any]) -> None:
        super().__init__(is_done=is_done, answer=answer)

    __hash__ = object.__hash__


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout < 30
        return [ref for ref in refs if ref.is_done], [ref for ref in refs if not ref.is_done]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda ref: ref.answer())
    monkeypatch.setattr(ray, "kill", lambda actor: actor.did.append("killed"))


def test_a_process_writes_the_state_that_it_keeps_before_it_is_ended() -> None:
    keeps, empty, stopped = Actor(7), Actor(None), Actor(7, answers=False)
    end_processes([keeps, empty, stopped], 20.0)
    assert keeps.did == ["asked", "wrote", "killed"]
    assert empty.did == ["asked", "killed"]
    assert stopped.did == ["killed"], "a process that does not answer is not waited for"


def test_a_process_that_is_gone_does_not_keep_the_others_from_writing() -> None:
    def gone() -> Any:
        raise ray.exceptions.RayActorError

    dead, keeps = Actor(7), Actor(7)
    dead.kept_state = dead._call("asked", gone)
    end_processes([dead, keeps], 20.0)
    assert keeps.did == ["asked", "wrote", "killed"] and dead.did[-1] == "killed"


def test_processes_are_ended_though_the_cluster_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.RaySystemError("the head is away")

    monkeypatch.setattr(ray, "wait", broken)
    keeps = Actor(7)
    end_processes([keeps], 20.0)
    assert keeps.did[-1] == "killed"


def survivor(number: int, node_id: str, step: int) -> SurvivingProcess:
    return SurvivingProcess(Actor(step), Bundle(None, node_id, number), 100 + number, step)  # type: ignore[arg-type]


def test_what_is_held_is_taken_once_newest_state_first_or_ended() -> None:
    held = Survivors(20.0)
    old, new = survivor(1, "a", 6), survivor(2, "a", 7)
    held.hold([old, new])
    assert held.take() == [new, old] and held.take() == []
    held.hold([new])
    held.end()
    assert new.actor.did == ["asked", "wrote", "killed"] and old.actor.did == []
    held.end()
    assert new.actor.did.count("killed") == 1


def test_a_node_with_fewer_ranks_than_survivors_keeps_those_with_the_newest_state() -> None:
    new, old, elsewhere = survivor(1, "a", 7), survivor(2, "a", 6), survivor(3, "b", 7)
    assert _on({"a": 1, "b": 2}, [new, elsewhere, old]) == [new, elsewhere]
    assert _on({"a": 2}, [new, elsewhere, old]) == [new, old]
    assert _on({}, [new]) == []
