"""When alerts trigger and are resolved, for any course of a run."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from everstep.wire import TERMINAL_STATUSES, RunStatus, Straggler
from everstep.wire.alerts import AlertWhen
from service.annexes.alerts.rules import HOUR_S, AlertFacts, IncidentChanges, changes, holding
from service.model.rows import to_time


@dataclass(frozen=True)
class Rule:
    when: AlertWhen
    more_than: int | None = None
    stalled_s: float | None = None


RULES = (
    Rule("failed"),
    Rule("finished"),
    Rule("recovered", more_than=2),
    Rule("straggler"),
    Rule("stalled", stalled_s=600.0),
)
STATUSES = sorted(RunStatus)


def slow(rank: int) -> Straggler:
    return Straggler(
        at=to_time(0.0),
        attempt=1,
        rank=rank,
        node_id="n",
        step=1,
        own_s=0.2,
        peers_s=0.1,
        skew=2.0,
        ended_at=None,
    )


times = st.floats(0, 3 * HOUR_S)
facts = st.builds(
    AlertFacts,
    st.sampled_from(STATUSES),
    st.lists(times, max_size=5).map(tuple),
    st.frozensets(st.integers(0, 3), max_size=3).map(lambda ranks: tuple(map(slow, ranks))),
    st.none() | times,
)
courses = st.lists(st.tuples(facts, st.floats(0, HOUR_S)), max_size=12)


@given(st.sampled_from(RULES), courses)
def test_each_incident_begins_once_and_ends_once(
    rule: Rule, course: list[tuple[AlertFacts, float]]
) -> None:
    open_ones: frozenset[str] = frozenset()
    now = 0.0
    for found, later in course:
        now += later
        change = changes(rule, found, now, open_ones)
        assert not open_ones & set(change.triggered), "what is open is not triggered again"
        assert set(change.resolved) <= open_ones, "what is not open is not resolved"
        open_ones = (open_ones | set(change.triggered)) - set(change.resolved)
        assert open_ones == holding(rule, found, now)
        assert changes(rule, found, now, open_ones) == IncidentChanges(), (
            "nothing new, nothing to send"
        )


@given(st.sampled_from(RULES), facts, st.floats(0, HOUR_S), st.floats(0, 9 * HOUR_S))
def test_the_end_of_a_run_is_final_and_ends_all_else(
    rule: Rule, found: AlertFacts, now: float, later: float
) -> None:
    held = holding(rule, found, now)
    if found.status not in TERMINAL_STATUSES:
        assert rule.when not in ("failed", "finished") or not held
        return
    assert held == holding(rule, found, now + later)
    assert bool(held) == (
        rule.when == "finished" or (rule.when == "failed" and found.status == RunStatus.FAILED)
    )


@given(st.integers(0, 5), st.lists(st.floats(0, HOUR_S), max_size=8))
def test_recoveries_count_for_an_hour(most: int, ages: list[float]) -> None:
    rule, now = Rule("recovered", more_than=most), 10 * HOUR_S
    found = AlertFacts(RunStatus.RUNNING, tuple(now - age for age in ages))
    young = sum(now - HOUR_S < now - age for age in ages)
    assert bool(holding(rule, found, now)) == (young > most)
    assert not holding(rule, found, now + HOUR_S + 1)


def test_each_slow_rank_is_an_incident_of_its_own() -> None:
    rule = Rule("straggler")
    found = AlertFacts(RunStatus.RUNNING, slow=(slow(1), slow(3)))
    change = changes(rule, found, 0.0, frozenset({"rank 1", "rank 2"}))
    assert change == IncidentChanges(("rank 3",), ("rank 2",))


def test_a_run_stalls_where_it_should_make_steps() -> None:
    rule = Rule("stalled", stalled_s=600.0)
    for status in STATUSES:
        works = status in ("STARTING", "RUNNING", "RECOVERING")
        found = AlertFacts(status, progressed_at=1000.0)
        assert bool(holding(rule, found, 1600.0)) == works and not holding(rule, found, 1599.0)
    assert not holding(rule, AlertFacts(RunStatus.RUNNING), 1e9), "it reports no steps"
