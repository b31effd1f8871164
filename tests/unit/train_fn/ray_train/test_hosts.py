"""Hosts that outlive their attempt: which ones serve the next, and that none takes a state with it
when it ends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from train_fn.ray_train.group.end import Host, Hosts, end_hosts
from train_fn.ray_train.group.placement import Bundle


class Actor:
    """A host whose rank may lend a state, and what happened to it, in order."""

    def __init__(self, *, answers: bool = True, problem: str | None = None) -> None:
        self.did: list[str] = []
        self.answers = answers
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


def gone() -> Any:
    raise ray.exceptions.RayActorError


def test_a_state_that_is_lent_is_written_before_its_host_is_ended() -> None:
    lends, stopped, dead = Actor(), Actor(answers=False), Actor()
    dead.leave_kept_state = dead._call("wrote", gone)
    end_hosts([dead, lends, stopped], 20.0)
    assert lends.did == ["wrote", "killed"]
    assert stopped.did == ["killed"], "one that does not answer is not waited for"
    assert dead.did[-1] == "killed", "nor does one that is gone keep the others from writing"


def test_hosts_are_ended_though_the_cluster_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.RaySystemError("the head is away")

    monkeypatch.setattr(ray, "wait", broken)
    lends = Actor()
    end_hosts([lends], 20.0)
    assert lends.did[-1] == "killed"


def host(number: int, node_id: str, step: int) -> Host:
    return Host(Actor(), Bundle(None, node_id, number), 100 + number, step)  # type: ignore[arg-type]


def test_what_is_held_is_taken_once_or_ended() -> None:
    held = Hosts(20.0)
    one, other = host(1, "a", 6), host(2, "a", 7)
    held.hold([one, other])
    assert held.take() == [one, other] and held.take() == []
    held.hold([other])
    held.end()
    assert other.actor.did == ["wrote", "killed"] and one.actor.did == []
    held.end()
    assert other.actor.did.count("killed") == 1
