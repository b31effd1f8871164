"""Fold a run's history into the checkpoints of its lineage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from everstep.wire import Checkpoint
from everstep.wire.events import EventKind
from service.model.rows import CheckpointCheck, EventRow, maybe_time, to_time
from service.model.run_rows import StoredSpec
from storage.checkpoints.reader import best_of, origin_of, restore_point, voided_by
from storage.run_dir import CheckpointName

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
    """Return every committed checkpoint of the lineage, also deleted ones, oldest first.

    Checkpoints that an older attempt wrote after the step from which a newer one continued are not
    in the lineage.

    Args:
        events: The history, only kinds in KINDS.
        checks: The last verification of each checkpoint, by name.
    """
    found: dict[str, dict[str, Any]] = {}
    evaluated: dict[int, dict[str, float | None]] = {}
    highest = -1
    for event in events:
        data = event.data
        if event.kind == EventKind.EVALUATED:
            # the state may have been saved before it was evaluated
            evaluated[data["step"]] = data["metrics"]
        elif event.kind == EventKind.CHECKPOINT_COMMITTED:
            # replaced after it was found corrupt: move it to the end
            found.pop(data["name"], None)
            found[data["name"]] = {
                **data,
                "submission": submission_of(event),
                "committed_at": event.at,
                "state": "committed",
            }
            highest = max(highest, data["step"])
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
            point = restore_point(data)
            if point.fresh or highest > point.step:  # else nothing lies beyond
                found = {name: item for name, item in found.items() if stands(item, event)}
                highest = max((item["step"] for item in found.values()), default=-1)
    return [
        _checkpoint(
            data, data.get("metrics") or evaluated.get(data["step"]) or {}, checks.get(name)
        )
        for name, data in found.items()
    ]


def stands(item: Mapping[str, Any], restored: EventRow) -> bool:
    """Return whether a checkpoint is still valid after a restore."""
    name = CheckpointName.parse(item["name"])
    name = name or CheckpointName(item["step"], item["submission"], 0)  # a user's function named it
    point = restore_point(restored.data)
    return voided_by(name, {(restored.submission, restored.attempt): point}) is None


def submission_of(committed: EventRow) -> int:
    """Return the submission that wrote a checkpoint, according to its name: a later submission may
    report it. Checkpoints of a user's Ray Train function have other names and report themselves."""
    parsed = CheckpointName.parse(committed.data["name"])
    return parsed.submission if parsed else committed.submission


def choose(
    found: Sequence[Checkpoint], run_id: str, wanted: StoredSpec, which: str
) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint that ``which`` names, and the message if there is none.

    Args:
        found: Checkpoints of the run.
        run_id: The run.
        wanted: Its spec.
        which: ``latest``, ``best``, or a step in decimal digits. Anything else raises ValueError.
    """
    if which == "latest":
        return newest(found), f"run {run_id} has no committed checkpoint yet"
    if which == "best":
        if wanted.best_by is None:
            return (
                None,
                (
                    f"run {run_id} keeps no best checkpoint: its spec sets no "
                    "checkpoint.best_metric; "
                    "ask for latest"
                ),
            )
        missing = (
            f"run {run_id} has no committed checkpoint with the metric {wanted.best_by[0]!r} "
            "(checkpoint.best_metric) yet"
        )
        return best(found, *wanted.best_by), missing
    if which.isascii() and which.isdigit() and len(which) <= 18:
        return at_step(found, int(which)), f"run {run_id} has no checkpoint of step {int(which)}"
    raise ValueError(f"{which[:40]!r} is no checkpoint: give a step, latest or best")


def newest(found: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the committed checkpoint of the highest step; of the newest attempt if there are
    several."""
    return max(_committed(found), key=lambda item: (item.step, origin_of(item)), default=None)


def at_step(found: Iterable[Checkpoint], step: int) -> Checkpoint | None:
    """Return the checkpoint of a step. If several attempts wrote one, prefer committed ones, then
    the newest."""
    same = [item for item in found if item.step == step]
    return max(same, key=lambda item: (item.state == "committed", origin_of(item)), default=None)


def best(
    found: Iterable[Checkpoint], metric: str, mode: Literal["min", "max"]
) -> Checkpoint | None:
    """Return the best committed checkpoint (``best_of``), the one that retention keeps."""
    return best_of(_committed(found), metric, mode)


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
        committed_at=to_time(data["committed_at"]),
        verified_at=maybe_time(verified_at),
        problem=problem,
    )
