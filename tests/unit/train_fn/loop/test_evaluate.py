"""What a task's ``metrics`` may return, and what is made of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from train_fn.errors import BadTask
from train_fn.loop.evaluate import _measure, _pair, averages_of


class Task:
    def __init__(self, measured: Any) -> None:
        self.measured = measured

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return torch.tensor(6.0), 2

    def metrics(self, model: Any, batch: Any) -> Any:
        return self.measured


def test_names_that_only_some_batches_have_are_averaged_over_those() -> None:
    measured = [
        (2, {"b": (1.0, 2.0)}),
        (0, {"a": (1.0, 1.0)}),
        (3, {"a": (3.0, 3.0), "c": (0.0, 0.0)}),
        (1, {"b": (5.0, 2.0)}),
    ]
    averages = averages_of(measured)
    assert list(averages) == ["a", "b", "c"], (
        "in the order of the batches, whichever rank measured them"
    )
    assert (averages["a"], averages["b"]) == (1.0, 1.5) and math.isnan(averages["c"])
    assert averages_of([]) == {}


def test_a_loss_is_measured_where_a_batch_gives_none() -> None:
    model = torch.nn.Linear(1, 1)
    task = Task({"loss": None, "other": (1, 2)})
    assert _measure(task, model, None, task.loss) == {
        "loss": (torch.tensor(6.0), 2),
        "other": (1, 2),
    }
    assert _measure(Task({"loss": (1, 1)}), model, None, task.loss) == {"loss": (1, 1)}
    assert _measure(task, model, None, None) == {"other": (1, 2)}


@pytest.mark.parametrize(
    "value", [0.5, (1, 2, 3), torch.zeros(3), "no", (torch.zeros(2), 1), ("a", 1)]
)
def test_what_is_no_sum_and_weight_is_refused_with_file_and_line(value: Any) -> None:
    with pytest.raises(
        BadTask,
        match=r"Task\.metrics \(.*test_evaluate.py, line \d+\) returned .* for 'accuracy'; it must",
    ):
        _pair(Task({}), "accuracy", value)
    assert _pair(Task({}), "accuracy", (torch.tensor(3), 4)) == (3.0, 4.0)
