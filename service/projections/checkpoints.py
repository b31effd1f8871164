"""Checkpoints of a run's lineage, folded from its history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from everstep.wire import Checkpoint
from everstep.wire.events import BEGINNINGS, EventKind
from everstep.wire.metric_names import lookup
from service.model.rows import CheckpointCheck, EventRow
from storage.checkpoints.lineage import is_newer
from storage.run_dir import CheckpointName, Origin

KINDS: Final = frozenset(
    {
        EventKind.CHECKPOINT_COMMITTED,
        EventKind.CHECKPOINT_DELETED,
        EventKind.RESTORED,
        EventKind.EVALUATED,
    }
)


def checkpoints(
    events: Iterable[EventRow], checks: Mapping[str, CheckpointCheck]
) -> list[Checkpoint]:
    """Every checkpoint that was committed in the lineage, deleted ones too, oldest first.

    What an older attempt wrote beyond the step that a newer one went on from is not in the lineage
    and left out.

    Args:
        events: History of the kinds in KINDS.
        checks: Last check of each checkpoint that was read back, by name.
    """
    found: dict[str, dict[str, Any]] = {}
    evaluated: dict[int, dict[str, float | None]] = {}
    for event in events:
        data = event.data
        if event.kind == EventKind.EVALUATED:
            # of a state that may have been saved before it was evaluated
            evaluated[data["step"]] = data["metrics"]
        elif event.kind == EventKind.CHECKPOINT_COMMITTED:
            # replaced after it was found corrupt: it takes its new place in the order
            found.pop(data["name"], None)
            found[data["name"]] = {
                **data,
                "submission": event.submission,
                "committed_at": event.at,
                "state": "committed",
            }
        elif event.kind == EventKind.CHECKPOINT_DELETED and data["name"] in found:
            found[data["name"]]["state"] = "deleted"
        elif event.kind == EventKind.RESTORED:
            for rejected in data.get("rejected") or ():
                if rejected["name"] in found:
                    found[rejected["name"]] |= {
                        "state": "corrupt",
                        "verified_at": event.at,
                        "problem": rejected.get("problem"),
                    }
            found = {name: item for name, item in found.items() if stands(item, event)}
    return [
        _checkpoint(
            data, data.get("metrics") or evaluated.get(data["step"]) or {}, checks.get(name)
        )
        for name, data in found.items()
    ]


def stands(item: Mapping[str, Any], restored: EventRow) -> bool:
    """Whether a restore lets a checkpoint stand: it is not of an older attempt, or not beyond where
    this one went on from."""
    fresh, step = restored.data.get("source") in BEGINNINGS, int(restored.data["step"])
    name = CheckpointName(item["step"], item["submission"], _attempt_of(item["name"]))
    return not is_newer((restored.submission, restored.attempt), name) or (
        not fresh and item["step"] <= step
    )


def _attempt_of(name: str) -> int:
    """The attempt that a checkpoint's name says; 0 for one of an older version, or of a user's
    function."""
    parsed = CheckpointName.parse(name)
    return parsed.attempt if parsed else 0


def _origin(item: Checkpoint) -> Origin:
    return item.submission, _attempt_of(item.name)


def choose(
    found: Sequence[Checkpoint], run_id: str, spec: Mapping[str, Any], which: str
) -> tuple[Checkpoint | None, str]:
    """The checkpoint that ``which`` names (``latest``, ``best``, or a step in decimal digits), and
    what to say where there is none.

    Raises ValueError where it names none at all.
    """
    if which == "latest":
        return newest(found), f"run {run_id} has no committed checkpoint yet"
    if which == "best":
        metric = spec["checkpoint"]["best_metric"]
        if not metric:
            return (
                None,
                (
                    f"run {run_id} keeps no best checkpoint: its spec sets no "
                    "checkpoint.best_metric; "
                    "ask for latest"
                ),
            )
        missing = f"run {run_id} has no committed checkpoint with the metric {metric!r} yet"
        return best(found, metric, spec["checkpoint"]["best_mode"]), missing
    if which.isascii() and which.isdigit() and len(which) <= 18:
        return at_step(found, int(which)), f"run {run_id} has no checkpoint of step {int(which)}"
    raise ValueError(f"{which[:40]!r} is not a step, latest or best")


def newest(found: Iterable[Checkpoint]) -> Checkpoint | None:
    """The committed checkpoint of the highest step; of one step that of the newest attempt."""
    return max(_committed(found), key=lambda item: (item.step, _origin(item)), default=None)


def at_step(found: Iterable[Checkpoint], step: int) -> Checkpoint | None:
    """The checkpoint of a step; where several attempts wrote one, a committed one before others,
    then the newest."""
    same = [item for item in found if item.step == step]
    return max(same, key=lambda item: (item.state == "committed", _origin(item)), default=None)


def best(
    found: Iterable[Checkpoint], metric: str | None, mode: Literal["min", "max"]
) -> Checkpoint | None:
    """The committed checkpoint with the best value of a validation metric; of equals the one of the
    lowest step, which is the one that the run keeps, and of one step that of the newest attempt.
    None without a metric."""
    if metric is None:
        return None
    sign = 1.0 if mode == "max" else -1.0
    scored = [
        (sign * value, -item.step, _origin(item), item)
        for item in _committed(found)
        if (value := lookup(item.metrics, metric)) is not None
    ]
    return max(scored, key=lambda entry: entry[:3])[3] if scored else None


def _committed(found: Iterable[Checkpoint]) -> list[Checkpoint]:
    return [item for item in found if item.state == "committed"]


def _checkpoint(
    data: dict[str, Any], metrics: Mapping[str, float | None], check: CheckpointCheck | None
) -> Checkpoint:
    state, verified_at, problem = data["state"], data.get("verified_at"), data.get("problem")
    if check is not None and check.verified_at >= max(data["committed_at"], verified_at or 0.0):
        verified_at, problem = check.verified_at, check.problem
        if state != "deleted":
            state = "corrupt" if problem else "committed"
    return Checkpoint(
        step=data["step"],
        name=data["name"],
        epoch=data["epoch"],
        submission=data["submission"],
        state=state,
        size_bytes=data["size_bytes"],
        digest=data["digest"],
        metrics={name: value for name, value in metrics.items() if value is not None},
        committed_at=datetime.fromtimestamp(data["committed_at"], UTC),
        verified_at=None if verified_at is None else datetime.fromtimestamp(verified_at, UTC),
        problem=problem,
    )
