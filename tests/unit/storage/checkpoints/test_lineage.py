"""Lineage: one committed line of states, whoever was slow to die."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.wire.events import EventKind
from storage.checkpoints.reader import RestorePoint
from storage.checkpoints.retention import attempt_starts
from storage.checkpoints.store import CheckpointStore
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.storage_places import (
    event,
    memory_run_dir,
    record_restored,
    save,
)

pytest_plugins = ["tests.support.storage_fixtures"]


def lineage(run_dir: RunDir) -> list[tuple[int, int]]:
    return [(manifest.step, manifest.submission) for manifest in CheckpointStore(run_dir).lineage()]


def test_attempts_that_never_trained_have_no_start(run_dir: RunDir) -> None:
    assert attempt_starts(run_dir) == {}
    kinds = [
        (1, EventKind.ATTEMPT_STARTED, {"world_size": 1}),
        (1, EventKind.RESTORED, {"step": 0}),
        (1, EventKind.METRICS, {"points": []}),
        (2, EventKind.ATTEMPT_STARTED, {"world_size": 1}),
        (3, EventKind.RESTORED, {"step": 57}),
    ]
    with JournalWriter(run_dir, 1) as journal:
        journal.append(
            [
                replace(event(number, kind, data=data), attempt=attempt)
                for number, (attempt, kind, data) in enumerate(kinds, start=1)
            ]
        )
    record_restored(run_dir, 2, 0, "fresh")
    [fresh] = [
        point for (submission, _), point in attempt_starts(run_dir).items() if submission == 2
    ]
    assert fresh == RestorePoint(0, fresh=True)
    before = {origin: point for origin, point in attempt_starts(run_dir).items() if origin[0] == 1}
    assert before == {(1, 1): RestorePoint(0, fresh=False), (1, 3): RestorePoint(57, fresh=False)}


# A history: submissions start one after the other, each restoring from what it sees; any that began
# may commit on.
STEP = st.one_of(
    st.tuples(
        st.just("start"),
        st.sampled_from(["newest", "any", "snapshot", "fresh"]),
        st.integers(0, 1000),
    ),
    st.tuples(st.just("commit"), st.integers(0, 1000), st.integers(1, 30)),
    st.tuples(st.just("wait")),
)


@given(history=st.lists(STEP, max_size=30))
@settings(max_examples=200)
def test_there_is_one_line_of_states(history: list[tuple[Any, ...]]) -> None:
    """Against a model in which every checkpoint knows the states it descends from."""
    run_dir, _ = memory_run_dir()
    reached: dict[int, int] = {}
    """Steps done by each submission, zombies included."""
    ancestors: dict[int, list[tuple[int, int]]] = {}
    """What each submission's states descend from: (step, submission) of checkpoints, its own
    included."""
    newest = 0

    for kind, *arguments in history:
        if kind == "start":
            how, pick = arguments
            seen = ancestors.get(newest, [])
            newest += 1
            if how == "fresh" or not seen:
                step, kept = 0, []
                record_restored(run_dir, newest, 0, "fresh")
            else:
                index = len(seen) - 1 if how != "any" else pick % len(seen)
                # A snapshot lies between the last checkpoint and where the old ranks had come.
                step = (
                    seen[index][0] if how != "snapshot" else max(seen[-1][0], reached[newest - 1])
                )
                kept = [ancestor for ancestor in seen if ancestor[0] <= step]
                record_restored(
                    run_dir, newest, step, "snapshot" if how == "snapshot" else "checkpoint"
                )
            reached[newest], ancestors[newest] = step, kept
        elif kind == "commit" and newest:
            who, steps = arguments
            submission = who % newest + 1
            reached[submission] += steps
            save(run_dir, reached[submission], submission)
            ancestors[submission].append((reached[submission], submission))
        assert lineage(run_dir) == sorted(ancestors.get(newest, []))
