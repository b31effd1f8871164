"""A task's own metrics whose states are merged in one order at every world size, for
``train.exactness: elastic``."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from train_fn.elastic.sum_tree import Fold, Node, OpenTree, SumTree
from train_fn.tasks.metrics import OwnMetrics
from train_fn.tasks.protocol import Task

_Nodes = dict[str, list[tuple[Node, Any]]]


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
