"""A profile of a rank that trains: its trace, what its all-reduces took, and that nothing else
changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from everstep.wire.events import EventKind
from storage.run_control import ProfileOrder
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import make_spec


def test_a_rank_that_is_asked_keeps_a_trace_and_trains_as_without(tmp_path: Path) -> None:
    spec = make_spec(epochs=1, max_steps=6)
    plain = train_to_end(Job(make_run_dir(tmp_path, "run_plain"), spec, 2), tmp_path)
    run_dir = make_run_dir(tmp_path)
    outcomes = run_ranks(
        Job(run_dir, spec, 2, profiled=ProfileOrder("prof_1", rank=1, steps=4, attempt=1)), tmp_path
    )
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].losses == plain.losses, "the same bits"
    assert not outcomes[0].of_kind(EventKind.PROFILE_STARTED), "only the rank that was meant"
    assert outcomes[1].of_kind(EventKind.PROFILE_STARTED) == [
        {"id": "prof_1", "rank": 1, "step": 1}
    ]
    [done] = outcomes[1].of_kind(EventKind.PROFILE_DONE)
    assert (done["id"], done["rank"], done["steps"]) == ("prof_1", 1, 4)
    buckets = [each for each in done["all_reduces"] if each["bucket"] is not None]
    assert [each["bucket"] for each in buckets] == list(range(len(buckets))) and buckets
    assert all(each["count"] == 4 and 0 < each["mean_s"] < done["step_s"] for each in buckets)
    assert all(each["mean_s"] <= each["max_s"] < 4 * done["step_s"] for each in buckets), (
        "the longest may be longer than a mean step"
    )
    packed = run_dir.files.read(run_dir.trace_path("prof_1"))
    assert len(packed) == done["size_bytes"]
    events = json.loads(gzip.decompress(packed))["traceEvents"]
    spans = [event for event in events if str(event.get("name", "")).startswith("everstep step")]
    assert sorted(event["name"] for event in spans) == [
        f"everstep step {step}" for step in (1, 2, 3, 4)
    ]
    named = [
        event for event in events if str(event.get("name", "")).startswith("all-reduce of bucket 0")
    ]
    assert len(named) == 4 and all(
        {"ph", "ts", "dur", "pid", "tid"} <= event.keys() for event in named
    )


def test_a_rank_whose_attempt_fails_while_it_is_recorded_says_so(tmp_path: Path) -> None:
    spec = make_spec(epochs=1, max_steps=6)
    order = ProfileOrder("prof_1", rank=0, steps=50, attempt=1)
    outcomes = run_ranks(
        Job(make_run_dir(tmp_path), spec, 2, killed=(1, 2), profiled=order), tmp_path
    )
    [failed] = outcomes[0].of_kind(EventKind.PROFILE_FAILED)
    assert failed["id"] == "prof_1" and "attempt failed" in failed["problem"]
