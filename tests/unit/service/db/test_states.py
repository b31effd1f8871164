"""The table of transitions, and that the database obeys it and nothing else."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest

from everstep.spec.parsing import parse_spec
from everstep.wire import TERMINAL_STATUSES, RunStatus
from service.db.runs import RunStore
from service.model.states import (
    LIVE,
    SUBMITTED,
    TRANSITIONS,
    TransitionConflict,
    check_legal,
    is_legal,
)
from tests.support.api_service import spec
from tests.support.prepared_database import prepared_database


def path_to(status: RunStatus) -> list[RunStatus]:
    """The shortest way from QUEUED."""
    ways = deque([[RunStatus.QUEUED]])
    while ways:
        way = ways.popleft()
        if way[-1] == status:
            return way
        ways.extend([*way, after] for after in sorted(TRANSITIONS[way[-1]]) if after not in way)
    raise AssertionError(f"{status} cannot be reached")


def test_every_status_has_its_row_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(RunStatus)
    for status in RunStatus:
        assert path_to(status)[-1] == status


def test_only_ends_are_final() -> None:
    assert {status for status in RunStatus if not TRANSITIONS[status]} == set(TERMINAL_STATUSES)


def test_every_live_run_can_be_stopped_or_cancelled() -> None:
    for status in LIVE - {RunStatus.STOPPING}:
        assert {RunStatus.STOPPING, RunStatus.CANCELLED} & TRANSITIONS[status]
    assert SUBMITTED < LIVE
    assert not LIVE & TERMINAL_STATUSES


def test_nothing_that_was_submitted_queues_again_without_a_pause() -> None:
    assert {status for status in RunStatus if is_legal(status, RunStatus.QUEUED)} == {
        RunStatus.PAUSED
    }


def test_an_illegal_change_names_what_would_be_legal() -> None:
    with pytest.raises(TransitionConflict, match="run_x is FAILED; QUEUED may follow only PAUSED"):
        check_legal("run_x", RunStatus.FAILED, RunStatus.QUEUED)


@pytest.mark.parametrize("before", RunStatus)
def test_the_database_allows_exactly_the_table(before: RunStatus, tmp_path: Path) -> None:
    database = prepared_database(f"sqlite:///{tmp_path / 'e.db'}")
    store = RunStore(database)
    for after in RunStatus:
        run, _ = store.create(parse_spec(spec()), "tok_test")
        way = path_to(before)
        for here, there in pairwise(way):
            store.transition(run.id, here, there)
        if is_legal(before, after):
            assert store.transition(run.id, before, after).status == after
        else:
            with pytest.raises(TransitionConflict) as caught:
                store.transition(run.id, before, after)
            assert caught.value.found == before
            found = store.get(run.id)
            assert found is not None and found.status == before
    database.close()
