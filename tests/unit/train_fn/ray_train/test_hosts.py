"""Hosts that outlive their attempt: each serves one other, or ends."""

from __future__ import annotations

import pytest
import ray

from train_fn.ray_train.group.end import Host, Hosts
from train_fn.ray_train.group.placement import Bundle


def host(number: int, step: int) -> Host:
    return Host(f"actor {number}", Bundle(None, "a", number), 100 + number, step)  # type: ignore[arg-type]


def test_what_is_held_is_taken_once_or_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()
    monkeypatch.setattr(ray, "kill", ended.append)
    held = Hosts()
    one, other = host(1, 6), host(2, 7)
    held.hold([one, other])
    assert held.take() == [one, other] and held.take() == []
    held.hold([other])
    held.end()
    held.end()
    assert ended == ["actor 2"]
