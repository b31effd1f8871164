"""What the controller's policy makes of nodes that are cordoned or draining under a group that
trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from ray.train import ScalingConfig

from everstep.wire.events import EventKind
from train_fn.ray_train.ray_internals import NoopDecision, ResizeDecision
from train_fn.ray_train.scaling import GrowthRule, LiveScalingPolicy
from train_fn.recovery.hang import AttemptProgress
from train_fn.recovery.links import SlowNodes, SlowRank, Speeds
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView

SETTINGS = RecoverySettings(resize_interval_s=0.0, growth_settle_s=0.0, growth_cooldown_s=0.0)
TRAINING, LEFT = SimpleNamespace(finished=False), SimpleNamespace(finished=True)


class Journal:
    """Takes what the policy tells, in the journal's place."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, dict[str, Any]]] = []
        self.attempt, self.progress = 1, AttemptProgress(attempt=1)

    def emit(self, kind: EventKind, data: dict[str, Any], attempt: int | None = None) -> None:
        self.events.append((kind, data))


@dataclass
class Cluster:
    """One-CPU nodes as the policy sees them, and the nodes of the run's ranks."""

    nodes: dict[str, NodeView]
    ranks: tuple[str, ...]

    @classmethod
    def of(cls, names: str, ranks: str) -> Cluster:
        taken = set(ranks)
        views = {
            name: NodeView(
                name, "127.0.0.1", 1, {"CPU": 1.0}, {"CPU": 0.0 if name in taken else 1.0}
            )
            for name in names
        }
        return cls(views, tuple(ranks))

    def mark(self, name: str, **facts: bool | float) -> None:
        self.nodes[name] = replace(self.nodes[name], **facts)  # type: ignore[arg-type]

    def look(self) -> tuple[NodeView, ...]:
        return tuple(self.nodes.values())

    def held(self, living: Any) -> dict[str, int]:
        return {name: self.ranks.count(name) for name in self.ranks if name in living}

    @property
    def group(self) -> Any:
        workers = [SimpleNamespace(metadata=SimpleNamespace(node_id=name)) for name in self.ranks]
        return SimpleNamespace(workers=workers, num_workers=len(workers), start_time=0.0)


def policy_on(
    cluster: Cluster,
    workers: tuple[int, int],
    journal: Journal,
    limit: Callable[[], int | None] = lambda: None,
    growth: GrowthRule | None = None,
    slow_nodes: SlowNodes | None = None,
) -> LiveScalingPolicy:
    config = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1})
    growth = growth or GrowthRule("auto", lambda: 3600.0, lambda: True)
    return LiveScalingPolicy(  # type: ignore[arg-type]
        config, SETTINGS, journal, cluster.look, cluster.held, growth, limit, slow_nodes
    )


@pytest.fixture
def journal() -> Journal:
    return Journal()


def test_a_cordon_moves_and_shrinks_nothing(journal: Journal) -> None:
    cluster = Cluster.of("abc", ranks="ab")
    policy = policy_on(cluster, (1, 2), journal)
    cluster.mark("a", cordoned=True)
    for _ in range(3):
        assert isinstance(
            policy.make_decision_for_running_worker_group(cluster.group, TRAINING), NoopDecision
        )
    assert policy.wanted is None and policy.draining == frozenset()


def test_a_restart_for_another_reason_leaves_the_cordoned_node(journal: Journal) -> None:
    cluster = Cluster.of("abc", ranks="ab")
    policy = policy_on(cluster, (1, 3), journal)
    cluster.mark("a", cordoned=True)
    decision = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, ResizeDecision) and decision.num_workers == 2
    cluster.mark("c", cordoned=True)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 1


def test_a_group_does_not_grow_onto_a_node_that_is_closed_before_its_rank_is_ready(
    journal: Journal,
) -> None:
    cluster = Cluster.of("abcd", ranks="ab")
    policy = policy_on(cluster, (1, 4), journal)
    wanted = []
    for closed in ("", "", "c", "d"):
        if closed:
            cluster.mark(closed, cordoned=True)
        policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
        wanted.append(policy.wanted)
    assert wanted == [None, 4, 3, None]


