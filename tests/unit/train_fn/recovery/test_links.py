"""Two nodes that do not hear each other: who is named, who makes room, and when a run ends."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.spec.sections import RecoverySpec
from everstep.text.failure import headline, story
from everstep.wire import ErrorKind, Failure, ReasonCode, Verdict
from train_fn.recovery.decision import Decision, PastFailure, decide
from train_fn.recovery.evidence import Evidence, RankError, RankReport
from train_fn.recovery.history import past_failure
from train_fn.recovery.links import (
    ENDED_AFTER,
    MOST_PAIRS,
    MOVED_AFTER,
    Pairs,
    as_json,
    from_json,
    node_to_move,
    pairs_of,
    times_in_a_row,
    words,
)
from train_fn.recovery.outcome import failure_of
from train_fn.recovery.verdict import Judgement, judge

NODES = ("a", "b", "c", "d")
some_pairs = st.frozensets(
    st.sets(st.sampled_from(NODES), min_size=2, max_size=2).map(frozenset), min_size=1, max_size=4
)
histories = st.lists(st.one_of(some_pairs, st.just(frozenset())), max_size=8)


def pair(*nodes: str) -> Pairs:
    return frozenset({frozenset(nodes)})


def gone(rank: int, **facts: object) -> RankReport:
    error = RankError(rank, ErrorKind.COLLECTIVE, "RuntimeError", "gloo", "", 7, "step", rank)
    return RankReport(rank, NODES[rank], 1, error=error, **facts)  # type: ignore[arg-type]


def judged(*ranks: RankReport, control_error: str | None = None, step: int = 7) -> Judgement:
    return judge(Evidence(1, 9.0, ranks, last_step=step, control_error=control_error))


def weighed(
    judgement: Judgement, past: list[PastFailure], dispensable: tuple[str, ...] = ()
) -> Decision:
    return decide(
        judgement,
        past,
        RecoverySpec(),
        backoff_max_s=30.0,
        dispensable=lambda: dispensable,
    )


def past_of(judgement: Judgement) -> PastFailure:
    return PastFailure(
        judgement.verdict, judgement.step, judgement.signature, judgement.node_id, judgement.pairs
    )


APART = (gone(0, unheard=("c",)), gone(1), gone(2, unheard=("a",)))


def test_the_two_are_named_and_no_node_is_blamed() -> None:
    judgement = judged(*APART)
    assert (judgement.verdict, judgement.first_rank, judgement.node_id) == (
        Verdict.UNKNOWN,
        None,
        None,
    )
    assert judgement.exception == "nodes a and c do not hear each other"
    assert judgement.detail["pairs"] == [["a", "c"]]
    assert [line.get("unheard") for line in judgement.detail["ranks"]] == [["c"], None, ["a"]]


def test_a_death_outweighs_a_silence() -> None:
    judgement = judged(gone(0, unheard=("c",)), RankReport(2, "c", 1, died=True))
    assert (judgement.verdict, judgement.first_rank) == (Verdict.WORKER_LOST, 2)
    assert judgement.pairs == frozenset(), "a host without its rank is no broken path"
    assert "pairs" not in judgement.detail


def test_a_start_that_two_nodes_hold_up_names_them_too() -> None:
    reports = (RankReport(0, "a", 1, unheard=("b",)), RankReport(1, "b", 2))
    judgement = judged(*reports, control_error="nodes do not reach each other")
    assert (judgement.verdict, judgement.pairs) == (Verdict.CONTROL_PLANE, pair("a", "b"))
    assert judgement.exception == "nodes do not reach each other"


def test_the_first_time_the_same_nodes_are_tried_again() -> None:
    decision = weighed(judged(*APART), [], ("a", "c"))
    assert (decision.restart, decision.leave_out) == (True, None)


def test_the_second_time_one_of_them_makes_room_for_another_node() -> None:
    first = judged(*APART)
    decision = weighed(first, [past_of(first)], ("a", "b", "c"))
    assert (decision.restart, decision.leave_out) == (True, "c")
    assert decision.action == "restart at once without node c"
    kept = weighed(first, [past_of(first)], ("a", "b"))
    assert kept.leave_out == "a", "the run cannot do without c"


def test_who_fails_with_several_others_is_the_one_to_move() -> None:
    past = [past_of(judged(gone(0, unheard=("b", "c"))))]
    assert weighed(judged(gone(0, unheard=("c",))), past, NODES).leave_out == "a"


def test_without_another_node_the_run_ends_and_names_both_and_what_to_check() -> None:
    judgement = judged(*APART)
    past: list[PastFailure] = []
    for number in range(ENDED_AFTER - 1):
        decision = weighed(judgement, past)
        assert (decision.restart, decision.leave_out) == (True, None), number
        past.append(past_of(judgement))
    decision = weighed(judgement, past)
    assert (decision.restart, decision.reason) == (False, ReasonCode.NO_PROGRESS)
    message = str(decision.message)
    assert "nodes a and c do not hear each other" in message and "5 attempts" in message
    assert all(word in message for word in ("MTU", "firewall", "interface"))
    assert weighed(judgement, past, ("c",)).leave_out == "c", "another node is there after all"
    later = dataclasses.replace(judgement, step=8)
    assert weighed(later, past).restart, "it has made a step since"
    starts = dataclasses.replace(judgement, verdict=Verdict.CONTROL_PLANE)
    assert not weighed(starts, past).restart, "a start that they hold up is no other thing"
    others = [PastFailure(Verdict.WORKER_LOST, 7)] * 4
    assert weighed(judgement, others).restart


def test_a_start_check_has_excluded_a_node_by_itself() -> None:
    judgement = judged(RankReport(0, "a", 1, unheard=("b",)), control_error="no bytes pass")
    assert weighed(judgement, [past_of(judgement)], ("a", "b")).leave_out is None


def test_the_pairs_survive_the_journal_and_are_said_in_plain_words() -> None:
    judgement = judged(*APART)
    evidence = Evidence(1, 9.0, APART, last_step=7)
    failure = failure_of(evidence, judgement, weighed(judgement, []), detect_s=1.0, world_size=3)
    data = json.loads(json.dumps(failure.event_data()))
    read = Failure.of(_Event(data))
    assert past_failure(read).pairs == pair("a", "c")
    assert headline(read).startswith("two nodes lost their connection at step 7")
    assert any("nodes a and c" in each and "MTU" in each for each in story(read))
    assert past_failure(Failure.of(_Event({**data, "evidence": {}}))).pairs == frozenset()


@pytest.mark.parametrize("cut", ["cut", "x"])
def test_a_torn_network_is_named_by_a_few_of_its_pairs_and_moves_the_same_node(cut: str) -> None:
    others = {f"n{number:04}" for number in range(1000)}
    lost = {f"{cut}{number:02}" for number in range(20)}
    pairs = pairs_of(dict.fromkeys(lost, others))
    told = as_json(pairs)
    assert (len(pairs), len(told)) == (20_000, MOST_PAIRS)
    past = from_json(told)
    assert node_to_move(pairs, [past], lost | others) in lost
    assert times_in_a_row(pairs, [(past, 2)], 2) == 2
    assert words(pairs).endswith(" and 19992 more pairs do not hear each other")
    assert len(words(pairs)) < 400


class _Event:
    at, attempt, submission = 9.0, 1, 1

    def __init__(self, data: dict[str, object]) -> None:
        self.data = data


@given(some_pairs, histories, st.sets(st.sampled_from(NODES)))
def test_only_a_node_of_a_pair_that_failed_before_is_moved(
    pairs: Pairs, past: list[Pairs], dispensable: set[str]
) -> None:
    moved = node_to_move(pairs, past, dispensable)
    repeated = {
        node
        for each in pairs
        for node in each
        if sum(each in earlier for earlier in past) >= MOVED_AFTER - 1
    }
    assert (moved is None) == (not repeated & dispensable)
    assert moved is None or moved in repeated & dispensable
