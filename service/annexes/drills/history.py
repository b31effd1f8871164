"""Fold a run's history into its drills and their reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, Final

from everstep.text.words import count
from everstep.wire import Attempt, RunStatus, Verdict
from everstep.wire.drills import (
    AllReduce,
    Drill,
    DrillKind,
    DrillParity,
    DrillReport,
    DrillState,
    Profile,
    ProfileState,
    RankStack,
    StackReport,
)
from everstep.wire.events import OWN_FILES, EventKind
from service.model.rows import EventRow, to_time
from service.model.run_rows import RunRow

DRILL_KINDS: Final = frozenset(
    {
        EventKind.DRILL_REQUESTED,
        EventKind.DRILL_STARTED,
        EventKind.DRILL_FAILED,
        EventKind.FAILURE,
        EventKind.RESTORED,
        EventKind.RECOVERED,
        EventKind.EPOCH_COMPLETED,
        EventKind.SUBMISSION_STARTED,
        EventKind.STATUS,
    }
)
"""Events that stories are made of. Metrics are read separately, only around drills, because a run
has many."""

METRICS_BEFORE: Final = 2000
"""Number of metrics events before a drill that are searched for losses."""
METRICS_MOST: Final = 6000


@dataclass
class Story:
    """The events that make up one drill."""

    requested: EventRow
    started: EventRow | None = None
    failed: EventRow | None = None
    failure: EventRow | None = None
    restored: EventRow | None = None
    recovered: EventRow | None = None
    epoch: EventRow | None = None
    """Event of the first epoch that ended after the recovery."""
    over: bool = False
    """Whether no more events can follow: the run ended or paused, or another driver took over
    before the drill started."""

    @property
    def id(self) -> str:
        return str(self.requested.data["id"])

    @property
    def state(self) -> DrillState:
        if self.failed is not None:
            return DrillState.FAILED
        if self.recovered is not None:
            return DrillState.RECOVERED
        if self.started is not None:
            return DrillState.UNRECOVERED if self.over else DrillState.STARTED
        return DrillState.LAPSED if self.over else DrillState.REQUESTED

    def take(self, event: EventRow) -> None:
        """Add the run's next event; not for events that name a drill."""
        recovering = self.started is not None and self.recovered is None and not self.over
        follows = self.started is not None and event.attempt > self.started.attempt
        match event.kind:
            case EventKind.FAILURE if recovering and self.failure is None:
                self.failure = event
            case EventKind.RESTORED if recovering and follows:
                self.restored = event
            case EventKind.RECOVERED if recovering and follows:
                self.recovered = event
            case EventKind.EPOCH_COMPLETED if self.recovered is not None and self.epoch is None:
                self.epoch = event
            case EventKind.SUBMISSION_STARTED if (
                self.started is None and event.submission > self.requested.submission
            ):
                self.over = True
            case EventKind.STATUS if (
                RunStatus(event.data["to"]).terminal or event.data["to"] == RunStatus.PAUSED
            ):
                self.over = True


def stories(events: Iterable[EventRow]) -> list[Story]:
    """Return a run's drills, oldest first, from its events of KINDS."""
    found: dict[str, Story] = {}
    for event in events:
        match event.kind:
            case EventKind.DRILL_REQUESTED:
                for story in found.values():
                    story.over |= story.started is None  # replaced by the newer one
                found[event.data["id"]] = Story(event)
            case EventKind.DRILL_STARTED if event.data["id"] in found:
                found[event.data["id"]].started = event
                found[event.data["id"]].over = False
            case EventKind.DRILL_FAILED if event.data["id"] in found:
                found[event.data["id"]].failed = event
            case _:
                for story in found.values():
                    story.take(event)
    for story in found.values():
        drill(story, ())  # a request of which nobody can tell is forged
    return list(found.values())


def drill(story: Story, metrics: Sequence[EventRow]) -> Drill:
    """Return one drill as clients read it; ``metrics`` are the metrics events around it, in
    order."""
    data = story.requested.data
    return Drill(
        id=data["id"],
        kind=DrillKind(data["kind"]),
        rank=data["rank"],
        at=to_time(story.requested.at),
        state=story.state,
        problem=None if story.failed is None else str(story.failed.data["problem"]),
        report=None
        if story.started is None or story.failed is not None
        else _report(story, story.started, metrics),
    )


