"""The scheduler: single rules by example, and whole lives of a cluster at random."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.wire import ReasonCode, RunStatus
from everstep.wire.team import Quotas
from service.reconciler.capacity import SHRINK_GRACE_S, leaving
from service.reconciler.facts import NodeState, RunFacts
from service.reconciler.schedule import PATIENCE_S, Plan, plan


def run(name: str, at: float = 0.0, **values: Any) -> RunFacts:
    return RunFacts(**{"id": name, "status": RunStatus.QUEUED, "created_at": at, **values})


def sized(name: str, least: int, most: int | None = None, **values: Any) -> RunFacts:
    return run(name, min_workers=least, max_workers=most or least, **values)


def running(name: str, ranks: int, at: float = 0.0, **values: Any) -> RunFacts:
    """A run that began at ``at``."""
    return RunFacts(
        **{
            "id": name,
            "status": RunStatus.RUNNING,
            "created_at": at,
            "submitted_at": at,
            "world_size": ranks,
            "min_workers": ranks,
        }
        | {"max_workers": ranks, "submission": 1, **values}
    )


def cpus(*counts: float) -> tuple[NodeState, ...]:
    return tuple(NodeState(f"n{index}", {"CPU": count}) for index, count in enumerate(counts))


def started(made: Plan) -> list[str]:
    return [admission.run_id for admission in made.admissions if admission.starts]


def message(made: Plan, name: str) -> str:
    [reason] = [admission.reason for admission in made.admissions if admission.run_id == name]
    assert reason is not None
    return reason.message


def test_projects_of_equal_priority_take_turns_by_what_they_use() -> None:
    queued = [run(f"a{index}", float(index), project="a") for index in range(4)]
    queued += [run(f"b{index}", 10.0 + index, project="b") for index in range(4)]
    assert started(plan(queued, [], cpus(4))) == ["a0", "b0", "a1", "b1"]
    assert started(plan(queued, [running("h", 2, project="a")], cpus(6))) == [
        "b0",
        "b1",
        "a0",
        "b2",
    ]


def test_who_has_waited_long_goes_by_age_whatever_the_project_uses() -> None:
    queued = [run("old", 0.0, project="a"), run("young", 1.0, project="b")]
    holding = [running("h", 3, project="a")]
    assert started(plan(queued, holding, cpus(4), now=PATIENCE_S - 1)) == ["young"]
    assert started(plan(queued, holding, cpus(4), now=PATIENCE_S)) == ["old"]


def test_a_small_run_starts_beside_a_large_one_that_it_cannot_delay() -> None:
    holding = [running("h", 2)]
    queued = [sized("large", 3, at=1.0), sized("small", 1, at=2.0)]
    assert started(plan(queued, holding, cpus(4))) == ["small"], "4 CPUs hold large and small"
    assert started(plan(queued, holding, cpus(3))) == [], "3 do not"
    later = [*holding, running("small-before", 1, at=5.0)]
    waits = plan([queued[0], sized("next", 1, at=6.0)], later, cpus(4))
    assert started(waits) == [] and "large is before it" in message(waits, "next"), (
        "what began behind it counts, too"
    )


def test_an_elastic_run_beside_a_waiting_one_may_not_grow_into_its_place() -> None:
    queued = [sized("large", 3, at=1.0), sized("elastic", 1, 3, at=2.0)]
    [large, elastic] = plan(queued, [running("h", 2)], cpus(4)).admissions
    assert (large.starts, elastic.starts, elastic.limit) == (False, True, 1)


def test_quotas_hold_back_their_own_project_only() -> None:
    quotas = {"a": Quotas(max_workers=3), "b": Quotas(max_running=1)}
    queued = [
        sized("a1", 2, project="a"),
        sized("a2", 2, at=1.0, project="a"),
        sized("a3", 1, at=2.0, project="a"),
    ]
    queued += [
        sized("b1", 1, at=3.0, project="b"),
        sized("b2", 1, at=4.0, project="b"),
        sized("c1", 1, at=5.0, project="c"),
    ]
    made = plan(queued, [], cpus(99), quotas)
    assert sorted(started(made)) == ["a1", "b1", "c1"]
    assert "uses up to 2 of at most 3 workers" in message(made, "a2")
    assert "a2 of project a is before it" in message(made, "a3"), (
        "small runs do not take what a large one waits for"
    )
    assert "runs 1 of at most 1" in message(made, "b2")
    [limited] = plan([sized("a", 1, 8, project="a")], [], cpus(99), quotas).admissions
    assert limited.starts and limited.limit == 3
    [never] = plan([sized("a", 4, project="a")], [], cpus(99), quotas).admissions
    assert (
        never.reason is not None
        and never.reason.code is ReasonCode.INFEASIBLE
        and "quota of 3" in never.reason.message
    )


def test_the_lowest_and_youngest_make_room_and_no_more_than_needed() -> None:
    holding = [
        running("low-old", 1, at=1.0, priority=-1),
        running("low-young", 1, at=2.0, priority=-1),
        running("middle", 2, priority=1),
        running("equal", 1, priority=5),
    ]
    made = plan([sized("urgent", 1, priority=5)], holding, cpus(5))
    assert [(one.run_id, one.by, one.to) for one in made.preemptions] == [
        ("low-young", "urgent", None)
    ]
    two = plan([sized("urgent", 2, priority=5)], holding, cpus(5))
    assert {one.run_id for one in two.preemptions} == {"low-young", "low-old"}
    packed = sized("urgent", 2, priority=5, placement_strategy="STRICT_PACK")
    on_nodes = [
        replace(holding[0], node_ids=("n0",)),
        replace(holding[1], node_ids=("n1",)),
        replace(holding[2], node_ids=("n2", "n2")),
    ]
    spared = plan([packed], on_nodes, cpus(1, 1, 2))
    assert [one.run_id for one in spared.preemptions] == ["middle"], (
        "pausing the others would not help"
    )
    assert plan([sized("urgent", 5, priority=5)], holding, cpus(5)).preemptions == (), (
        "nobody is paused in vain"
    )
    assert plan([sized("equal-too", 1, priority=-1)], holding, cpus(5)).preemptions == ()
    stopping = [replace(holding[1], status=RunStatus.STOPPING), *holding[2:], holding[0]]
    assert plan([sized("urgent", 1, priority=5)], stopping, cpus(5)).preemptions == (), (
        "room is on its way"
    )


def elastic(name: str, ranks: int, least: int, **values: Any) -> RunFacts:
    return running(name, ranks, **{"min_workers": least, "priority": -1} | values)


def test_elastic_runs_shrink_before_anybody_is_paused() -> None:
    young, old = elastic("young", 3, 1, at=2.0), elastic("old", 3, 2, at=1.0)
    rigid = running("rigid", 2, at=3.0, priority=-1)
    holding = [young, old, rigid]

    def room_for(ranks: int) -> list[tuple[str, int | None]]:
        return [
            (one.run_id, one.to)
            for one in plan([sized("urgent", ranks)], holding, cpus(8)).preemptions
        ]

    assert room_for(1) == [("young", 1)] and room_for(2) == [("young", 1)], (
        "no more than needed, the youngest first"
    )
    assert room_for(3) == [("young", 1), ("old", 2)]
    assert room_for(4) == [("young", 1), ("rigid", None)], (
        "the youngest is paused, and old need not shrink"
    )
    assert room_for(8) == [("rigid", None), ("young", None), ("old", None)] and room_for(9) == []


def test_what_shrinks_is_on_its_way_and_what_does_not_in_time_is_paused() -> None:
    urgent, small = sized("urgent", 2, at=9.0), sized("small", 1, at=10.0, priority=-2)
    low = elastic("low", 4, 1, shrunk_to=1, shrunk_by="urgent", shrunk_at=10.0)
    waiting = plan([urgent, small], [low], cpus(4), now=11.0)
    assert (waiting.preemptions, waiting.grown, started(waiting)) == ((), (), []), "wait for it"
    done = plan([urgent, small], [replace(low, world_size=1)], cpus(4), now=12.0)
    assert started(done) == ["urgent", "small"] and done.grown == (), (
        "urgent's ranks are not there yet"
    )
    late = plan([urgent], [low], cpus(4), now=10.0 + SHRINK_GRACE_S + 1)
    assert [(one.run_id, one.to) for one in late.preemptions] == [("low", None)]


def test_a_run_that_was_shrunk_may_grow_once_nobody_waits_for_the_room() -> None:
    low = elastic("low", 1, 1, max_workers=4, shrunk_to=1, shrunk_by="urgent", shrunk_at=0.0)
    urgent = running("urgent", 2)
    assert plan([], [low, urgent], cpus(4)).grown == ("low",)
    assert plan([], [low, replace(urgent, world_size=None)], cpus(4)).grown == (), (
        "urgent is still taking what it was given"
    )
    assert plan([], [low, urgent], cpus(3)).grown == (), "there is no room"
    assert plan([sized("next", 2)], [low, urgent], cpus(4)).grown == (), (
        "next would shrink it again"
    )
    assert plan([sized("lower", 2, priority=-2)], [low, urgent], cpus(4)).grown == ("low",)


def test_ranks_that_stay_are_spread_or_packed_as_drivers_choose_them() -> None:
    assert leaving((0, 0, 1), 2, "SPREAD") == [0] and leaving((0, 0, 1), 2, "PACK") == [1]
    assert leaving((0, 1), 3, "SPREAD") == [] and leaving((), 1, "SPREAD") == []
    low = elastic("low", 4, 2, node_ids=("n0", "n0", "n1", "n1"), placement_strategy="PACK")
    packed = sized("urgent", 2, placement_strategy="STRICT_PACK")
    assert [(one.run_id, one.to) for one in plan([packed], [low], cpus(2, 2)).preemptions] == [
        ("low", 2)
    ]
    spread = replace(low, placement_strategy="SPREAD")
    assert [(one.run_id, one.to) for one in plan([packed], [spread], cpus(2, 2)).preemptions] == [
        ("low", None)
    ]


def test_what_is_freed_for_a_run_is_not_taken_by_those_that_made_room() -> None:
    urgent, back = sized("urgent", 2, at=9.0, priority=1), sized("back", 1)
    leaving = replace(running("leaving", 1), status=RunStatus.STOPPING)
    assert started(plan([urgent, back], [leaving], cpus(2))) == [], "one of two has left"
    assert started(plan([urgent, back], [], cpus(2))) == ["urgent"]
    chosen = plan([urgent, back], [running("low", 1)], cpus(2))
    assert (started(chosen), len(chosen.preemptions)) == ([], 1)


# ---------------------------------------------------------------- whole lives

PRIORITIES = st.integers(-1, 1)
SPECS = st.fixed_dictionaries(
    {
        "min_workers": st.integers(1, 4),
        "more": st.integers(0, 3),
        "project": st.sampled_from(["a", "b", "c"]),
        "priority": PRIORITIES,
        "lasts": st.integers(1, 4),
    }
)
QUOTAS = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.builds(
        Quotas,
        max_workers=st.one_of(st.none(), st.integers(0, 5)),
        max_running=st.one_of(st.none(), st.integers(0, 3)),
    ),
)


class Life:
    """A cluster of one-CPU ranks that does what the plan says: runs end after their time, paused
    ones queue again."""

    def __init__(self, nodes: tuple[NodeState, ...], quotas: dict[str, Quotas]) -> None:
        self.nodes, self.quotas = nodes, quotas
        self.capacity = int(sum(node.resources["CPU"] for node in nodes))
        self.now = 0.0
        self.queued: dict[str, RunFacts] = {}
        self.holding: dict[str, RunFacts] = {}
        self.left: dict[str, int] = {}
        self.ended: list[str] = []
        self.num_shrunk = self.num_grown = 0

    def submit(self, name: str, values: dict[str, Any]) -> None:
        self.left[name] = values["lasts"]
        least = values["min_workers"]
        most = least + values["more"]
        self.queued[name] = sized(
            name, least, most, at=self.now, project=values["project"], priority=values["priority"]
        )

    def tick(self) -> Plan:
        for name, found in list(self.holding.items()):
            if found.status == RunStatus.STOPPING:
                del self.holding[name]
                left = {
                    "shrunk_to": None,
                    "shrunk_by": None,
                    "shrunk_at": None,
                    "workers_limit": None,
                    "submitted_at": None,
                }
                self.queued[name] = replace(found, status=RunStatus.QUEUED, world_size=None, **left)
                continue
            if found.shrunk_to is not None and (found.world_size or 0) > found.shrunk_to:
                self.holding[name] = replace(found, world_size=found.shrunk_to)
                self.num_shrunk += 1
            self.left[name] -= 1
            if self.left[name] == 0:
                del self.holding[name]
                self.ended.append(name)
        made = plan(
            list(self.queued.values()),
            list(self.holding.values()),
            self.nodes,
            self.quotas,
            self.now,
        )
        assert made == plan(
            list(self.queued.values()),
            list(self.holding.values()),
            self.nodes,
            self.quotas,
            self.now,
        )
        assert Counter(one.run_id for one in made.admissions) == Counter(self.queued.keys()), (
            "everybody is answered once"
        )
        self.check_work_conserving(made)
        free = self.capacity - sum(found.world_size or 0 for found in self.holding.values())
        for admission in made.admissions:
            if not admission.starts:
                continue
            found = self.queued.pop(admission.run_id)
            ranks = min(free, found.max_workers if admission.limit is None else admission.limit)
            assert ranks >= found.min_workers, "what starts fits"
            free -= ranks
            self.holding[found.id] = replace(
                found,
                status=RunStatus.RUNNING,
                world_size=ranks,
                workers_limit=admission.limit,
                submitted_at=self.now,
                submission=1,
            )
        for preemption in made.preemptions:
            victim, by = self.holding[preemption.run_id], self.queued[preemption.by]
            assert victim.priority < by.priority and victim.status == RunStatus.RUNNING
            if preemption.to is None:
                self.holding[victim.id] = replace(victim, status=RunStatus.STOPPING)
            else:
                assert (victim.world_size or 0) > preemption.to == victim.min_workers, (
                    "only who has more than the least shrinks"
                )
                self.holding[victim.id] = replace(
                    victim, shrunk_to=preemption.to, shrunk_by=by.id, shrunk_at=self.now
                )
        for name in made.grown:
            found = self.holding[name]
            ranks = min(free + (found.world_size or 0), found.workers_limit or found.max_workers)
            free -= ranks - (found.world_size or 0)
            self.holding[name] = replace(
                found, shrunk_to=None, shrunk_by=None, shrunk_at=None, world_size=ranks
            )
            self.num_grown += 1
        self.check_limits()
        self.now += 1.0
        return made

    def check_limits(self) -> None:
        assert sum(found.world_size or 0 for found in self.holding.values()) <= self.capacity
        for project, quota in self.quotas.items():
            mine = [found for found in self.holding.values() if found.project == project]
            assert quota.max_running is None or len(mine) <= quota.max_running
            workers = sum(
                min(found.max_workers, found.workers_limit or found.max_workers) for found in mine
            )
            assert quota.max_workers is None or workers <= quota.max_workers, (
                "whatever they may grow to"
            )

    def check_work_conserving(self, made: Plan) -> None:
        """Where nobody starts although CPUs are free, everybody is too large, at a quota, or would
        delay somebody."""
        if (
            started(made)
            or made.preemptions
            or any(self.gives_back(found) for found in self.holding.values())
        ):
            return
        free = self.capacity - sum(found.world_size or 0 for found in self.holding.values())
        first: RunFacts | None = None
        for admission in made.admissions:
            assert admission.reason is not None
            found = self.queued[admission.run_id]
            if (
                admission.reason.code is ReasonCode.INFEASIBLE
                or "quota" in admission.reason.message
            ):
                continue
            if first is None:
                first = found
                assert found.min_workers > free
            elif found.min_workers <= free:
                began = first.created_at
                later = sum(
                    one.world_size or 0
                    for one in self.holding.values()
                    if (one.submitted_at or 0.0) > began
                )
                assert self.capacity - later - found.min_workers < first.min_workers, (
                    f"{found.id} would delay nobody"
                )

    @staticmethod
    def gives_back(found: RunFacts) -> bool:
        return found.status == RunStatus.STOPPING or (
            found.shrunk_to is not None and (found.world_size or 0) > found.shrunk_to
        )

    def can_ever_start(self, found: RunFacts) -> bool:
        quota = self.quotas.get(found.project, Quotas())
        most = min(self.capacity, self.capacity if quota.max_workers is None else quota.max_workers)
        return found.min_workers <= most and quota.max_running != 0


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    QUOTAS,
    st.lists(st.lists(SPECS, max_size=3), min_size=1, max_size=12),
)
def test_nothing_is_exceeded_and_everybody_gets_a_turn(
    sizes: list[int], quotas: dict[str, Quotas], arrivals: list[list[dict[str, Any]]]
) -> None:
    """Capacity and quotas hold at every moment; once nobody new comes, everybody who can ever start
    ends in bounded time."""
    life = Life(cpus(*map(float, sizes)), quotas)
    names = iter(range(10_000))
    for batch in arrivals:
        for values in batch:
            life.submit(f"r{next(names):03d}", values)
        life.tick()
    for _ in range(60 + 12 * len(life.left)):
        life.tick()
    left = [
        found
        for found in (*life.queued.values(), *life.holding.values())
        if life.can_ever_start(found)
    ]
    assert left == [], "these starve"


@pytest.mark.parametrize("lasts", [1, 3])
@pytest.mark.parametrize("size", [2, 4, 6])
def test_a_large_run_is_not_starved_by_a_project_that_uses_less(
    size: int, lasts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Project a holds one CPU for ever and waits for the others; b, which uses less at times,
    always has a small run."""
    monkeypatch.setattr("service.reconciler.schedule.PATIENCE_S", 30.0)
    life = Life(cpus(float(size)), {})
    life.submit(
        "holder", {"min_workers": 1, "more": 0, "project": "a", "priority": 0, "lasts": 10_000}
    )
    life.tick()
    for index in range(60 + 4 * lasts):
        life.submit(
            f"small{index}",
            {"min_workers": 1, "more": 0, "project": "b", "priority": 0, "lasts": lasts},
        )
        if index == 3:
            life.submit(
                "large",
                {"min_workers": size - 1, "more": 0, "project": "a", "priority": 0, "lasts": 1},
            )
        life.tick()
        if "large" in life.holding:
            return
    raise AssertionError("the large run starves")
