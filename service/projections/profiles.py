"""Fold a run's history into its profiles."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from everstep.wire.profiles import AllReduce, Profile, ProfileState
from service.model.rows import EventRow

KINDS: Final = frozenset(
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
        elif _ends_attempt(event):
            _lapse(found, *_OPEN)
    return list(found.values())


def _requested(event: EventRow) -> Profile:
    data = event.data
    at = datetime.fromtimestamp(event.at, UTC)
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


def _ends_attempt(event: EventRow) -> bool:
    return (
        event.kind != EventKind.STATUS
        or RunStatus(event.data["to"]).terminal
        or event.data["to"] == RunStatus.PAUSED
    )


def _lapse(found: dict[str, Profile], *states: ProfileState) -> None:
    for profile in found.values():
        if profile.state in (states or (ProfileState.REQUESTED,)):
            found[profile.id] = profile.model_copy(update={"state": ProfileState.LAPSED})
