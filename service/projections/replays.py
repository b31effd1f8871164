"""Replays: which steps of a run were trained by how many ranks, and what came of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.wire import Attempt
from everstep.wire.replays import Replay
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.projections.changes import Changes


@dataclass(frozen=True)
class Stretch:
    """Steps that one number of ranks has trained: those after ``begin``, up to ``end``."""

    begin: int
    end: int
    world_size: int

    def meets(self, begin: int, end: int) -> bool:
        """Return whether any of the steps after ``begin``, up to ``end``, is one of these."""
        return max(self.begin, begin) < min(self.end, end)


def stretches(attempts: Iterable[Attempt], last_step: int) -> list[Stretch]:
    """Return which steps were trained by how many ranks, in order. Of steps that several attempts
    trained, the newest counts.

    Args:
        last_step: steps done in the lineage.
    """
    found: list[Stretch] = []
    for attempt in attempts:
        begin = attempt.first_step
        if begin is None:  # it never trained
            continue
        found = [
            Stretch(each.begin, min(each.end, begin), each.world_size)
            for each in found
            if each.begin < begin
        ]
        if found and found[-1].world_size == attempt.world_size:
            begin = found.pop().begin
        found.append(Stretch(begin, last_step, attempt.world_size))
    return [each for each in found if each.begin < each.end]


def words(found: Sequence[Stretch]) -> str:
    """Return stretches in words."""
    return ", ".join(
        f"steps {each.begin + 1} to {each.end} by {each.world_size} "
        f"{'rank' if each.world_size == 1 else 'ranks'}"
        for each in found
    )


def begun_at(run: RunRow) -> int:
    """Return the steps done in the state that a run began with."""
    origin = run.stored_spec.origin
    return int(origin.step) if origin is not None else 0


def compared(run: RunRow, event: EventRow) -> Changes:
    """Return the change that the end of a replay makes."""
    if run.replay_of is None:
        return Changes()
    return Changes({"replay_of": Replay.model_validate(event.data).model_dump(mode="json")})
