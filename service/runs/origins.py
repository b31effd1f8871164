"""``resume_from``: resolve and hold the checkpoint of another run before the new one is
recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import ResumeFrom
from everstep.wire import Checkpoint
from service.api.blocking import db_read, storage_call
from service.db.events import EventStore
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.projections import checkpoints
from service.runs.checkpoints import all_checkpoints
from storage.checkpoints.retention import ACKNOWLEDGED_HOLD_S, CheckpointHold
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint, StorageNotFound
from storage.filesystem import Storage
from storage.run_dir import RunDir

_SAME: Final = (
    ("train", "global_batch_size"),
    ("train", "batch_by"),
    ("train", "seed"),
    ("optimizer", "name"),
    ("task", "data", "name"),
)
"""Fields that must be equal in both specs, so that the position in the data and the optimizer's
moments stay valid."""


async def with_origin(
    runs: RunStore, events: EventStore, storage: Storage, spec: RunSpec, *, keep: bool
) -> RunSpec:
    """Return the spec with ``latest`` or ``best`` resolved, and protect the checkpoint from
    retention until the run has its own.

    Args:
        runs: all runs.
        events: their histories.
        storage: their checkpoints.
        spec: the spec.
        keep: False does not protect it, because the run will be refused.

    Whether the model fits is only known when a rank builds it. Raises InvalidSpec with the field,
    StorageError.
    """
    wanted = spec.origin
    if wanted is None:
        return spec
    place = ("resume_from", "step") if spec.resume_from is not None else ("replay", "from_step")
    parent, checkpoint = await _found(runs, events, spec.project, wanted, place)
    faults = [*_differences(spec, parent), *_nothing_left(spec, parent, checkpoint.step)]
    if faults:
        raise InvalidSpec(tuple(faults))
    if keep:
        await storage_call(_hold, place, storage, parent, checkpoint)
    if spec.resume_from is None:
        return spec
    exact = wanted.model_copy(update={"step": checkpoint.step})
    return spec.model_copy(update={"resume_from": exact})


async def _found(
    runs: RunStore, events: EventStore, project: str, wanted: ResumeFrom, place: tuple[str, str]
) -> tuple[RunRow, Checkpoint]:
    """Return the run and its checkpoint. Raises InvalidSpec at ``place``."""
    parent = await db_read(runs.get, wanted.run_id)
    if parent is None or parent.project != project:
        raise _fault(
            (place[0], "run_id"), f"run {wanted.run_id} does not exist in project {project!r}"
        )
    if parent.stop_requested == "delete":
        raise _fault((place[0], "run_id"), f"run {parent.id} is being deleted; choose another run")
    found = await all_checkpoints(events, parent.id)
    checkpoint, missing = checkpoints.choose(found, parent.id, parent.stored_spec, str(wanted.step))
    _check_usable(place, checkpoint, missing, found)
    assert checkpoint is not None
    return parent, checkpoint


def _fault(place: tuple[str, str], msg: str) -> InvalidSpec:
    return InvalidSpec((FieldError(place, msg),))


def _check_usable(
    place: tuple[str, str],
    checkpoint: Checkpoint | None,
    missing: str,
    found: Sequence[Checkpoint],
) -> None:
    """Raise InvalidSpec with the checkpoints that exist, if this one cannot be used."""
    kept = sorted({each.step for each in found if each.state == "committed"})
    instead = (
        f"; choose one of steps {', '.join(map(str, kept[-10:]))}"
        if kept
        else "; the run has no checkpoint to start from"
    )
    if checkpoint is None:
        raise _fault(place, f"{missing}{instead}")
    if checkpoint.state == "deleted":
        raise _fault(
            place, f"the checkpoint of step {checkpoint.step} was deleted by retention{instead}"
        )
    if checkpoint.state == "corrupt":
        raise _fault(
            place,
            f"the checkpoint of step {checkpoint.step} is corrupt: {checkpoint.problem}{instead}",
        )


def _differences(spec: RunSpec, parent: RunRow) -> list[FieldError]:
    """Return the fields that differ between the runs and must not."""
    own = spec.model_dump(mode="json")
    faults = []
    for path in _SAME:
        there, here = _at(parent.spec, path), _at(own, path)
        if there is not None and here is not None and there != here:
            msg = (
                f"must be {there!r}, as in run {parent.id}, whose position in the data and "
                "optimizer state this run continues"
            )
            faults.append(FieldError(path, msg))
    named, wanted = (
        [group["parameters"] for group in _at(spec, ("optimizer", "groups")) or ()]
        for spec in (parent.spec, own)
    )
    if named != wanted:
        msg = (
            f"must list {named} in this order, as in run {parent.id}, whose optimizer state this "
            "run continues; other fields may change"
        )
        faults.append(FieldError(("optimizer", "groups"), msg))
    return faults


def _at(node: Any, path: Sequence[str]) -> Any:
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _nothing_left(spec: RunSpec, parent: RunRow, step: int) -> list[FieldError]:
    """Return a fault if the run would end before its first step."""
    if not parent.steps_per_epoch:
        return []
    total = spec.train.max_steps or spec.train.epochs * parent.steps_per_epoch
    if step < total:
        return []
    field = "epochs" if spec.train.max_steps is None else "max_steps"
    return [
        FieldError(
            ("train", field),
            f"ends the run at step {total}, but its checkpoint already has {step} steps; raise it",
        )
    ]


def _hold(place: tuple[str, str], storage: Storage, parent: RunRow, checkpoint: Checkpoint) -> None:
    """Protect the checkpoint until the reconciler has seen the new run, then check that it exists.
    In this order retention cannot delete it unnoticed. Runs that have ended have no retention."""
    run_dir = RunDir(storage, parent.id)
    if not parent.status.terminal:
        CheckpointHold(run_dir, checkpoint.name, must_be_stored=True, lasts_s=ACKNOWLEDGED_HOLD_S)
    try:
        CheckpointStore(run_dir).manifest(checkpoint.name)
    except StorageNotFound:
        raise _fault(
            place,
            (
                f"the checkpoint of step {checkpoint.step} was just deleted by retention; choose a "
                "newer one"
            ),
        ) from None
    except CorruptCheckpoint as exc:
        raise _fault(place, f"the checkpoint of step {checkpoint.step} is corrupt: {exc}") from exc
