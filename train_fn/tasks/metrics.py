"""A task's own metrics that are no quotients of sums, as torchmetrics has them: an F1 score, an
AUC.

``build_metrics`` makes them. What ``metrics`` returns under the name of one is the argument of its
``update``. Each rank updates its own with its share of the validation set. Their states are merged
in the order of ranks, which is that of the samples.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch

from train_fn.elastic.sum_tree import Fold, OpenTree, SumTree, TreeNode
from train_fn.errors import BadTask
from train_fn.tasks.protocol import Task, where

_NEEDED = ("update", "compute", "merge_state", "reset")


class OwnMetrics:
    """The metrics of one evaluation on one rank."""

    def __init__(self, task: Task, metrics: dict[str, Any]) -> None:
        self._task, self._metrics = task, metrics

    def to(self, device: torch.device) -> None:
        for metric in self._metrics.values():
            metric.to(device)

    def update(self, values: dict[str, Any], number: int = 0) -> dict[str, Any]:
        """Update the metrics with what ``metrics`` returned for micro-batch ``number``, unless it
        is None. Return the other values, which are sums. Raises BadTask."""
        for name, metric in self._metrics.items():
            if name in values and values[name] is None:
                continue
            if not isinstance(values.get(name), tuple | list):
                raise BadTask(
                    f"{where(self._task, 'metrics')} must return {name!r} as well, a tuple of what "
                    f"{type(metric).__name__}.update "
                    f"takes, for it is in {where(self._task, 'build_metrics')}; None for a batch "
                    "that has nothing for it"
                )
            metric.update(*values[name])
        return {name: value for name, value in values.items() if name not in self._metrics}

    def states(self) -> dict[str, Any]:
        """Return every metric that was updated, on the CPU, for the other ranks."""
        return {name: metric.cpu() for name, metric in self._metrics.items() if metric.update_count}

    def computed(self, states: list[dict[str, Any]]) -> dict[str, float]:
        """Return the metrics over all ranks' states, by name. A metric that computes a dict gives
        one for each key. Raises BadTask."""
        found: dict[str, float] = {}
        for name in self._metrics:
            whole = self.merged(name, states)
            value = math.nan if whole is None else whole.compute()
            parts = (
                {f"{name}_{key}": part for key, part in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
            found |= {key: self._number(key, part) for key, part in parts.items()}
        return found

    def merged(self, name: str, states: list[dict[str, Any]]) -> Any | None:
        """Return a metric over all ranks' states; None if no rank has updated it."""
        whole = None
        for metric in (ranks[name] for ranks in states if name in ranks):
            if whole is None:
                whole = metric
            else:
                self._merge(name, whole, metric)
        return whole

    def _merge(self, name: str, whole: Any, metric: Any) -> None:
        try:
            whole.merge_state(metric)
        except (RuntimeError, ValueError) as exc:
            source = where(self._task, "build_metrics")
            raise BadTask(
                f"{source}: {name} ({type(whole).__name__}) cannot be merged over ranks: {exc}"
            ) from exc

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            source = where(self._task, "build_metrics")
            raise BadTask(
                f"{source}: {name} has {value.numel()} values; a metric is one number "
                "(average='macro', say)"
            )
        return float(value)


def build_own_metrics(task: Task, kind: type[OwnMetrics] = OwnMetrics) -> OwnMetrics:
    """Return the task's metrics, empty. Raises BadTask for objects that are no metrics.

    Args:
        kind: says how ranks merge their states.
    """
    build = getattr(task, "build_metrics", None)
    metrics = build() if build is not None else {}
    source = where(task, "build_metrics")
    if not isinstance(metrics, dict):
        raise BadTask(
            f"{source} must return a dict of torchmetrics' metrics by name, not "
            f"{type(metrics).__name__}"
        )
    for name, metric in metrics.items():
        lacking = [method for method in _NEEDED if not callable(getattr(metric, method, None))]
        if lacking:
            raise BadTask(
                f"{source}: {name} ({type(metric).__name__}) has no {', '.join(lacking)}; give a "
                "torchmetrics.Metric"
            )
        metric.sync_on_compute = False  # the ranks' states are merged here
    if metrics and not hasattr(task, "metrics"):
        raise BadTask(
            f"{source} needs a method metrics(model, batch), which says what they are updated with"
        )
    return kind(task, metrics)


# ---------------------------------------------------------------- tree metrics

# A task's own metrics whose states are merged in one order at every world size, for
# ``train.exactness: elastic``.

_Nodes = dict[str, list[tuple[TreeNode, Any]]]


class TreeMetrics(OwnMetrics):
    """Like ``OwnMetrics``, but every micro-batch has a state of its own. A rank merges those of its
    share as far as the tree allows, and all ranks merge the rest in the tree's order."""

    def __init__(self, task: Task, metrics: dict[str, Any]) -> None:
        super().__init__(task, metrics)
        self._folds: dict[str, Fold[Any]] = {
            name: Fold(OpenTree(), partial(self._both, name)) for name in metrics
        }

    def update(self, values: dict[str, Any], number: int = 0) -> dict[str, Any]:
        rest = super().update(values, number)
        for name, metric in self._metrics.items():
            if metric.update_count:
                self._folds[name].push(number, copy.deepcopy(metric))
                metric.reset()
        return rest

    def states(self) -> _Nodes:
        """Return the merged states of every metric, for the other ranks, on the CPU."""
        return {
            name: [(node, metric.cpu()) for node, metric in fold.nodes]
            for name, fold in self._folds.items()
        }

    def merged(self, name: str, states: list[_Nodes]) -> Any | None:
        nodes = sorted(
            (entry for ranks in states for entry in ranks.get(name, ())), key=lambda entry: entry[0]
        )
        if not nodes:
            return None
        size = nodes[-1][0].stop
        whole = Fold[Any](SumTree(size, size), partial(self._both, name))
        end = 0
        for node, metric in nodes:
            for missing in range(end, node.start):  # a micro-batch without a value
                whole.push(missing, None)
            whole.put(node, metric)
            end = node.stop
        [(_, found)] = whole.nodes
        return found

    def _both(self, name: str, left: Any, right: Any) -> Any:
        if left is None or right is None:
            return right if left is None else left
        self._merge(name, left, right)
        return left
