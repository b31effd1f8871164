"""What journals record of each step, and the comparison of two runs that made the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.wire.events import EventKind
from everstep.wire.run import Replay
from storage.logs.journal import journal_events
from storage.run_dir import RunDir

_KINDS = (EventKind.ATTEMPT_STARTED, EventKind.RESTORED, EventKind.METRICS)


@dataclass(frozen=True)
class StepRecord:
    """What is recorded of one step."""

    loss: float | None
    proof: Mapping[str, str] | None
    """Digests of the step; None if an older version or a user's own loop made it."""
    world_size: int | None
    """Ranks that made it."""

    def differing(self, other: StepRecord) -> tuple[str, ...]:
        """Return what differs: ``loss``, ``gradient``, ``weights`` (before the step's update); if
        none of these does, ``samples`` where the chain differs."""
        mine, others = self.proof or {}, other.proof or {}
        found = [name for name in ("gradient", "weights") if mine.get(name) != others.get(name)]
        if self.loss != other.loss:
            found.insert(0, "loss")
        if not found and mine.get("chain") != others.get("chain"):
            found.append("samples")
        return tuple(found)


class StepRecords:
    """Fold a run's journals into the records of the steps that count."""

    def __init__(self) -> None:
        self._points: dict[int, dict[str, Any]] = {}
        self._attempts: list[tuple[int, int | None]] = []
        """(Steps done at its beginning, its ranks) of each attempt, in order."""

    def read(self, run_dir: RunDir) -> StepRecords:
        """Read all journals of a run. Raises StorageError."""
        for submission in run_dir.submissions():
            sizes: dict[int, int] = {}
            for event in journal_events(run_dir, (submission,), _KINDS):
                if event.kind is EventKind.ATTEMPT_STARTED:
                    sizes[event.attempt] = event.data["world_size"]
                elif event.kind is EventKind.RESTORED:
                    self.begin(event.data["step"], sizes.get(event.attempt))
                elif event.kind is EventKind.METRICS:
                    self.add(event.data["points"])
        return self

    def begin(self, step: int, world_size: int | None) -> None:
        """Note an attempt that began with ``step`` steps done. Later steps no longer count."""
        self._attempts.append((step, world_size))
        for late in [each for each in self._points if each > step]:
            del self._points[late]

    def add(self, points: list[dict[str, Any]]) -> None:
        """Note steps, some of them perhaps again."""
        for point in points:
            self._points[point["step"]] = point

    def of(self, step: int) -> StepRecord | None:
        """Return the record of a step; None if there is none."""
        point = self._points.get(step)
        if point is None:
            return None
        made = [size for begin, size in self._attempts if begin < step]
        return StepRecord(
            point["values"].get("loss"), point.get("proof"), made[-1] if made else None
        )


def compare(
    first: StepRecords, again: StepRecords, replay: Replay, *, is_elastic: bool = False
) -> Replay:
    """Return ``replay`` with its result.

    Args:
        first: records of the run whose steps were trained again.
        again: records of the replay.
        is_elastic: whether any number of ranks must give the same bits.
    """
    compared, missing = 0, None

    def found(result: str, step: int | None, message: str, differs: tuple[str, ...] = ()) -> Replay:
        fields = {"result": result, "compared": compared, "step": step, "message": message}
        return Replay.model_validate({**dict(replay), **fields, "differs": differs})

    for step in range(replay.from_step + 1, replay.to_step + 1):
        one, other = first.of(step), again.of(step)
        lacks = _lacking(one, other, step, replay.run_id)
        if one is None or other is None or lacks is not None:
            missing = missing or (step, lacks)
            continue
        differs = one.differing(other)
        if not differs:
            compared += 1
        elif not is_elastic and one.world_size != other.world_size:
            missing = missing or (step, _other_size(one, other, step))
        else:
            message = f"step {step} differs in {' and '.join(differs)}{_values(one, other)}"
            return found("differs", step, message, differs)
    if missing is not None:
        return found("not_proven", missing[0], f"not proven: {missing[1]}")
    steps = f"steps {replay.from_step + 1} to {replay.to_step}"
    return found("equal", None, f"{steps} are equal in every bit of the recorded digests")


def _lacking(
    one: StepRecord | None, other: StepRecord | None, step: int, run_id: str
) -> str | None:
    """Return what is missing to compare a step; None if nothing is."""
    if other is None:
        return f"the replay has no record of step {step}, as it ended before or lost it"
    if one is None:
        return f"run {run_id} has no record of step {step}"
    if one.proof is None or other.proof is None:
        who = f"run {run_id}" if one.proof is None else "the replay"
        return f"{who} has no digests of step {step}"
    return None


def _other_size(one: StepRecord, other: StepRecord, step: int) -> str:
    return (
        f"step {step} was trained on {one.world_size} ranks and replayed on {other.world_size}. "
        "Ranks of another number sum gradients in another order, so only equal numbers prove "
        "anything. Choose steps that were trained at one number of ranks"
    )


def _values(one: StepRecord, other: StepRecord) -> str:
    """Return both values of what differs first."""
    if one.loss != other.loss:
        return f": the loss was {one.loss!r}, and is {other.loss!r}"
    return ""
