"""Holds what the service says of a run that SUCCEEDED against the invariants I1 to I7
(docs/architecture.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from everstep.client.runs import RunHandle
from everstep.wire import Event, Verdict

ROUNDING_S = 0.01
CLOCKS_S = 2.0
"""By how much times of one failure may differ that two processes told."""


@dataclass
class Expected:
    """What a run may tell, given what was asked of it."""

    total_steps: int
    samples: int
    """In an epoch."""
    epochs: int


def violations(run: RunHandle, expected: Expected) -> Iterator[str]:
    """Every sentence is one violation, beginning with the invariant's name."""
    yield from _history(run)
    yield from _attempts(run)
    yield from _failures(run)
    yield from _time(run)
    yield from _checkpoints(run)
    yield from _result(run, expected)


def _history(run: RunHandle) -> Iterator[str]:
    events = list(run.events())
    seqs = [event.seq for event in events]
    if seqs != list(range(1, len(seqs) + 1)):
        yield f"I1: the events of {run.id} have gaps or repetitions"
    ends = [
        event
        for event in events
        if event.kind == "finished" and event.data["outcome"] in ("succeeded", "failed")
    ]
    if len(ends) > 1:
        yield f"I1: {run.id} ended {len(ends)} times"
    submissions = [event.submission for event in events if event.kind == "submission_started"]
    if submissions != sorted(set(submissions)):
        yield f"I1: the submissions of {run.id} are {submissions}"


def _attempts(run: RunHandle) -> Iterator[str]:
    """Once an attempt has begun, no rank of an older one tells anything; what it committed beyond
    the newer one's beginning is not listed; and a checkpoint bears the number of an attempt that
    had begun by then."""
    newest, begins = 0, {}
    for event in run.events():
        if event.kind == "attempt_started":
            newest = max(newest, event.attempt)
        elif event.kind in _OF_RANKS and event.attempt < newest:
            yield (
                f"I1: attempt {event.attempt} of {run.id} tells {event.kind} (seq {event.seq}) "
                f"after attempt {newest} had begun"
            )
        if event.kind == "restored":
            fresh = event.data["source"] in ("fresh", "fork")
            begins.setdefault(
                (event.submission, event.attempt), -1 if fresh else event.data["step"]
            )
        if event.kind == "checkpoint_committed" and _attempt_in(event.data["name"]) > max(
            newest, event.attempt
        ):
            yield f"I1: {event.data['name']} of {run.id} was committed before its attempt had begun"
    for listed in run.checkpoints():
        origin = listed.submission, _attempt_in(listed.name)
        void = [later for later, step in begins.items() if later > origin and listed.step > step]
        if origin[1] and listed.state == "committed" and void:
            yield (
                f"I1: {listed.name} of {run.id} is listed, and attempt {void[0][1]} went on "
                f"from step {begins[void[0]]}"
            )


_OF_RANKS = (
    "restored",
    "training_started",
    "metrics",
    "evaluated",
    "epoch_completed",
    "checkpoint_committed",
    "checkpoint_deleted",
)


def _attempt_in(name: str) -> int:
    """The attempt in a checkpoint's name; 0 where it says none."""
    found = re.search(r"\.a(\d+)$", name)
    return int(found[1]) if found else 0


def _failures(run: RunHandle) -> Iterator[str]:
    for failure in run.failures():
        if not failure.evidence or (
            failure.first_rank is None and failure.verdict not in _OF_NO_RANK
        ):
            yield (
                f"I7: a {failure.verdict} of {run.id} at step {failure.step} comes without its "
                "rank or evidence"
            )


_OF_NO_RANK = (Verdict.CONTROL_PLANE, Verdict.PREEMPTION, Verdict.STORAGE)


def _time(run: RunHandle) -> Iterator[str]:
    goodput = run.goodput()
    spent = sum(goodput.buckets.model_dump().values())
    if abs(spent - goodput.wall_s) > ROUNDING_S:
        yield f"I6: the buckets of {run.id} have {spent:.3f} s of {goodput.wall_s:.3f} s"
    yield from _detection(run)
    working_s = (
        goodput.buckets.productive + goodput.buckets.rework + goodput.buckets.checkpoint_stall
    )
    moving_s = _moving_s(run)
    if working_s > moving_s + CLOCKS_S + 0.1 * len(run.failures()):
        yield f"I6: {run.id} has {working_s:.1f} s of work, and moved for {moving_s:.1f} s"


