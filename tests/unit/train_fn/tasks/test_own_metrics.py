"""A task's torchmetrics: merged over ranks, the same as if one rank had seen all."""

from __future__ import annotations

import importlib
import math
import pickle
from typing import Any

import pytest
import torch

from train_fn.errors import BadTask
from train_fn.tasks.metrics import OwnMetrics, TreeMetrics, build_own_metrics
from train_fn.user_code.modules import declare_missing_ops

pytestmark = pytest.mark.own_process

# as before any code of a user's is imported: torchmetrics imports torchvision
declare_missing_ops()
torchmetrics = importlib.import_module("torchmetrics")
classification = importlib.import_module("torchmetrics.classification")

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.rand(90, generator=GENERATOR)
TARGETS = (SCORES + torch.rand(90, generator=GENERATOR) > 1).long()


class Task:
    def __init__(self, **metrics: Any) -> None:
        self.built = metrics

    def build_metrics(self) -> Any:
        return {
            name: metric.clone() if isinstance(metric, torchmetrics.Metric) else metric
            for name, metric in self.built.items()
        }

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {}


def measured(task: Any, *shares: range) -> dict[str, float]:
    ranks = [build_own_metrics(task) for _ in shares]
    for own, share in zip(ranks, shares, strict=True):
        for first in share:
            scores, targets = (
                SCORES[first * 10 : first * 10 + 10],
                TARGETS[first * 10 : first * 10 + 10],
            )
            rest = own.update(
                {"auroc": (scores, targets), "f1": (scores, targets), "accuracy": (3, 10)}
            )
            assert rest == {"accuracy": (3, 10)}
    return ranks[0].computed([pickle.loads(pickle.dumps(own.states())) for own in ranks])


def test_the_world_size_changes_no_metric() -> None:
    task = Task(auroc=classification.BinaryAUROC(), f1=torchmetrics.F1Score(task="binary"))
    alone = measured(task, range(9))
    assert alone == measured(task, range(5), range(5, 9)) == measured(task, range(9), range(0))
    whole = classification.BinaryAUROC()
    assert alone["auroc"] == pytest.approx(float(whole(SCORES, TARGETS)))
    assert 0 < alone["f1"] < 1


def test_without_such_metrics_nothing_is_asked() -> None:
    own = build_own_metrics(object())  # type: ignore[arg-type]
    assert own.update({"loss": (1, 2)}) == {"loss": (1, 2)}
    assert own.computed([own.states()]) == {}


def test_a_metric_of_several_numbers_is_refused_unless_they_have_names() -> None:
    own = build_own_metrics(
        Task(recall=classification.MulticlassRecall(num_classes=3, average=None))
    )
    own.update({"recall": (torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))})
    with pytest.raises(
        BadTask, match=r"build_metrics .*: recall has 3 values; a metric is one number"
    ):
        own.computed([own.states()])


class Named(torchmetrics.MeanMetric):  # type: ignore[misc, name-defined]
    def compute(self) -> Any:
        return {"low": torch.tensor(1.0), "high": torch.tensor(2.0)}


def test_the_parts_of_a_metric_are_named() -> None:
    own = build_own_metrics(Task(span=Named()))
    own.update({"span": (torch.tensor(1.0),)})
    assert own.computed([own.states()]) == {"span_low": 1.0, "span_high": 2.0}


def test_what_is_no_metric_or_is_not_fed_is_refused() -> None:
    with pytest.raises(
        BadTask,
        match=r"f1 \(int\) has no update, compute, merge_state, reset; give a torchmetrics\.Metric",
    ):
        build_own_metrics(Task(f1=3))
    own: OwnMetrics = build_own_metrics(Task(f1=torchmetrics.F1Score(task="binary")))
    with pytest.raises(
        BadTask,
        match=(
            r"Task\.metrics \(.*line \d+\) must return 'f1' as well, a tuple of what "
            r".*F1Score\.update"
        ),
    ):
        own.update({"loss": (1, 2)})


def test_a_batch_that_has_nothing_for_a_metric_says_none() -> None:
    own = build_own_metrics(
        Task(f1=torchmetrics.F1Score(task="binary"), recall=classification.BinaryRecall())
    )
    assert own.update({"f1": None, "recall": (SCORES[:10], TARGETS[:10])}) == {}
    assert own.update({"f1": (SCORES[10:], TARGETS[10:]), "recall": None}) == {}
    expected = {"f1": torchmetrics.F1Score(task="binary")(SCORES[10:], TARGETS[10:])}
    expected |= {"recall": classification.BinaryRecall()(SCORES[:10], TARGETS[:10])}
    assert own.computed([own.states()]) == pytest.approx(
        {name: float(value) for name, value in expected.items()}
    )


def measured_in_a_tree(task: Any, *shares: list[int]) -> dict[str, float]:
    ranks = [build_own_metrics(task, TreeMetrics) for _ in shares]
    for own, share in zip(ranks, shares, strict=True):
        for number in share:
            part = slice(number * 10, number * 10 + 10)
            f1 = None if number == 4 else (SCORES[part], TARGETS[part])
            own.update({"mean": (0.1 * SCORES[part],), "f1": f1}, number)
    return ranks[0].computed([pickle.loads(pickle.dumps(own.states())) for own in ranks])


def test_states_are_merged_in_one_order_whoever_measured_what() -> None:
    """Contiguous shares, and those of an iterable set, which go round; one batch has no value."""
    task = Task(mean=torchmetrics.MeanMetric(), f1=torchmetrics.F1Score(task="binary"))
    alone = measured_in_a_tree(task, list(range(9)))
    for shares in (
        [[0, 1, 2, 3, 4], [5, 6, 7, 8]],
        [[0, 2, 4, 6, 8], [1, 3, 5, 7]],
        [[0, 1, 2], [3, 4, 5], [], [6, 7, 8]],
        [[8], list(range(8))],
    ):
        assert measured_in_a_tree(task, *shares) == alone
    assert alone["f1"] == pytest.approx(
        float(
            torchmetrics.F1Score(task="binary")(
                torch.cat([SCORES[:40], SCORES[50:]]), torch.cat([TARGETS[:40], TARGETS[50:]])
            )
        )
    )
    with torch.no_grad():
        nothing = build_own_metrics(task, TreeMetrics)
    assert all(map(math.isnan, nothing.computed([nothing.states()]).values()))
