"""One model of a failure, from its event to the words about it, also of older and newer drivers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.text import failure as failure_words
from everstep.wire import ErrorKind, Event, Failure, Verdict

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def event(**data: Any) -> Event:
    return Event(seq=1, at=AT, kind="failure", submission=2, attempt=3, data=data)


failures = st.builds(
    Failure,
    at=st.just(AT),
    attempt=st.just(3),
    submission=st.just(2),
    verdict=st.sampled_from(Verdict),
    first_rank=st.none() | st.integers(0, 9),
    node_id=st.none() | st.just("node-2-long-name"),
    step=st.none() | st.integers(0, 99),
    exception=st.none() | st.just("ValueError: größe\nnext line"),
    evidence=st.sampled_from([{}, {"kind": "user"}, {"ranks": [{"rank": 0, "state": "died"}]}]),
    action=st.just("restart"),
    budget=st.none() | st.just("storage"),
    steps_lost=st.none(),
    detect_s=st.none() | st.just(0.25),
    recovery_s=st.none(),
    world_size_before=st.none() | st.just(4),
    world_size_after=st.none(),
)


@given(failures)
def test_an_event_carries_the_whole_failure(failure: Failure) -> None:
    assert Failure.of(event(**failure.event_data())) == failure


@given(failures)
def test_every_form_of_words_is_of_the_same_parts(failure: Failure) -> None:
    rank = "" if failure.first_rank is None else f" of rank {failure.first_rank}"
    assert failure_words.who(failure) == f"{failure.verdict.value}{rank}"
    said = "" if failure.exception is None else "ValueError: größe"
    assert failure_words.line(failure) == failure_words.who(failure) + (said and f": {said}")
    headline, story = failure_words.headline(failure), failure_words.story(failure)
    assert headline.endswith(f"(attempt 3, verdict {failure.verdict.value})")
    assert "\n" not in headline + "".join(story)
    assert (f"cause: {said}" in story) == bool(said)
    assert story[-1].startswith("then: restart")


def test_what_an_older_driver_did_not_write_is_null() -> None:
    found = Failure.of(event(verdict="hang", first_rank=1))
    assert (found.verdict, found.first_rank, found.step, found.evidence, found.action) == (
        Verdict.HANG,
        1,
        None,
        {},
        "",
    )
    assert (found.at, found.attempt, found.submission) == (AT, 3, 2)


@pytest.mark.parametrize("verdict", ["of_a_newer_driver", None])
def test_an_unknown_verdict_is_told_as_unknown(verdict: str | None) -> None:
    found = Failure.of(event(verdict=verdict, first_rank=0))
    assert found.verdict is Verdict.UNKNOWN
    assert "the evidence does not show why" in failure_words.headline(found)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"verdict": "worker_lost", "evidence": {"kind": "device"}}, ErrorKind.DEVICE),
        ({"verdict": "worker_lost", "evidence": {"kind": "of a newer driver"}}, None),
        ({"verdict": "worker_lost"}, None),
    ],
)
def test_the_kind_is_what_the_rank_said(data: dict[str, Any], kind: ErrorKind | None) -> None:
    assert Failure.of(event(**data)).kind is kind


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("loader_lost", "a loader process of rank 1 on node node-2 died at step 7"),
        (
            "exited",
            "the run's own code ended the process of rank 1 on node node-2 at step 7",
        ),
        (None, "rank 1 on node node-2 died at step 7"),
    ],
)
def test_a_lost_worker_says_what_was_lost(kind: str | None, what: str) -> None:
    evidence = {} if kind is None else {"kind": kind}
    data = {"verdict": "worker_lost", "first_rank": 1, "node_id": "node-2", "step": 7}
    found = failure_words.headline(Failure.of(event(**data, evidence=evidence)))
    assert found.startswith(f"{what} (")