def _report(story: Story, started: EventRow, metrics: Sequence[EventRow]) -> DrillReport:
    restored = story.restored.data if story.restored else {}
    recovered = story.recovered.data if story.recovered else {}
    rejected = tuple(str(item["name"]) for item in restored.get("rejected") or ())
    return DrillReport(
        started_at=to_time(started.at),
        node_id=started.data.get("node_id"),
        pid=started.data.get("pid"),
        checkpoint=started.data.get("checkpoint"),
        verdict=_verdict(story.failure),
        total_s=None
        if story.recovered is None
        else round(max(0.0, story.recovered.at - started.at), 3),
        recovery_s=recovered.get("recovery_s"),
        phases=_phases(recovered),
        steps_lost=recovered.get("steps_lost"),
        redone_s=(recovered.get("since_report_s") or 0.0) if restored.get("unit") else None,
        world_size_before=recovered.get("world_size_before"),
        world_size_after=recovered.get("world_size_after"),
        restored_step=restored.get("step"),
        restored_from=restored.get("checkpoint") or restored.get("source"),
        rejected=rejected,
        parity=_parity(story, metrics),
        note=_note(story, started, restored, rejected),
    )


def _phases(recovered: Mapping[str, Any]) -> dict[str, float]:
    detect_s = recovered.get("detect_s")
    return ({} if detect_s is None else {"detect": detect_s}) | (recovered.get("phases") or {})


def _parity(story: Story, metrics: Sequence[EventRow]) -> DrillParity | None:
    if story.recovered is None or story.restored is None or _has_own_files(story):
        return None
    epoch = story.epoch.data if story.epoch else None
    once = None if epoch is None else epoch["duplicates"] == epoch["missing"] == 0
    return parity(
        metrics,
        story.recovered,
        int(story.restored.data["step"]),
        over=story.over,
        samples_used_once=once,
    )


def _note(
    story: Story, started: EventRow, restored: Mapping[str, Any], rejected: Sequence[str]
) -> str | None:
    if story.recovered is not None and _has_own_files(story):
        return (
            "the script continues from its own files: which steps it repeats, and whether its "
            "loss continues, is not known"
        )
    if story.recovered is not None and restored.get("unit"):
        since_s = story.recovered.data.get("since_report_s")
        worked = "" if since_s is None else f", of {since_s:.1f} s here,"
        return (
            f"steps are the reports of the user's loop: work since the last report{worked} is done "
            "again and counts as no step lost"
        )
    checkpoint = started.data.get("checkpoint")
    if checkpoint is None or story.recovered is None:
        return None
    went_on = (
        f"from {restored.get('checkpoint') or restored.get('source')}, step {restored.get('step')}"
    )
    if checkpoint in rejected:
        return (
            f"the damaged checkpoint {checkpoint} was found and skipped; the run continued "
            f"{went_on}"
        )
    return (
        f"the damaged checkpoint {checkpoint} was not needed: the run continued {went_on}; the "
        "fallback was not tested"
    )


def _has_own_files(story: Story) -> bool:
    return story.restored is not None and story.restored.data.get("source") == OWN_FILES


def _verdict(failure: EventRow | None) -> Verdict | None:
    if failure is None:
        return None
    return Verdict(failure.data["verdict"])


# ---------------------------------------------------------------- profiles

# Fold a run's history into its profiles.

PROFILE_KINDS: Final = frozenset(
    {
        EventKind.PROFILE_REQUESTED,
        EventKind.PROFILE_STARTED,
        EventKind.PROFILE_DONE,
        EventKind.PROFILE_FAILED,
        EventKind.FAILURE,
        EventKind.ATTEMPT_ENDED,
        EventKind.SUBMISSION_STARTED,
        EventKind.STATUS,
    }
)
_OPEN: Final = (ProfileState.REQUESTED, ProfileState.STARTED)


