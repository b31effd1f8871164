"""Two runs are compared step by step: the first difference is named, and what is missing proves
nothing."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.wire.run import Replay
from train_fn.journal.step_records import StepRecords, compare

REPLAY = Replay(run_id="run_a", from_step=10, to_step=14)


def point(step: int, *, loss: float | None = None, **digests: str) -> dict[str, Any]:
    proof = {"chain": f"c{step}", "gradient": f"g{step}", "weights": f"w{step}"} | digests
    values = {"loss": 1.0 / step if loss is None else loss}
    return {"step": step, "at": 0.0, "values": values, "proof": proof}


def records(*points: dict[str, Any], begin: int = 0, world_size: int = 2) -> StepRecords:
    found = StepRecords()
    found.begin(begin, world_size)
    found.add(list(points))
    return found


def whole(**changed: dict[str, Any]) -> StepRecords:
    """Steps 1 to 20; ``s12`` replaces step 12."""
    steps = [changed.get(f"s{step}", point(step)) for step in range(1, 21)]
    return records(*steps)


def again(**changed: dict[str, Any]) -> StepRecords:
    steps = [changed.get(f"s{step}", point(step)) for step in range(11, 15)]
    return records(*steps, begin=10)


def test_equal_steps_are_equal_and_no_step_is_left_out() -> None:
    found = compare(whole(), again(), REPLAY)
    assert (found.result, found.compared, found.step, found.differs) == ("equal", 4, None, ())
    assert found.message is not None and "steps 11 to 14 are equal" in found.message


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        (point(12, loss=0.5), ("loss",)),
        (point(12, gradient="x", chain="x"), ("gradient",)),
        (
            point(12, loss=0.5, weights="x", gradient="x", chain="x"),
            ("loss", "gradient", "weights"),
        ),
        (point(12, chain="x"), ("samples",)),
    ],
)
def test_the_first_difference_is_named(changed: dict[str, Any], differs: tuple[str, ...]) -> None:
    found = compare(whole(), again(s12=changed, s13=point(13, loss=9.0)), REPLAY)
    assert (found.result, found.step, found.compared) == ("differs", 12, 1)
    assert found.differs == differs
    assert found.message is not None and found.message.startswith("step 12 differs in ")


def test_what_is_missing_proves_nothing_but_a_difference_still_counts() -> None:
    short = records(*(point(step) for step in (11, 12)), begin=10)
    found = compare(whole(), short, REPLAY)
    assert (found.result, found.step, found.compared) == ("not_proven", 13, 2)
    assert "the replay has no record of step 13" in str(found.message)
    found = compare(short, again(), REPLAY)
    assert found.result == "not_proven" and "run run_a has no record of step 13" in str(
        found.message
    )
    old = {**point(11)}
    del old["proof"]
    found = compare(whole(s11=old), again(), REPLAY)
    assert (found.result, found.step) == ("not_proven", 11)
    assert "run run_a has no digests of step 11" in str(found.message)
    found = compare(whole(s11=old), again(s14=point(14, loss=9.0)), REPLAY)
    assert (found.result, found.step) == ("differs", 14)
    assert compare(StepRecords(), StepRecords(), REPLAY).result == "not_proven"


def test_steps_of_another_number_of_ranks_prove_nothing() -> None:
    other = records(*(point(step, gradient="x") for step in range(11, 15)), begin=10, world_size=3)
    found = compare(whole(), other, REPLAY)
    assert (found.result, found.step) == ("not_proven", 11)
    assert "was trained on 2 ranks and replayed on 3" in str(found.message)
    assert compare(whole(), other, REPLAY, is_elastic=True).result == "differs"


def test_a_step_that_was_made_again_counts_as_it_was_made_last() -> None:
    first = whole(s13=point(13, loss=7.0))
    first.begin(12, 3)
    first.add([point(12), point(13), point(14)])  # step 12 is reported again
    found = [first.of(step) for step in (12, 13, 15)]
    assert found[0] is not None and (found[0].world_size, found[0].loss) == (2, 1 / 12)
    assert found[1] is not None and (found[1].world_size, found[1].loss) == (3, 1 / 13)
    assert found[2] is None, "made by an attempt that no longer counts"
