"""Rules for which checkpoints are in the committed lineage, and which of them is the best.

Pure: storage, ranks and the service share these rules.

States from which a newer attempt did not continue are void (invariant I1). An attempt's restore
point is its ``restored`` event, which is durable before the attempt takes a step. An older attempt
that was slow rather than dead may commit checkpoints after that; they are beyond the restore point
and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from everstep.wire.events import BEGINNINGS
from everstep.wire.metric_names import lookup
from storage.run_names import CheckpointName, Origin


@dataclass(frozen=True)
class RestorePoint:
    """Where an attempt started."""

    step: int
    """Steps done; older states beyond it do not count."""
    fresh: bool
    """It started from scratch, or from another run's checkpoint: no older state counts."""


class Scored(Protocol):
    """A checkpoint with the metrics of its evaluation: a manifest, or a record of the service."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def submission(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


S = TypeVar("S", bound=Scored)


def restore_point(data: Mapping[str, Any]) -> RestorePoint:
    """Return the restore point in the data of a ``restored`` event."""
    return RestorePoint(int(data["step"]), data.get("source") in BEGINNINGS)


def in_lineage(
    names: Iterable[CheckpointName], restore_points: Mapping[Origin, RestorePoint]
) -> list[CheckpointName]:
    """Return the names in the committed lineage, oldest first.

    Args:
        restore_points: by (submission, attempt). Attempts without one have not restored yet and
            void nothing.
    """
    return sorted(name for name in names if voided_by(name, restore_points) is None)


def voided_by(
    name: CheckpointName, restore_points: Mapping[Origin, RestorePoint]
) -> RestorePoint | None:
    """Return the restore point that voids a state: a fresh one if there is any, else the lowest;
    None if the state counts.

    A state counts if every newer attempt started at its step or beyond, and none started from
    scratch.
    """
    voiding = [
        point
        for origin, point in restore_points.items()
        if is_newer(origin, name) and (point.fresh or name.step > point.step)
    ]
    return min(voiding, key=lambda point: (not point.fresh, point.step), default=None)


def is_newer(origin: Origin, name: CheckpointName) -> bool:
    """Return whether an attempt comes after the one that wrote a state.

    A name from an older version has no attempt; then no attempt of its own submission is newer.
    """
    return origin > name.origin if name.attempt else origin[0] > name.submission


def is_better(value: float, best: float | None, mode: Literal["min", "max"]) -> bool:
    """Return whether a metric's value is better than the best so far (None: there is none). Equal
    values and NaN are not."""
    if value != value:
        return False
    return best is None or (value > best if mode == "max" else value < best)


def best_of(found: Iterable[S], metric: str, mode: Literal["min", "max"]) -> S | None:
    """Return the checkpoint with the best value of a validation metric; None if none has it.

    Of equal values the lowest step wins, as during training; of one step the newest attempt.
    """
    best: tuple[float, S] | None = None
    for each in sorted(found, key=_earliest_step_newest_attempt):
        value = lookup(each.metrics, metric)
        if value is not None and is_better(value, best[0] if best else None, mode):
            best = value, each
    return best[1] if best else None


def origin_of(checkpoint: Scored) -> Origin:
    """Return the submission and attempt that wrote a checkpoint. The attempt is 0 if the name has
    none: from an older version, or a user's function."""
    parsed = CheckpointName.parse(checkpoint.name)
    return parsed.origin if parsed else (checkpoint.submission, 0)


def _earliest_step_newest_attempt(checkpoint: Scored) -> tuple[int, int, int]:
    submission, attempt = origin_of(checkpoint)
    return checkpoint.step, -submission, -attempt
