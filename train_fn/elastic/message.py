"""One message that every rank sends to all others in a step: its report, and its nodes of what is
small. Each rank adds these nodes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from train_fn.elastic.bucket import ALIGNMENT, Bucket, complete
from train_fn.step.peers import Peers


class RankMessage:
    """Exchange reports and small buckets by one all-gather.

    Args:
        report_bytes: length of every report.
        buckets: small buckets, the same on all ranks.
    """

    def __init__(self, peers: Peers, report_bytes: int, buckets: Sequence[Bucket]) -> None:
        self._peers, self._report_bytes, self.buckets = peers, report_bytes, list(buckets)
        self._row = self._rows = torch.empty(0, dtype=torch.uint8)
        self._work: dist.Work | None = None

    @torch.no_grad()
    def launch(self, report: bytes) -> None:
        """Start to send the report and this rank's nodes, all of which are folded."""
        begins = self._begins()
        if self._row.numel() != begins[-1]:
            self._row = torch.zeros(begins[-1], dtype=torch.uint8, device=self._peers.device)
            self._rows = self._row.new_zeros(self._peers.world_size * begins[-1])
        self._row[: len(report)].copy_(torch.frombuffer(bytearray(report), dtype=torch.uint8))
        for bucket, begin in zip(self.buckets, begins, strict=False):
            nodes = bucket.take(self._peers.rank)
            for values, flat in zip(nodes, _flats(bucket, self._row, begin), strict=False):
                bucket.layout.pack(values, flat)
        self._work = self._peers.start_all_gather(self._rows, self._row)

    def wait(self) -> list[bytes]:
        """Wait for the message of every rank, and return their reports, by rank. Raise the
        collective's error if a peer is gone."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        rows = self._rows.view(self._peers.world_size, -1)
        reports = self._peers.result(rows[:, : self._report_bytes])
        return [bytes(report.numpy()) for report in reports]

    def sums(self) -> list[list[torch.Tensor]]:
        """Return the sum of every bucket over all ranks. The next message overwrites it."""
        rows = self._rows.view(self._peers.world_size, -1)
        sums = []
        for bucket, begin in zip(self.buckets, self._begins(), strict=False):
            slots = [
                flat
                for row, nodes in zip(rows, bucket.plan.by_rank, strict=True)
                for flat in _flats(bucket, row, begin)[: len(nodes)]
            ]
            sums.append(bucket.layout.views(complete(bucket.plan, slots)))
        return sums

    @property
    def num_bytes_sent(self) -> int:
        """Return the bytes that this rank sends in a step."""
        return self._row.numel() * (self._peers.world_size - 1)

    def _begins(self) -> list[int]:
        """Return where in a row each bucket begins, and where the row ends."""
        begins = [-(-self._report_bytes // ALIGNMENT) * ALIGNMENT]
        for bucket in self.buckets:
            begins.append(begins[-1] + bucket.plan.most_nodes * bucket.layout.num_bytes)
        return begins


def _flats(bucket: Bucket, row: torch.Tensor, begin: int) -> list[torch.Tensor]:
    """Return the flat memory of each node in a row."""
    size = bucket.layout.num_bytes
    return [
        row[begin + at * size : begin + (at + 1) * size].view(bucket.layout.dtype)
        for at in range(bucket.plan.most_nodes)
    ]


# ---------------------------------------------------------------- slices

# The exchange of large buckets: every rank owns one slice of the sum.
#
# A rank sends each peer that peer's slice of its nodes, completes its own slice, and sends the
# result to all. At full size this moves as many bytes as a ring's all-reduce.


class SlicedBucket(Protocol):
    """A bucket whose sum the ranks complete in slices. A step calls ``launch``, ``complete`` and
    ``finish`` once each."""

    bucket: Bucket

    def launch(self) -> None:
        """Start to send this rank's nodes. Call it when all of them are folded."""

    def complete(self) -> None:
        """Wait for this rank's slice of all nodes, add them, and start to send the result."""

    def finish(self) -> list[torch.Tensor]:
        """Wait for the whole sum, and return it. The next step overwrites it."""

    @property
    def num_bytes_sent(self) -> int:
        """Return the bytes that this rank has sent in this step."""


def sliced(bucket: Bucket, peers: Peers, number: int) -> SlicedBucket:
    """Return the way of exchange that is the cheapest for these peers."""
    if peers.has_cheap_messages:
        return MessageSlices(bucket, peers, number)
    return CollectiveSlices(bucket, peers)