def profiles(events: Iterable[EventRow]) -> list[Profile]:
    """Return a run's profiles, oldest first, from its events of KINDS."""
    found: dict[str, Profile] = {}
    for event in events:
        if event.kind == EventKind.PROFILE_REQUESTED:
            _lapse(found)  # it replaces a request that was not started
            found[event.data["id"]] = _requested(event)
        elif event.data.get("id") in found:
            profile = found[event.data["id"]]
            found[profile.id] = profile.model_copy(update=_update(event))
        elif event.kind != EventKind.STATUS or (
            RunStatus(event.data["to"]).terminal or event.data["to"] == RunStatus.PAUSED
        ):
            _lapse(found, *_OPEN)
    return list(found.values())


def _requested(event: EventRow) -> Profile:
    data = event.data
    at = to_time(event.at)
    return Profile(
        id=data["id"], rank=data["rank"], steps=data["steps"], at=at, state=ProfileState.REQUESTED
    )


def _update(event: EventRow) -> dict[str, Any]:
    data = event.data
    match event.kind:
        case EventKind.PROFILE_STARTED:
            return {"state": ProfileState.STARTED, "first_step": data["step"]}
        case EventKind.PROFILE_DONE:
            all_reduces = tuple(AllReduce.model_validate(each) for each in data["all_reduces"])
            return {
                "state": ProfileState.DONE,
                "steps": data["steps"],
                "step_s": data["step_s"],
                "size_bytes": data["size_bytes"],
                "all_reduces": all_reduces,
            }
        case _:
            return {"state": ProfileState.FAILED, "problem": str(data.get("problem"))}


def _lapse(found: dict[str, Profile], *states: ProfileState) -> None:
    for profile in found.values():
        if profile.state in (states or (ProfileState.REQUESTED,)):
            found[profile.id] = profile.model_copy(update={"state": ProfileState.LAPSED})


# ---------------------------------------------------------------- replays

# How many ranks trained each step, in micro-batches of what size: a replay needs both.


@dataclass(frozen=True)
class Stretch:
    """Steps that one number of ranks has trained with micro-batches of one size: those after
    ``begin``, up to ``end``."""

    begin: int
    end: int
    world_size: int
    micro_batch_size: int | None = None

    def meets(self, begin: int, end: int) -> bool:
        """Return whether any of the steps after ``begin``, up to ``end``, is one of these."""
        return max(self.begin, begin) < min(self.end, end)


def stretches(
    attempts: Iterable[Attempt], last_step: int, sizes: Mapping[int, int] = MappingProxyType({})
) -> list[Stretch]:
    """Return which steps were trained by how many ranks, in order. Of steps that several attempts
    trained, the newest counts.

    Args:
        last_step: steps done in the lineage.
        sizes: of micro-batches, by attempt.
    """
    found: list[Stretch] = []
    for attempt in attempts:
        begin = attempt.first_step
        if begin is None:  # it never trained
            continue
        found = [replace(each, end=min(each.end, begin)) for each in found if each.begin < begin]
        new = Stretch(begin, last_step, attempt.world_size, sizes.get(attempt.attempt))
        if found and replace(found[-1], begin=begin, end=last_step) == new:
            new = replace(new, begin=found.pop().begin)
        found.append(new)
    return [each for each in found if each.begin < each.end]


def words(found: Sequence[Stretch]) -> str:
    """Return stretches in words."""
    differ = len({each.micro_batch_size for each in found}) > 1
    return ", ".join(
        f"steps {each.begin + 1} to {each.end} by {count(each.world_size, 'rank')}"
        + (f" with micro-batches of {each.micro_batch_size}" if differ else "")
        for each in found
    )


def begun_at(run: RunRow) -> int:
    """Return the steps done in the state that a run began with."""
    origin = run.stored_spec.origin
    return int(origin.step) if origin is not None else 0


# ---------------------------------------------------------------- parity

# Check that the loss continues after a recovery as before. ``everstep.wire.drills.DrillParity``
# describes the comparison.

NUM_STEPS: Final = 10
"""Number of steps compared on each side of the recovery."""
SAME_SIZE_TOLERANCE: Final = 1e-4
OTHER_SIZE_TOLERANCE: Final = 1e-2
"""Relative. Another number of ranks sums in another order, and the difference grows with repeated
steps."""
_SPREAD: Final = 3.0
_SHARE: Final = 0.1