def _moved_at(event: Event) -> float | None:
    """Until when training moved, by one event; as train_fn.recovery.hang has it, written anew
    to be held against it."""
    if event.kind == "metrics":
        return max((point["at"] for point in event.data["points"]), default=None)
    moves = (
        "training_started",
        "restored",
        "epoch_completed",
        "evaluated",
        "attempt_started",
        "recovered",
    )
    return event.at.timestamp() if event.kind in moves else None


def _detection(run: RunHandle) -> Iterator[str]:
    """A failure was noticed ``recovery_s`` before the first step again, and ``detect_s`` after the
    last step before it.

    Of a group that did not come up nothing had moved.
    """
    moved_at: float | None = None
    newest = 0
    failed: tuple[float, float] | None = None
    for event in run.events():
        if event.kind == "attempt_started":
            newest = event.attempt
        if event.kind == "failure":
            detect_s = event.data.get("detect_s")
            is_known = detect_s is not None and moved_at is not None and event.attempt == newest
            failed = (detect_s, moved_at) if is_known else None
        elif event.kind == "recovered" and failed is not None:
            (detect_s, last_at), failed = failed, None
            true_s = event.at.timestamp() - event.data["recovery_s"] - last_at
            if abs(true_s - detect_s) > CLOCKS_S:
                yield (
                    f"I6: a failure of {run.id} says that it was noticed after {detect_s:.1f} "
                    f"s, and it took {true_s:.1f} s"
                )
        at = _moved_at(event)
        if at is not None:
            moved_at = max(moved_at or at, at)


def _moving_s(run: RunHandle) -> float:
    """Seconds in which a run may have worked: from an attempt's first work to its last step where
    it failed, else to its end."""
    total_s, began_at, moved_at = 0.0, None, 0.0
    for event in run.events():
        at = event.at.timestamp()
        if event.kind in ("training_started", "recovered") and began_at is None:
            began_at = moved_at = at
            first = event.data.get("phases", {}).get("first_step") or 0.0
            began_at -= first
        elif event.kind == "metrics" and event.data["points"] and began_at is None:
            began_at = min(point["at"] for point in event.data["points"])
        moved_at = max(moved_at, _moved_at(event) or moved_at)
        if began_at is None:
            continue
        if event.kind == "failure":
            total_s, began_at = total_s + moved_at - began_at, None
        elif event.kind in ("attempt_ended", "finished"):
            total_s, began_at = total_s + max(at, moved_at) - began_at, None
    return total_s


def _checkpoints(run: RunHandle) -> Iterator[str]:
    """What is listed as committed can be had, also where a rank deleted it and died."""
    for listed in run.checkpoints():
        if listed.state == "committed":
            found = run.verify_checkpoint(listed.step)
            if found.state != "committed":
                yield f"I2: checkpoint {listed.name} of {run.id} is {found.state}: {found.problem}"


def _result(run: RunHandle, expected: Expected) -> Iterator[str]:
    latest = run.run.latest_checkpoint
    if run.step != expected.total_steps or latest is None or latest.step != expected.total_steps:
        yield (
            f"I5: {run.id} SUCCEEDED at step {run.step} of {expected.total_steps}, checkpoint "
            f"{latest and latest.step}"
        )
    counted = [(e.samples, e.used_once, e.duplicates, e.missing) for e in run.samples().epochs]
    whole = (expected.samples, expected.samples, 0, 0)
    if counted != [whole] * expected.epochs:
        yield (
            f"I3: samples of {run.id}: "
            f"{[found for found in counted if found != whole] or len(counted)}"
        )
    steps = [step for step, _, _ in run.metrics("loss", max_points=10_000)["loss"]]
    if steps != list(range(1, expected.total_steps + 1)):
        yield f"I3: {run.id} has {len(steps)} steps in its history of {expected.total_steps}"