class MessageSlices:
    """Exchange slices by messages between two ranks each, straight from and to where they lie. On
    gloo this is cheaper than its all_to_all, and a dead peer breaks it at once on every rank.

    Args:
        number: the bucket's number, which keeps its messages apart from those of others.
    """

    def __init__(self, bucket: Bucket, peers: Peers, number: int) -> None:
        self.bucket, self._peers, self._number = bucket, peers, number
        self._flats = [bucket.layout.memory()]
        self._received = torch.empty(0)
        self._slots: list[torch.Tensor] = []
        self._sends: list[dist.Work] = []
        self._receives: list[dist.Work] = []
        self.num_bytes_sent = 0

    @torch.no_grad()
    def launch(self) -> None:
        layout, plan, rank = self.bucket.layout, self.bucket.plan, self._peers.rank
        nodes = self.bucket.take(rank)
        while len(self._flats) < len(nodes):
            self._flats.append(layout.memory())
        for flat, values in zip(self._flats, nodes, strict=False):
            layout.pack(values, flat)
        others = plan.num_nodes - len(nodes)
        if self._received.numel() < others * layout.slice_numel:
            self._received = torch.empty(
                others * layout.slice_numel, dtype=layout.dtype, device=layout.device
            )
        arriving = iter(torch.split(self._received, layout.slice_numel))
        self._slots, self.num_bytes_sent = [], 0
        for peer, of_peer in enumerate(plan.by_rank):
            if peer == rank:
                self._slots += [_slice(flat, rank, layout.slice_numel) for flat in self._flats][
                    : len(nodes)
                ]
                continue
            slots = [next(arriving) for _ in of_peer]
            self._receives += [
                self._peers.start_receive(slot, peer, self._tag(at))
                for at, slot in enumerate(slots)
            ]
            self._slots += slots
        for peer in self._peers.others:
            for at in range(len(nodes)):
                self._send(_slice(self._flats[at], peer, layout.slice_numel), peer, self._tag(at))

    def complete(self) -> None:
        layout, rank = self.bucket.layout, self._peers.rank
        self._wait()
        result = self._flats[0]
        own = _slice(result, rank, layout.slice_numel)
        own.copy_(complete(self.bucket.plan, self._slots))
        for peer in self._peers.others:
            part = _slice(result, peer, layout.slice_numel)
            self._receives.append(self._peers.start_receive(part, peer, self._tag(-1)))
        for peer in self._peers.others:
            self._send(own, peer, self._tag(-1))

    def finish(self) -> list[torch.Tensor]:
        self._wait()
        self._slots = []
        return self.bucket.layout.views(self._flats[0])

    def _send(self, part: torch.Tensor, peer: int, tag: int) -> None:
        self._sends.append(self._peers.start_send(part, peer, tag))
        self.num_bytes_sent += part.nbytes

    def _wait(self) -> None:
        """Wait for the messages. Raise their error if a peer is gone."""
        for work in (*self._receives, *self._sends):
            work.wait()
        self._receives, self._sends = [], []

    def _tag(self, node: int) -> int:
        """Return the tag of a node's slices; -1 stands for the result."""
        return self._number * (self.bucket.plan.most_nodes + 1) + node + 1


class CollectiveSlices:
    """Exchange slices by all_to_all and all_gather, as NCCL does best: both run on its own stream,
    beside the backward pass."""

    def __init__(self, bucket: Bucket, peers: Peers) -> None:
        self.bucket, self._peers = bucket, peers
        self._result = bucket.layout.memory()
        self._sent = self._received = torch.empty(0)
        self._work: dist.Work | None = None
        self.num_bytes_sent = 0

    @torch.no_grad()
    def launch(self) -> None:
        layout, plan, rank = self.bucket.layout, self.bucket.plan, self._peers.rank
        nodes = self.bucket.take(rank)
        flats = [layout.memory() for _ in nodes]
        for flat, values in zip(flats, nodes, strict=True):
            layout.pack(values, flat)
        parts = [
            _slice(flat, peer, layout.slice_numel)
            for peer in range(self._peers.world_size)
            for flat in flats
        ]
        self._sent = torch.cat(parts) if parts else layout.memory()[:0]
        counts = [len(of_peer) * layout.slice_numel for of_peer in plan.by_rank]
        self._received = self._sent.new_empty(sum(counts))
        sizes = [len(nodes) * layout.slice_numel] * self._peers.world_size
        self._work = self._peers.start_all_to_all(self._received, self._sent, counts, sizes)
        self.num_bytes_sent = self._sent.nbytes - sizes[rank] * self._sent.element_size()

    def complete(self) -> None:
        assert self._work is not None
        self._work.wait()
        own = complete(
            self.bucket.plan, torch.split(self._received, self.bucket.layout.slice_numel)
        )
        self._work = self._peers.start_all_gather(self._result, own)
        self.num_bytes_sent += own.nbytes * (self._peers.world_size - 1)

    def finish(self) -> list[torch.Tensor]:
        assert self._work is not None
        self._work.wait()
        self._work, self._sent, self._received = None, torch.empty(0), torch.empty(0)
        return self.bucket.layout.views(self._result)


def _slice(flat: torch.Tensor, rank: int, numel: int) -> torch.Tensor:
    return flat[rank * numel : (rank + 1) * numel]


def finish_all(buckets: Sequence[SlicedBucket]) -> list[list[torch.Tensor]]:
    """Complete the buckets one after the other, while the results of the earlier ones travel.
    Return their sums."""
    for each in buckets:
        each.complete()
    return [each.finish() for each in buckets]