Loss = float | None


def parity(
    metrics: Sequence[EventRow],
    recovered: EventRow,
    restored_step: int,
    *,
    over: bool,
    samples_used_once: bool | None,
) -> DrillParity:
    """Compare losses around a recovery.

    Args:
        metrics: metrics events in order, from before the fault to after the recovery.
        recovered: the ``recovered`` event. Steps beyond ``restored_step`` that its attempt or later
            ones report come after it.
        restored_step: steps done in the restored state.
        over: whether no more steps will follow.
        samples_used_once: result of the sample ledger for the first epoch that ended after the
            recovery; None if there is none.
    """
    reported: dict[int, list[Loss]] = {}
    later: dict[int, Loss] = {}
    for event in metrics:
        for point in event.data["points"]:
            step = int(point["step"])
            if "loss" in point["values"]:
                reported.setdefault(step, []).append(point["values"]["loss"])
                if event.attempt >= recovered.attempt and step > restored_step:
                    later.setdefault(step, point["values"]["loss"])
    after = {step: later[step] for step in sorted(later)[:NUM_STEPS]}
    before = {
        step: reported[step][-1]
        for step in sorted(step for step in reported if step <= restored_step)[-NUM_STEPS:]
    }
    looked_at = range(min(before, default=restored_step + 1), max(after, default=restored_step) + 1)
    missing = tuple(step for step in looked_at if step not in before and step not in after)
    data = recovered.data
    same_size = data.get("world_size_before") == data.get("world_size_after")
    tolerance = SAME_SIZE_TOLERANCE if same_size else OTHER_SIZE_TOLERANCE
    conflicting = tuple(step for step in looked_at if _differ(reported.get(step, []), tolerance))
    enough = over or len(after) == NUM_STEPS
    goes_on = (
        not missing
        and not conflicting
        and _keeps_trend(list(before.values()), list(after.values()))
    )
    return DrillParity(
        in_parity=goes_on and samples_used_once is not False if enough else None,
        num_steps_after=len(after),
        missing_steps=missing,
        conflicting_steps=conflicting,
        loss_before=_mean(list(before.values())) if len(before) > 1 else None,
        loss_after=_mean(list(after.values())),
        samples_used_once=samples_used_once,
    )


def _differ(losses: Sequence[Loss], tolerance: float) -> bool:
    """Return whether one step has two different losses."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return bool(finite)
    return bool(finite) and max(finite) - min(finite) > tolerance * max(map(abs, finite))


def _keeps_trend(before: Sequence[Loss], after: Sequence[Loss]) -> bool:
    """Return whether the mean after is finite and exceeds the mean before by no more than losses
    vary from step to step."""
    mean_after = _mean(after)
    known = [loss for loss in before if loss is not None]
    if mean_after is None:
        return False
    if len(known) < 2:
        return True  # the fault came in the first steps: there is no trend to compare with
    return mean_after <= fmean(known) + max(_SPREAD * stdev(known), _SHARE * abs(fmean(known)))


def _mean(losses: Sequence[Loss]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if finite and len(finite) == len(losses) else None


# ---------------------------------------------------------------- stacks

# Fold a run's history into its reports on what ranks do.

STACK_KINDS: Final = frozenset({EventKind.STACKS_REQUESTED, EventKind.STACKS})


def stack_reports(events: Iterable[EventRow]) -> list[StackReport]:
    """Return a run's reports, oldest first, from its events of KINDS."""
    found: list[StackReport] = []
    for event in events:
        data, at = event.data, to_time(event.at)
        if event.kind == EventKind.STACKS_REQUESTED:
            found.append(StackReport(id=data["id"], at=at, attempt=event.attempt, complete=False))
            continue
        found = [each for each in found if each.id is None or each.id != data["id"]]
        found.append(
            StackReport(
                id=data["id"],
                at=at,
                attempt=event.attempt,
                complete=True,
                quiet_s=data.get("quiet_s"),
                step=data.get("step"),
                summary=data.get("summary"),
                ranks=tuple(RankStack.model_validate(each) for each in data.get("ranks") or ()),
            )
        )
    return found
