"""A start that a stopped process holds up fails at once, and the process is ended on its node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from train_fn.ray_train.group import rank_actors
from train_fn.ray_train.group.rank_actors import RankActors
from train_fn.recovery.settings import RecoverySettings


def actors_with_a_host(done: list[Any]) -> RankActors:
    """Return the actors of a group with a host of an earlier attempt, process 7 on node a."""
    actor = SimpleNamespace(get_metadata=SimpleNamespace(remote=lambda: "its answer"))
    host: Any = SimpleNamespace(actor=actor, bundle=SimpleNamespace(node_id="a"), pid=7)
    placement: Any = SimpleNamespace(release=lambda: done.append("release"))
    unused: Any = None
    return RankActors(unused, unused, RecoverySettings(), placement, *[unused] * 5, [host], unused)


def test_the_time_of_a_build_does_not_count_as_that_of_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as ``hang_start_s``, beyond which a build counts as hung."""
    now, answers = [0.0], [([], ["build"])] * 10 + [(["build"], [])]

    def wait(refs: Any, **_: Any) -> Any:
        now[0] += 100.0
        return answers.pop(0)

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(rank_actors, "prepared", lambda calls, settings: [])
    monkeypatch.setattr(rank_actors.time, "monotonic", lambda: now[0])
    made, added = actors_with_a_host([]), list[float]()
    made._is_stopping, made.prolong = lambda: False, added.append
    made._wait_for_builds(["build"])
    assert sum(added) == RecoverySettings().hang_start_s == 600.0
