"""Verdicts and budgets: pure rules over made-up evidence."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire import ErrorKind, Verdict
from train_fn.recovery.evidence import (
    Evidence,
    RankError,
    RankReport,
)
from train_fn.recovery.verdict import ALL_DIED, Judgement, judge


def error(
    rank: int, kind: ErrorKind, at: float, step: int = 10, message: str = "it broke"
) -> RankError:
    return RankError(rank, kind, "ValueError", message, 'File "task.py", line 3', step, "step", at)


def report(rank: int, **facts: object) -> RankReport:
    return RankReport(rank=rank, node_id=f"n{rank}", pid=100 + rank, **facts)  # type: ignore[arg-type]


def judged(*ranks: RankReport, control_error: str | None = None) -> Judgement:
    return judge(
        Evidence(attempt=1, noticed_at=50.0, ranks=ranks, last_step=12, control_error=control_error)
    )


def test_survivors_collective_errors_are_never_blamed() -> None:
    result = judged(
        report(0, error=error(0, ErrorKind.COLLECTIVE, 1.0)), report(1, died=True, death="killed")
    )
    assert (result.verdict, result.first_rank, result.node_id) == (Verdict.WORKER_LOST, 1, "n1")
    assert result.exception is None
    assert result.step == 12, "what the journal knows"
    early = dataclasses.replace(error(0, ErrorKind.STORAGE, 1.0), step=None)
    assert judged(report(0, error=early)).step == 12


def test_a_dead_rank_on_an_unreachable_node_is_a_lost_node() -> None:
    result = judged(
        report(0, died=True),
        report(2, died=True, node_alive=False),
        report(1, error=error(1, ErrorKind.COLLECTIVE, 1.0)),
    )
    assert (result.verdict, result.first_rank) == (Verdict.NODE_LOST, 2)


@pytest.mark.parametrize(
    ("ranks", "signature"),
    [
        ([{"died": True}, {"died": True}], ALL_DIED),
        ([{"died": True}, {"error": error(1, ErrorKind.COLLECTIVE, 1.0)}], None),
        ([{"died": True}, {"died": True, "node_alive": False}], None),
        ([{"died": True, "death": "NODE_OUT_OF_MEMORY"}, {"died": True}], None),
        ([{"died": True}], None),
    ],
)
def test_the_death_of_all_ranks_on_nodes_that_live_is_told_apart(
    ranks: list[dict[str, object]], signature: str | None
) -> None:
    judgement = judged(*(report(rank, **facts) for rank, facts in enumerate(ranks)))
    assert judgement.signature == judgement.detail.get("signature") == signature


def test_the_earliest_rank_that_raised_by_itself_is_first() -> None:
    result = judged(
        report(0, error=error(0, ErrorKind.USER, 7.0)),
        report(1, error=error(1, ErrorKind.COLLECTIVE, 1.0)),
        report(2, error=error(2, ErrorKind.USER, 6.0)),
    )
    assert (result.verdict, result.first_rank, result.exception) == (
        Verdict.USER_ERROR,
        2,
        "ValueError: it broke",
    )


def test_what_a_survivor_raises_does_not_hide_a_death() -> None:
    result = judged(
        report(0, error=error(0, ErrorKind.USER, 1.0, message="iterator ended")),
        report(1, died=True),
    )
    assert (result.verdict, result.first_rank) == (Verdict.WORKER_LOST, 1)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"died": True, "death": "Worker exit type: NODE_OUT_OF_MEMORY"}, Verdict.OUT_OF_MEMORY),
        ({"died": True, "preempted": True, "node_alive": False}, Verdict.PREEMPTION),
        ({"died": True, "node_draining": True}, Verdict.PREEMPTION),
        ({"unresponsive": True}, Verdict.HANG),
        ({"error": error(0, ErrorKind.STORAGE, 1.0)}, Verdict.STORAGE),
        ({"error": error(0, ErrorKind.OUT_OF_MEMORY, 1.0)}, Verdict.OUT_OF_MEMORY),
        ({"error": error(0, ErrorKind.COLLECTIVE, 1.0)}, Verdict.UNKNOWN),
    ],
)
def test_each_evidence_has_its_verdict(facts: dict[str, object], verdict: Verdict) -> None:
    assert judged(report(0, **facts)).verdict is verdict


@pytest.mark.parametrize(("is_unproven", "first"), [(False, 1), (True, None)])
def test_a_hang_says_why_it_was_taken_for_one_whether_or_not_anybody_is_blamed(
    is_unproven: bool, first: int | None
) -> None:
    why = "no sign of life for 12.8 s; set recovery.hang_timeout_s to more"
    result = judged(
        report(0, error=error(0, ErrorKind.COLLECTIVE, 1.0)),
        report(1, unresponsive=True, is_unproven=is_unproven, hang=why),
    )
    assert (result.verdict, result.first_rank, result.exception) == (Verdict.HANG, first, why)


def test_who_stays_behind_when_all_others_left_is_what_they_waited_for() -> None:
    result = judged(
        report(0, error=error(0, ErrorKind.COLLECTIVE, 1.0)), report(1, still_running=True)
    )
    assert (result.verdict, result.first_rank) == (Verdict.HANG, 1)


def test_who_stays_behind_inside_a_collective_waits_as_the_others_did() -> None:
    """A line between two hosts is cut: each rank hears of it in its own time, and nobody is
    stuck."""
    result = judged(
        report(0, error=error(0, ErrorKind.COLLECTIVE, 1.0)),
        report(1, still_running=True, held_up=True),
    )
    assert (result.verdict, result.first_rank) == (Verdict.UNKNOWN, None)
    assert [line["state"] for line in result.detail["ranks"]] == ["collateral", "held up"]


def test_an_error_of_the_controller_alone_is_the_control_planes() -> None:
    assert judged(control_error="RuntimeError: snapshot").verdict is Verdict.CONTROL_PLANE


@given(
    st.lists(st.sampled_from(["died", "user", "collective", "left"]), min_size=1, max_size=6),
    st.randoms(),
)
def test_a_rank_is_blamed_only_on_evidence_of_its_own(kinds: list[str], rng: object) -> None:
    facts: dict[str, dict[str, object]] = {"died": {"died": True}, "left": {}}
    ranks = [
        report(rank, **facts[kind])
        if kind in facts
        else report(rank, error=error(rank, ErrorKind(kind), float(-rank)))
        for rank, kind in enumerate(kinds)
    ]
    first = judged(*ranks).first_rank
    blamable = "died" if "died" in kinds else "user"
    assert (first is None) == (blamable not in kinds)
    assert first is None or kinds[first] == blamable


def test_a_signature_survives_addresses_and_numbers_but_not_another_place() -> None:
    def at(message: str, line: int) -> str:
        return RankError(
            0, ErrorKind.USER, "E", message, f'File "t.py", line {line}', 1, None, 0.0
        ).signature

    assert at("<obj at 0x7f1> is 3 long", 5) == at("<obj at 0x9ab2> is 41 long", 5)
    assert at("bad", 5) != at("bad", 6)


def test_a_hang_without_evidence_of_who_hangs_names_nobody() -> None:
    """All ranks of a group on GPUs sit in one call: an innocent node must not be counted out."""
    given_up = report(2, unresponsive=True, is_unproven=True, hang="no sign of life for 60 s")
    result = judged(report(0, still_running=True, held_up=True), given_up)
    assert (result.verdict, result.first_rank, result.node_id) == (Verdict.HANG, None, None)
    assert result.exception == "no sign of life for 60 s", "what the limit was is told all the same"
    proven = report(1, unresponsive=True)
    result = judged(proven, given_up)
    assert (result.verdict, result.first_rank, result.node_id) == (Verdict.HANG, 1, "n1")
