"""The exchange of a step with ``train.exactness: elastic``: gradients, what forward passes change,
and what ranks say of the step.

The gradients of each micro-batch are computed alone and folded into the tree's nodes. Large buckets
travel while the last backward pass runs; everything small travels in one message with the report.
How bytes travel never changes a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from train_fn.elastic.bucket import Bucket
from train_fn.elastic.message import RankMessage, SlicedBucket, finish_all, sliced
from train_fn.elastic.sum_tree import Completion, SumTree, completion, group_size
from train_fn.errors import BadTask
from train_fn.samples.ledger import Count
from train_fn.samples.sampler import Sampler
from train_fn.step.buffers import StepValues
from train_fn.step.peers import Peers
from train_fn.step.report import ReportRows, StepReport, StepTotals, Votes, totals_of
from train_fn.step.untrained import Rule, copy_all

BUCKET_BYTES = 25 << 20
"""Largest bucket of several parameters."""
SMALL_BYTES = 1 << 20
"""Gradients of a model up to this size travel with the report."""


class Exchange:
    """Sum one rank's part of every step over ranks, in the order of the tree.

    A step calls ``begin``; ``add`` after each forward and ``fold`` after each backward pass;
    ``send`` once, before the last backward pass; and ``take``. A rank without micro-batches calls
    ``begin``, ``send`` and ``take``.

    Args:
        parameters: those that get gradients.
        max_workers: world size at full size, which decides the tree.
    """

    def __init__(
        self,
        peers: Peers,
        parameters: Sequence[nn.Parameter],
        sampler: Sampler,
        max_workers: int,
    ) -> None:
        self._peers, self._parameters, self._sampler = peers, list(parameters), sampler
        self._group = group_size(sampler.num_micro(sampler.fullest), max_workers)
        self._members = _members(self._parameters)
        self.buckets = [
            Bucket([self._parameters[number] for number in members], peers.world_size)
            for members in self._members
        ]
        self.is_small = sum(bucket.layout.num_bytes for bucket in self.buckets) <= SMALL_BYTES
        self._slices: list[SlicedBucket] = []
        if not peers.alone and not self.is_small:
            self._slices = [
                sliced(bucket, peers, number) for number, bucket in enumerate(self.buckets, start=1)
            ]
        self._of_values: Bucket | None = None
        self._send_values: SlicedBucket | None = None
        self.divide_anew()
        self.tree = SumTree(1, 1)
        """The tree of the present step."""
        self.values: list[torch.Tensor] = []
        """The sums of what ``add_values`` was given, after ``take``."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._last: int | None = None

    def divide_anew(self) -> None:
        """Follow the shares of the sampler, which may have changed. Call it between two steps."""
        shares = self._shares(self._sampler.fullest)  # no other global batch has a longer one
        self._code = ReportRows(2 * max(map(len, shares)))
        self._message = self._new_message()
        self._plans: dict[int, tuple[SumTree, Completion]] = {}

    def watch(self) -> None:
        """Launch buckets from now on while the last backward pass still runs. Call it after every
        other hook of the parameters is registered."""
        self._bucket_of = {
            number: position for position, members in enumerate(self._members) for number in members
        }
        if len(self._slices) > 1:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))  # type: ignore[no-untyped-call]
                for number, parameter in enumerate(self._parameters)
            ]

    def remove_hooks(self) -> None:
        """Launch nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def exchange_values(self, likes: Sequence[torch.Tensor]) -> None:
        """Also sum other tensors from now on: ``add_values`` is given one for each of ``likes``."""
        self._of_values = self._send_values = None
        if likes:
            self._of_values = bucket = Bucket(likes, self._peers.world_size)
            if bucket.layout.num_bytes > SMALL_BYTES and not self._peers.alone:
                self._send_values = sliced(bucket, self._peers, 0)
        self._message = self._new_message()

    # -- a step

    def begin(self, step: int, k: int, expected: Count, fingerprint: int = 0) -> None:
        """Begin the step after ``step`` steps done.

        Args:
            k: the global batch within its epoch.
            expected: the samples that this rank's loader should yield.
            fingerprint: see ``StepReport``.
        """
        self.tree, plan = self._plan(k)
        for bucket in self._all_buckets():
            bucket.begin(self.tree, plan)
        self._step, self._samples, self._fingerprint = step, expected, fingerprint
        self._measured: list[tuple[torch.Tensor, torch.Tensor | float]] = []
        self._votes = Votes()
        self._num_launched = 0
        self._last = None

    def add(
        self, loss_sum: torch.Tensor, weight: torch.Tensor | float, difference: Count | None = None
    ) -> None:
        """Add one micro-batch's loss and weight. ``difference`` is the correction from expected to
        loaded samples; None if they are equal."""
        self._measured.append((loss_sum.detach(), weight))
        if difference is not None:
            self._samples = self._samples + difference

    def add_values(self, number: int, values: Sequence[torch.Tensor]) -> None:
        """Add the values of micro-batch ``number``, which the exchange owns from then on."""
        assert self._of_values is not None
        self._of_values.push(number, list(values))

    def send(self, last: int | None, votes: Votes) -> None:
        """Send what is known before the last backward pass.

        Args:
            last: the micro-batch of the last backward pass; None if there is none.
        """
        self._votes = votes
        self._last = last
        self._missing = [len(members) for members in self._members]
        if not self._peers.alone and not self.is_small and self._peers.on_cpu:
            self._launch_message()

    def fold(self, number: int) -> None:
        """Fold the gradients of micro-batch ``number`` and remove them from the parameters."""
        for position in range(self._num_launched, len(self.buckets)):
            self._fold_bucket(position, number)

    def take(self) -> StepTotals:
        """Return the totals over all ranks, and leave the summed gradients in the parameters. It
        waits until every rank's report and gradients are there, and raises the collective's error
        if a peer is gone."""
        self._last = None
        if self._peers.alone:
            return self._take_alone()
        while self._num_launched < len(self._slices):
            self._launch_next()
        if self.is_small or not self._peers.on_cpu:
            self._launch_message()
        reports = self._message.wait()
        large = self._large()
        sums = finish_all(large)
        sums_of = dict(zip(map(id, self._message.buckets), self._message.sums(), strict=True))
        sums_of |= {id(each.bucket): found for each, found in zip(large, sums, strict=True)}
        if sums:  # waits for the device
            self._peers.result(sums[-1][-1].reshape(-1)[-1:])
        else:
            self._peers.require_whole()
        self._adopt(sums_of)
        return totals_of([self._code.decode(report) for report in reports])

    @property
    def num_bytes_sent(self) -> int:
        """Return the bytes that this rank sent in the last step."""
        if self._peers.alone:
            return 0
        return self._message.num_bytes_sent + sum(each.num_bytes_sent for each in self._large())

    # -- parts of it

    def _all_buckets(self) -> list[Bucket]:
        return [*self.buckets, *([self._of_values] if self._of_values is not None else [])]

    def _large(self) -> list[SlicedBucket]:
        """Return all buckets that are exchanged in slices."""
        return [*self._slices, *([self._send_values] if self._send_values is not None else [])]

    def _new_message(self) -> RankMessage:
        small = list(self.buckets) if self.is_small else []
        if self._of_values is not None and self._send_values is None:
            small.append(self._of_values)
        return RankMessage(self._peers, self._code.num_bytes, small)

    def _plan(self, k: int) -> tuple[SumTree, Completion]:
        """Return the tree of an epoch's global batch ``k``, and how the ranks complete it."""
        size = self._sampler.num_micro(k)
        if size not in self._plans:
            tree = SumTree(size, self._group)
            self._plans[size] = tree, completion(tree, self._shares(k))
        return self._plans[size]

    def _shares(self, k: int) -> list[range]:
        world_size = self._peers.world_size
        return [self._sampler.numbers(k, rank, world_size) for rank in range(world_size)]

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """Note a gradient of the last backward pass. Launch its bucket, and those after it, as far
        as they are whole."""
        if self._last is None:
            return
        position = self._bucket_of[number]
        if position < self._num_launched:
            raise BadTask(
                "a backward pass adds to the gradient of one parameter twice, as "
                "torch.utils.checkpoint does with use_reentrant=True; train.exactness elastic "
                "sends gradients as soon as they are there. Set use_reentrant=False"
            )
        self._missing[position] -= 1
        while self._num_launched < len(self._slices) and self._missing[self._num_launched] == 0:
            self._fold_bucket(self._num_launched, self._last)
            self._launch_next()

    def _fold_bucket(self, position: int, number: int) -> None:
        parameters = [self._parameters[member] for member in self._members[position]]
        self.buckets[position].push(number, [parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None

    def _launch_next(self) -> None:
        self._slices[self._num_launched].launch()
        self._num_launched += 1

    def _launch_message(self) -> None:
        if self._send_values is not None:
            self._send_values.launch()
        self._message.launch(self._code.encode(self._own_report()))

    def _own_report(self) -> StepReport:
        numbers = [float(each) for measured in self._measured for each in measured]
        return StepReport(self._step, self._samples, numbers, self._fingerprint, self._votes)

    def _take_alone(self) -> StepTotals:
        sums_of = {
            id(bucket): bucket.layout.filled(bucket.take(0)[0]) for bucket in self._all_buckets()
        }
        self._adopt(sums_of)
        return totals_of([self._own_report()])

    def _adopt(self, sums_of: dict[int, list[torch.Tensor]]) -> None:
        """Leave the sums where the step reads them."""
        for bucket, members in zip(self.buckets, self._members, strict=True):
            for member, total in zip(members, sums_of[id(bucket)], strict=True):
                parameter = self._parameters[member]
                parameter.grad = torch.view_as_complex(total) if parameter.is_complex() else total
        self.values = sums_of[id(self._of_values)] if self._of_values is not None else []


def _members(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Return the numbers of the parameters of each bucket, in the order in which a backward pass
    probably reaches them. A bucket has one dtype."""
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for number, parameter in reversed(list(enumerate(parameters))):
        members, size = open_buckets.get(parameter.dtype, ([], 0))
        if not members or size + parameter.nbytes > BUCKET_BYTES:
            members, size = list[int](), 0
            buckets.append(members)
        members.append(number)
        open_buckets[parameter.dtype] = members, size + parameter.nbytes
    return buckets


# ---------------------------------------------------------------- buffers

# What forward passes change, such as running statistics, summed in the tree's order.


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