def test_a_drains_deadline_counts_where_ranks_are(journal: Journal) -> None:
    cluster = Cluster.of("abc", ranks="ab")
    policy = policy_on(cluster, (1, 2), journal)
    cluster.mark("c", draining=True, drain_deadline=50.0)
    cluster.mark("a", draining=True)
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert not policy.must_have_left(1e9), "nobody said when"
    cluster.mark("b", draining=True, drain_deadline=100.0)
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert [policy.must_have_left(now) for now in (99.0, 100.0)] == [False, True]


def test_a_drain_asks_the_ranks_to_leave_at_once(journal: Journal) -> None:
    cluster = Cluster.of("abc", ranks="ab")
    policy = policy_on(cluster, (1, 2), journal)
    cluster.mark("c", draining=True)
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert policy.wanted is None, "a node without a rank of this run is no matter"
    cluster.mark("c", draining=False)
    cluster.mark("a", draining=True)
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert (policy.wanted, policy.draining) == (2, frozenset("a"))
    decision = policy.make_decision_for_running_worker_group(cluster.group, LEFT)
    assert (
        isinstance(decision, ResizeDecision) and decision.num_workers == 2 and policy.wanted is None
    )


def test_ranks_leave_a_draining_node_though_there_is_no_other(journal: Journal) -> None:
    cluster = Cluster.of("ab", ranks="ab")
    policy = policy_on(cluster, (2, 2), journal)
    cluster.mark("a", draining=True)
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert policy.wanted == 1
    decision = policy.make_decision_for_running_worker_group(cluster.group, LEFT)
    assert isinstance(decision, ResizeDecision), (
        "the group must end, or its processes would stay on the node"
    )
    assert (
        isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
        and policy.waiting
    )
    [(kind, data)] = journal.events
    assert (kind, data["code"], data["missing"]) == (
        EventKind.WAITING,
        "waiting_for_capacity",
        {"CPU": 1.0},
    )


def test_a_run_that_is_limited_saves_leaves_and_comes_back_smaller_and_grows_once_it_may(
    journal: Journal,
) -> None:
    cluster, limit = Cluster.of("abcd", ranks="abc"), 1
    policy = policy_on(cluster, (2, 3), journal, lambda: limit or None)
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert policy.wanted == 2, "never fewer than it needs"
    assert policy.make_decision_for_running_worker_group(cluster.group, LEFT).num_workers == 2
    cluster.ranks = ("a", "b")
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert policy.wanted is None, "it does not grow"
    limit = 0
    for _ in range(2):
        policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert policy.wanted == 3


@pytest.mark.parametrize(
    ("workers", "expected"), [((1, 2), ["a", "b", "c"]), ((2, 2), ["a", "b", "c"]), ((3, 3), [])]
)
def test_a_node_is_dispensable_if_the_smallest_group_fits_on_the_others(
    workers: tuple[int, int], expected: list[str], journal: Journal
) -> None:
    assert policy_on(Cluster.of("abc", ranks="ab"), workers, journal).dispensable() == expected


@pytest.mark.parametrize("mark", [{"cordoned": True}, {"reachable": False}, {"draining": True}])
def test_nodes_that_take_no_ranks_replace_none(mark: dict[str, bool], journal: Journal) -> None:
    cluster = Cluster.of("abc", ranks="ab")
    cluster.mark("c", **mark)
    assert policy_on(cluster, (2, 2), journal).dispensable() == ["c"]


