"""A start that a stopped process holds up fails at once, and the process is ended on its node."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from train_fn.ray_train.group import rank_actors
from train_fn.ray_train.group.rank_actors import RankActors
from train_fn.ray_train.ray_internals import WorkerGroupStartupFailedError
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.settings import RecoverySettings


def actors_with_a_host(done: list[Any]) -> RankActors:
    """Return the actors of a group with a host of an earlier attempt, process 7 on node a."""
    actor = SimpleNamespace(get_metadata=SimpleNamespace(remote=lambda: "its answer"))
    host: Any = SimpleNamespace(actor=actor, bundle=SimpleNamespace(node_id="a"), pid=7)
    launch: Any = SimpleNamespace(meets_to_report=False)
    placement: Any = SimpleNamespace(release=lambda: done.append("release"))
    unused: Any = None
    return RankActors(launch, unused, RecoverySettings(), placement, *[unused] * 5, [host], unused)


@pytest.mark.parametrize(
    ("reports", "is_held_up"),
    [
        ((), False),
        ((RankReport(0, "a", 7, died=True),), False),
        ((RankReport(0, "a", 7, unresponsive=True),), True),
    ],
    ids=["no report", "a rank died", "a rank is stopped"],
)
def test_a_process_that_held_up_the_start_is_ended_on_its_node_if_it_is_stopped(
    reports: tuple[RankReport, ...], is_held_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray asks it to end first. One was left so, with the bundle that its successor waited for."""
    done: list[Any] = []
    monkeypatch.setattr(rank_actors, "end_hosts", lambda given, _: done.append(len(given)))
    monkeypatch.setattr(rank_actors, "end_stopped", lambda given: done.append(set(given)))
    made = actors_with_a_host(done)
    made.reports = reports
    made.kill()
    assert done == [1, *([{("a", 7)}, "release"] if is_held_up else [])]


@pytest.mark.parametrize("found", [set(), {("a", 7)}], ids=["it is slow", "it is stopped"])
def test_a_start_with_a_process_that_is_stopped_fails_at_once(
    found: set[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], refs))
    monkeypatch.setattr(rank_actors, "find_stopped", lambda given: asked.append(given) or found)
    monkeypatch.setattr(rank_actors, "end_hosts", lambda *_: None)
    monkeypatch.setattr(rank_actors, "end_stopped", lambda given: asked.append("ended"))
    made = actors_with_a_host(asked)
    context = pytest.raises(WorkerGroupStartupFailedError, match="7 on node a")
    with context if found else nullcontext():
        made._require_none_stopped()
    made.kill()
    assert asked == [{("a", 7)}, *(["ended", "release"] if found else [])]


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
