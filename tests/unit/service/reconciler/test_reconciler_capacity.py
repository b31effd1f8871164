"""Admission: who may start on what is free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from hypothesis import strategies as st

from everstep.wire import ReasonCode, RunStatus
from service.reconciler.facts import NodeState, RunFacts
from service.reconciler.schedule import Admission, plan


def run(name: str, **values: Any) -> RunFacts:
    return RunFacts(**{"id": name, "status": RunStatus.QUEUED, "created_at": 0.0, **values})


def nodes(*cpus: float, gpus: float = 0) -> tuple[NodeState, ...]:
    return tuple(
        NodeState(f"n{i}", {"CPU": count, "GPU": gpus, "memory": 1e9})
        for i, count in enumerate(cpus)
    )


def admit(
    queued: Sequence[RunFacts], holding: Sequence[RunFacts], nodes: Sequence[NodeState]
) -> tuple[Admission, ...]:
    return plan(queued, holding, nodes).admissions


def code(admission: Admission) -> ReasonCode | None:
    return admission.reason.code if admission.reason else None


def test_one_that_can_never_fit_says_what_is_missing() -> None:
    [admission] = admit(
        [run("a", min_workers=5, max_workers=5, worker={"CPU": 2})], [], nodes(0, 2, 3)
    )
    assert code(admission) is ReasonCode.INFEASIBLE
    assert admission.reason is not None
    assert "room for 2" in admission.reason.message
    assert "6 CPU more" in admission.reason.message


def test_resources_do_not_add_up_over_nodes() -> None:
    [admission] = admit([run("a", worker={"CPU": 2})], [], nodes(1, 1))
    assert code(admission) is ReasonCode.INFEASIBLE


def test_a_gpu_that_is_asked_for_counts() -> None:
    [no_gpu] = admit([run("a", use_gpu=True)], [], nodes(4))
    assert code(no_gpu) is ReasonCode.INFEASIBLE
    assert no_gpu.reason is not None and "1 GPU" in no_gpu.reason.message
    assert admit([run("a", use_gpu="auto", max_workers=2, min_workers=2)], [], nodes(4))[0].starts
    [auto] = admit([run("a", use_gpu="auto", max_workers=3, min_workers=3)], [], nodes(4, gpus=2))
    assert code(auto) is ReasonCode.INFEASIBLE


def test_strict_strategies_bound_the_room() -> None:
    spread, pack = (
        run("a", min_workers=3, max_workers=3, placement_strategy=f"STRICT_{word}")
        for word in ("SPREAD", "PACK")
    )
    assert not admit([spread], [], nodes(4, 4))[0].starts
    assert admit([spread], [], nodes(1, 1, 1))[0].starts
    assert admit([pack], [], nodes(1, 3))[0].starts
    assert not admit([pack], [], nodes(2, 2))[0].starts


def test_runs_hold_what_they_may_use_until_their_size_is_known() -> None:
    starting = run("a", status=RunStatus.STARTING, max_workers=3)
    waiting = run("b")
    assert code(admit([waiting], [starting], nodes(1, 1, 1))[0]) is ReasonCode.WAITING_FOR_CAPACITY
    small = run("a", status=RunStatus.RUNNING, max_workers=3, world_size=2)
    assert admit([waiting], [small], nodes(1, 1, 1))[0].starts


def test_priority_goes_before_age_and_nobody_overtakes() -> None:
    queue = [
        run("old", created_at=1.0),
        run("urgent", created_at=2.0, priority=5, min_workers=2, max_workers=2),
    ]
    holder = run("h", status=RunStatus.RUNNING, world_size=1)
    first, second = admit(queue, [holder], nodes(1, 1))
    assert (first.run_id, code(first)) == ("urgent", ReasonCode.WAITING_FOR_CAPACITY)
    assert (second.run_id, code(second)) == ("old", ReasonCode.WAITING_FOR_CAPACITY)
    assert second.reason is not None and "urgent" in second.reason.message


def test_what_can_never_fit_holds_nobody_back() -> None:
    queue = [run("big", created_at=1.0, min_workers=9, max_workers=9), run("small", created_at=2.0)]
    big, small = admit(queue, [], nodes(1))
    assert code(big) is ReasonCode.INFEASIBLE
    assert small.starts


workers = st.builds(
    lambda least, more, cpus, priority, at: {
        "min_workers": least,
        "max_workers": least + more,
        "worker": {"CPU": cpus},
        "priority": priority,
        "created_at": float(at),
    },
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(-1, 1),
    st.integers(0, 3),
)


def marked(
    mark: Literal["cordoned", "draining"], *cpus: float, first: int = 10
) -> tuple[NodeState, ...]:
    return tuple(NodeState(f"n{first + i}", {"CPU": count}, mark) for i, count in enumerate(cpus))


def test_marked_nodes_are_no_room_but_could_be_again() -> None:
    [admission] = admit(
        [run("a", min_workers=2, max_workers=2)], [], (*nodes(1), *marked("cordoned", 1))
    )
    assert code(admission) is ReasonCode.WAITING_FOR_CAPACITY
    assert (
        admission.reason is not None
        and "1 of 2 nodes are cordoned or draining" in admission.reason.message
    )
    assert "room for 1 in all" in admission.reason.message
    [hopeless] = admit(
        [run("a", min_workers=3, max_workers=3)], [], (*nodes(1), *marked("cordoned", 1))
    )
    assert code(hopeless) is ReasonCode.INFEASIBLE
    assert admit([run("a")], [], (*nodes(1), *marked("draining", 4)))[0].starts


def test_a_run_that_needs_marked_nodes_holds_nobody_back() -> None:
    first, second = run("a", min_workers=2, max_workers=2), run("b", created_at=1.0)
    admissions = admit([first, second], [], (*nodes(1), *marked("draining", 1)))
    assert [admission.starts for admission in admissions] == [False, True]


def test_ranks_on_a_cordoned_node_stay_and_those_on_a_draining_one_need_other_room() -> None:
    holder = run("a", status=RunStatus.RUNNING, world_size=2, max_workers=2, node_ids=("n0", "n10"))
    assert admit([run("b", created_at=1.0)], [holder], (*nodes(1, 1), *marked("cordoned", 1)))[
        0
    ].starts
    [waits] = admit([run("b", created_at=1.0)], [holder], (*nodes(1, 1), *marked("draining", 1)))
    assert code(waits) is ReasonCode.WAITING_FOR_CAPACITY
