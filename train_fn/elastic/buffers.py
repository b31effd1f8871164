"""What forward passes change, such as running statistics, summed in the tree's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from train_fn.elastic.bucket import complete
from train_fn.elastic.exchange import Exchange
from train_fn.elastic.sum_tree import Fold, completion
from train_fn.step.buffer_rules import Rule
from train_fn.step.buffers import BufferSums
from train_fn.step.late_changes import Change, LateChanges
from train_fn.step.peers import Peers
from train_fn.step.step_values import StepValues
from train_fn.step.untrained import Place, copy_all


class TreeValues(StepValues):
    """Like ``StepValues``, but the weighted sums travel with the step's gradients."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        rules: Sequence[Rule],
        peers: Peers,
        exchange: Exchange,
    ) -> None:
        super().__init__(tensors, rules, peers)
        self._exchange = exchange
        exchange.exchange_values([self._sums] if self._means else [])

    def add(
        self, now: list[torch.Tensor], num_samples: int, *, is_first: bool, number: int = 0
    ) -> None:
        if self._means:
            copy_all(self._value_of, [now[at] for at in self._means])
            # Infinity times 0 is NaN, not 0.
            weighted = self._values * num_samples if num_samples else torch.zeros_like(self._values)
            self._exchange.add_values(number, [weighted])
        if is_first and self._firsts and self._peers.rank == 0:
            copy_all(self._first_of, [now[at] for at in self._firsts])

    def start(self) -> None:
        firsts = self._peers.start_broadcast(self._bytes, 0) if self._firsts else None
        self._works = [firsts] if firsts is not None else []

    def write_to(self, tensors: list[torch.Tensor], num_samples: int) -> None:
        if self._means:
            copy_all([self._sums], self._exchange.values)
        super().write_to(tensors, num_samples)


class _Pass(NamedTuple):
    """One forward pass of this rank in the present step."""

    number: int
    num_samples: int


class TreeLateChanges(LateChanges):
    """Like ``LateChanges``, with sums in the tree's order: a rank keeps those of its nodes."""

    def __init__(
        self, places: list[Place], ignored: set[int], peers: Peers, exchange: Exchange
    ) -> None:
        super().__init__(places, ignored, peers)
        self._exchange, self._passes = exchange, list[_Pass]()

    def begin(self) -> None:
        self._passes = []
        super().begin()

    def passes(self, num_samples: int, number: int) -> None:
        if num_samples:  # else the pass of a step that was interrupted
            self._passes.append(_Pass(number, num_samples))

    def new_total(self, form: torch.Tensor) -> Fold[torch.Tensor]:
        return Fold(self._exchange.tree, torch.Tensor.add)

    def add_to_total(self, change: Change, value: torch.Tensor, num_samples: int) -> None:
        if num_samples:
            change.total.push(self._passes[-1].number, value.double() * num_samples)

    def first_total(
        self, before: torch.Tensor, now: torch.Tensor, own_samples: int, num_samples: int
    ) -> Fold[torch.Tensor]:
        """Return the sum over the passes so far, of which only the last one may have changed the
        tensor."""
        total: Fold[torch.Tensor] = self.new_total(now)
        passes = self._passes if own_samples or num_samples else []
        for position, done in enumerate(passes):
            is_last = num_samples > 0 and position == len(passes) - 1
            total.push(done.number, (now if is_last else before).double() * done.num_samples)
        return total

    def totals_over_ranks(self, numbers: list[int]) -> dict[int, torch.Tensor]:
        mine = {
            number: [(tuple(node), total.cpu()) for node, total in self.found[number].total.nodes]
            for number in numbers
        }
        ranks = self._peers.gather(mine)
        totals = {}
        for number in numbers:
            nodes = [entry for rank in ranks for entry in rank[number]]
            shares = [range(start, stop) for (start, stop), _ in nodes]
            plan = completion(self._exchange.tree, shares)
            totals[number] = complete(plan, [total for _, total in nodes])
        return totals


class TreeSums(BufferSums):
    """Make what sums the values of a step in the tree's order."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def values(
        self, tensors: list[torch.Tensor], rules: Sequence[Rule], peers: Peers
    ) -> StepValues:
        return TreeValues(tensors, rules, peers, self._exchange)

    def late_changes(self, places: list[Place], ignored: set[int], peers: Peers) -> LateChanges:
        return TreeLateChanges(places, ignored, peers, self._exchange)
