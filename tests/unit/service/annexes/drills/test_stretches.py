"""Which steps were trained by how many ranks, over attempts that began again."""

from __future__ import annotations

from datetime import UTC, datetime

from everstep.wire import Attempt
from service.annexes.drills.history import Stretch, stretches, words

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def attempt(first_step: int | None, world_size: int) -> Attempt:
    return Attempt(
        attempt=1,
        submission=1,
        world_size=world_size,
        workers=(),
        started_at=NOW,
        ended_at=None,
        first_step=first_step,
        last_step=None,
        restored_from=None,
        cause=None,
    )


def test_of_steps_that_were_made_again_the_newest_attempt_counts() -> None:
    made = [attempt(0, 2), attempt(100, 2), attempt(None, 5), attempt(80, 3), attempt(90, 1)]
    found = stretches(made, 120)
    assert found == [Stretch(0, 80, 2), Stretch(80, 90, 3), Stretch(90, 120, 1)]
    assert words(found[1:]) == "steps 81 to 90 by 3 ranks, steps 91 to 120 by 1 rank"
    assert [each.meets(80, 90) for each in found] == [False, True, False]
    assert stretches([attempt(0, 2), attempt(50, 2)], 70) == [Stretch(0, 70, 2)]
    assert stretches([attempt(0, 2), attempt(0, 3)], 40) == [Stretch(0, 40, 3)]
    assert stretches([], 0) == []
