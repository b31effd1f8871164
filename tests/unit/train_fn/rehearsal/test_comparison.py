"""What is first different between two trainings, and which deaths a rehearsal makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from train_fn.rehearsal.comparison import (
    ADVICE,
    Difference,
    Record,
    Step,
    Update,
    advice_to_task,
    first_difference,
    held_names,
    read_record,
    same_batches,
)
from train_fn.rehearsal.plan import deaths_of, row_of, summed_up


def update(number: int, **changes: dict[str, str]) -> Update:
    state = {
        "model/weight": f"#{number}",
        "optimizer/state/0/exp_avg": f"#{number}",
        "optimizer/param_groups/0/lr": "0.1",
        "optimizer/param_groups/0/initial_lr": "0.1",
        "scheduler/last_epoch": str(number),
        "extra/ema/count": str(number),
    }
    return Update(
        state | changes.get("state", {}),
        {"weight": f"#{number}"} | changes.get("gradients", {}),
        {"torch": f"#{number}"} | changes.get("draws", {}),
        {"train.py: main(): best": "0.5"} | changes.get("held", {}),
        "train.py, line 9",
    )


def step(number: int, **changes: dict[str, str]) -> Step:
    batch = changes.get("batch", {"x": f"#{number}"})["x"]
    return Step([[[batch, f"[4] {batch}…"]]], [update(number, **changes)], "train.py, line 9", True)


def record(steps: range = range(8), final: bool = True) -> Record:
    made = {number: step(number) for number in steps}
    return Record(
        made,
        update(steps.stop).state if final else None,
        steps.stop if final else None,
        {number + 1: 1 / (number + 1) for number in steps},
    )


def attempts() -> list[list[Record]]:
    """A training that died in its fifth step and went on from the third."""
    return [[record(range(5), final=False)], [record(range(3, 8))]]


def test_a_training_that_went_on_alike_differs_in_nothing() -> None:
    found = attempts()
    found[0][0].steps[4].is_committed = False
    found[0][0].steps[4].updates.clear()  # it died before
    assert first_difference([record()], found) is None


@pytest.mark.parametrize(
    ("changes", "what", "detail"),
    [
        ({"batch": {"x": "#other"}}, "the samples", "[4] #5… became [4] #other…"),
        ({"gradients": {"weight": "#other"}}, "the gradients", "of weight"),
        ({"draws": {"torch": "#other"}}, "the random numbers", "of torch"),
        ({"state": {"model/weight": "#other"}}, "the weights", "model/weight"),
        (
            {"state": {"optimizer/state/0/exp_avg": "#other"}},
            "the optimizer's state",
            "optimizer/state/0/exp_avg",
        ),
        (
            {"state": {"optimizer/param_groups/0/lr": "0.2", "model/weight": "#other"}},
            "the optimizer's groups",
            "optimizer/param_groups/0/lr: 0.1 became 0.2",
        ),
        (
            {"state": {"scheduler/last_epoch": "4", "model/weight": "#other"}},
            "the scheduler",
            "scheduler/last_epoch: 5 became 4",
        ),
        ({"state": {"extra/ema/count": "4"}}, "an extra", "extra/ema/count: 5 became 4"),
    ],
)
def test_what_differs_first_is_named_with_its_cause(
    changes: dict[str, dict[str, str]], what: str, detail: str
) -> None:
    found = attempts()
    found[1][0].steps[5] = step(5, **changes, held={"train.py: seen": "1"})
    found[1][0].steps[6] = step(6, batch={"x": "#later"})
    difference = first_difference([record()], found)
    assert difference is not None
    assert (difference.what, difference.step, difference.detail) == (what, 6, detail)
    assert difference.held == ("train.py: seen (unset became 1)",)
    assert difference.where == "train.py, line 9"
    assert difference.advice == ADVICE[what]
    assert "es." not in advice_to_task(what)


def wrong_loss(found: list[list[Record]]) -> None:
    found[1][0].losses[5] = 9.0


def wrong_final(found: list[list[Record]]) -> None:
    found[1][0].final = {**update(8).state, "extra/ema/count": "7"}


def no_update(found: list[list[Record]]) -> None:
    found[1][0].steps[6].updates.clear()


def left_out(found: list[list[Record]]) -> None:
    del found[1][0].steps[6]


def one_more(found: list[list[Record]]) -> None:
    found[1][0].steps[8] = step(8)


def other_end(found: list[list[Record]]) -> None:
    found[1][0].final_step = 7


@pytest.mark.parametrize(
    ("change", "what", "step_number"),
    [
        (wrong_loss, "the loss", 5),
        (wrong_final, "an extra", 8),
        (no_update, "the number of optimizer steps", 7),
        (left_out, "the number of steps", 7),
        (one_more, "the number of steps", 9),
        (other_end, "the number of steps", 7),
    ],
)
def test_what_is_missing_differs_too(
    change: Callable[[list[list[Record]]], None], what: str, step_number: int
) -> None:
    found = attempts()
    change(found)
    difference = first_difference([record()], found)
    assert difference is not None
    assert (difference.what, difference.step) == (what, step_number)


@pytest.mark.parametrize("is_state", [False, True])
def test_a_batch_that_a_variable_carries_over_is_named(is_state: bool) -> None:
    expected, found = record(), attempts()
    expected.steps[4].carried = ["X (train.py, line 7)"]
    expected.steps[4].carries_state = is_state
    found[1][0].steps[4] = step(4, batch={"x": "#other"})
    difference = first_difference([expected], found)
    assert difference is not None
    named = "a state that the loop carries" if is_state else "a batch that was read before"
    assert difference.what == named
    assert difference.detail.startswith("X (train.py, line 7) held it when the step before")


@pytest.mark.parametrize(
    ("before", "after", "is_lost"),
    [
        ("weights #1", "weights #2", True),
        ("weights #1", "None", True),
        ("weights #1", "weights #1", False),
        ("#1", "#2", False),  # such as a sum of losses: a note
        ("None", "weights #1", False),
    ],
)
def test_another_model_and_a_copy_of_weights_that_begin_anew_are_a_difference(
    before: str, after: str, is_lost: bool
) -> None:
    expected, found = record(), attempts()
    expected.steps[4] = step(4, held={"train.py: ema": before})
    found[1][0].steps[4] = step(4, held={"train.py: ema": after})
    found[1][0].lines["train.py: ema"] = 12
    difference = first_difference([expected], found)
    assert (difference is not None) == is_lost
    if difference is not None:
        assert difference.what == "what the code keeps"
        assert difference.detail == "train.py: ema, line 12"
    assert first_difference([expected], found, {"train.py: ema"}) is None


def test_what_two_undisturbed_trainings_do_not_share_is_left_out() -> None:
    twin, found = record(), attempts()
    twin.steps[5] = step(5, held={"train.py: pid": "7"})
    ignored = held_names([record()], [[twin]])
    assert ignored == {"train.py: pid": "unset became 7 in step 6"}
    found[1][0].steps[5] = step(5, gradients={"weight": "#"}, held={"train.py: pid": "9"})
    difference = first_difference([record()], found, ignored)
    assert difference is not None and difference.held == ()


def test_ranks_with_the_same_batches_are_found() -> None:
    assert same_batches([record()]) is None
    found = same_batches([record(), record()])
    assert found is not None and found.what == "what ranks train on" and found.rank == 1
    other = record()
    other.steps[4] = step(4, batch={"x": "#own"})
    assert same_batches([record(), other]) is None
    unseen = record()
    for each in unseen.steps.values():
        each.inputs = [[]]
    assert same_batches([unseen, unseen]) is None, "calls whose batches were not seen"


def test_a_record_is_read_up_to_where_its_rank_died(tmp_path: Path) -> None:
    entries = [
        {"kind": "evaluation", "step": 3},
        {
            "kind": "input",
            "step": 3,
            "of": [["#1", "[4] 1…"]],
            "where": "train.py, line 8",
            "carried": ["x (train.py, line 3)"],
            "is_made": False,
        },
        {"kind": "evaluation", "step": 3},
        {
            "kind": "update",
            "step": 3,
            **{name: {} for name in ("state", "gradients", "draws", "held", "lines")},
            "where": "train.py, line 9",
        },
        {"kind": "commit", "step": 4, "ends_epoch": True},
        {
            "kind": "input",
            "step": 4,
            "of": [["#2", "[4] 2…"]],
            "where": None,
            "carried": [],
            "is_made": False,
        },
    ]
    path = tmp_path / "0.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)) + '\n{"kind": "upd')
    steps = read_record(path).steps
    assert sorted(steps) == [3, 4]
    assert (steps[3].is_committed, steps[3].ends_epoch, steps[3].is_evaluated) == (True, True, True)
    assert (len(steps[3].updates), steps[3].where) == (1, "train.py, line 9")
    assert (steps[3].carried, steps[4].carried) == (["x (train.py, line 3)"], [])
    assert not steps[4].is_committed and read_record(tmp_path / "none").steps == {}


def test_deaths_lie_within_steps_after_commits_and_at_the_end_of_an_epoch() -> None:
    ranks = [record(range(12)), record(range(12))]
    ranks[0].steps[3].ends_epoch = True
    deaths, rows = deaths_of(ranks, 2, 12)
    found = [each.orders.dies or each.orders.parks_at for each in deaths]
    assert found == [
        9,
        4,
        (1, 7, "update"),
        (0, 7, "commit"),
        (1, 4, "commit"),
    ], "those that nobody has to notice come first"
    assert [row.name for row in rows] == ["an evaluation"]
    ranks[0].steps[4].is_evaluated = True
    deaths, rows = deaths_of(ranks, 2, 12)
    assert not rows
    assert deaths[1].name == "all ranks killed after step 4: the end of an epoch and an evaluation"


def test_all_die_where_gradients_are_added_up_if_a_loop_does_that() -> None:
    ranks = [record(range(12))]
    for number in (0, 1, 2, 4, 5, 6, 8, 9, 10):
        ranks[0].steps[number].updates.clear()
    deaths, _ = deaths_of(ranks, 1, 12)
    [at] = [each.orders.parks_at for each in deaths if each.orders.parks_at is not None]
    assert not ranks[0].steps[at - 1].updates
    assert ranks[0].steps[next(each.orders.dies[1] for each in deaths if each.orders.dies)].updates


def test_a_report_ends_by_its_worst_row() -> None:
    equal, left_out = row_of("undisturbed", "equal", "12 steps"), row_of("a", "left out", "b")
    assert summed_up([equal, left_out])[0] == "equal"
    rows = [equal, row_of("a", "impossible", "b")]
    assert summed_up(rows)[0] == "impossible"
    rows.append(row_of("c", "different", "d", Difference("the end", 3, 0, "it hung")))
    outcome, text = summed_up(rows)
    assert outcome == "different" and "1 of 2 rows differ" in text
    assert rows[-1].difference is not None and rows[-1].difference.advice == ADVICE["the end"]