def test_nobody_is_dispensable_while_the_nodes_cannot_be_read(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise RuntimeError("the GCS does not answer")

    policy = policy_on(Cluster.of("abc", ranks="ab"), (1, 2), journal)
    monkeypatch.setattr(policy, "_read_nodes", fail)
    assert policy.dispensable() == []


def rule(every_s: float | Literal["auto"], mtbf_s: float = 3600.0) -> GrowthRule:
    return GrowthRule(every_s, lambda: mtbf_s, lambda: True)


def test_growths_keep_the_time_between_them_that_the_spec_asks_for() -> None:
    growth = rule(600.0)
    assert growth.allows(2, 3, now=5.0), "the first one waits for nothing"
    growth.grows(5.0)
    assert [growth.allows(3, 4, now) for now in (10.0, 604.9, 605.0)] == [False, False, True]


def test_a_growth_waits_for_the_first_step_of_the_one_before() -> None:
    stepped = False
    growth = GrowthRule("auto", lambda: 3600.0, lambda: stepped)
    growth.grows(0.0)
    assert not growth.allows(2, 3, now=100.0)
    stepped = True
    assert growth.allows(2, 3, now=101.0)


@pytest.mark.parametrize(
    ("ranks", "joining", "mtbf_s", "allowed"),
    [
        (2, 1, 60.0, True),
        (1000, 8, 3600.0, True),
        (100_000, 8, 1000.0, False),
        (100_000, 600, 1000.0, True),
    ],
)
def test_by_itself_a_group_grows_where_that_is_worth_the_pause(
    ranks: int, joining: int, mtbf_s: float, allowed: bool
) -> None:
    growth = rule("auto", mtbf_s)
    growth.grows(0.0)
    growth.allows(ranks, ranks, now=5.0)  # the first step after 5 s
    assert growth.allows(ranks, ranks + joining, now=6.0) is allowed


def test_the_pause_of_a_growth_is_measured_when_it_ends_however_late_the_next_node_comes(
    journal: Journal,
) -> None:
    cluster, growth = Cluster.of("ab", ranks="ab"), rule("auto", mtbf_s=3600.0)
    growth.grows(time.monotonic())
    policy = policy_on(cluster, (1, 4), journal, growth=growth)
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert growth.allows(1000, 1001, now=time.monotonic() + 100_000.0)


def test_a_group_stays_as_it_is_until_its_rule_allows_more_ranks(journal: Journal) -> None:
    cluster, growth = Cluster.of("abcd", ranks="ab"), rule(1e9)
    growth.grows(0.0)
    policy = policy_on(cluster, (1, 4), journal, growth=growth)
    for _ in range(3):
        policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert policy.wanted is None
    cluster.mark("a", draining=True)
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert policy.wanted == 3, "who must leave anyway comes back as many as there is room for"


def test_ranks_leave_the_node_of_a_slow_one_for_an_hour_if_all_fit_elsewhere(
    journal: Journal,
) -> None:
    cluster, slow_nodes = Cluster.of("abc", ranks="ab"), SlowNodes(moves=True)
    look = cluster.look
    cluster.look = lambda: slow_nodes.mark(look(), time.monotonic())  # type: ignore[method-assign]
    policy = policy_on(cluster, (1, 2), journal, slow_nodes=slow_nodes)
    slow = Speeds((SlowRank(1, "b", 2.0),))
    journal.progress = AttemptProgress(attempt=1, speeds=slow)
    cluster.mark("c", available={"CPU": 0.0})
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert (policy.wanted, journal.events) == (None, []), "there is no room"
    cluster.mark("c", available={"CPU": 1.0})
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert (policy.wanted, policy.draining, policy.only_moves) == (2, {"b"}, True)
    facts = {"rank": 1, "node_id": "b", "skew": 2.0, "stays": None}
    assert journal.events == [(EventKind.STRAGGLER_MOVED, facts)]
    assert policy.make_decision_for_running_worker_group(cluster.group, LEFT).num_workers == 2
    cluster.ranks = ("a", "c")
    journal.attempt, journal.progress = 2, AttemptProgress(attempt=2, speeds=Speeds((), 2))
    policy.make_decision_for_running_worker_group(cluster.group, TRAINING)
    assert policy.wanted is None
    assert journal.events[1:] == [(EventKind.STRAGGLER_MOVED, {**facts, "stays": True})]
    cluster.nodes.pop("c")
    cluster.mark("b", available={"CPU": 1.0})
    cluster.ranks = ("a",)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2, (
        "a slow node is better than none"
    )
