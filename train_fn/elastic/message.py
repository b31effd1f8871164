"""One message that every rank sends to all others in a step: its header, and its nodes of what is
small. Each rank adds these nodes itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from storage.run_control import Stop
from train_fn.elastic.bucket import ALIGNMENT, Bucket, complete
from train_fn.samples.ledger import Count
from train_fn.samples.sampler import MASK64
from train_fn.step.peers import Peers
from train_fn.step.totals import StepFacts, StepTotals, step_mark


class RankMessage:
    """Exchange headers and small buckets by one all-gather.

    Args:
        header_bytes: length of every header.
        buckets: small buckets, the same on all ranks.
    """

    def __init__(self, peers: Peers, header_bytes: int, buckets: Sequence[Bucket]) -> None:
        self._peers, self._header_bytes, self.buckets = peers, header_bytes, list(buckets)
        self._row = self._rows = torch.empty(0, dtype=torch.uint8)
        self._work: dist.Work | None = None

    @torch.no_grad()
    def launch(self, header: bytes) -> None:
        """Start to send the header and this rank's nodes, all of which are folded."""
        begins = self._begins()
        if self._row.numel() != begins[-1]:
            self._row = torch.zeros(begins[-1], dtype=torch.uint8, device=self._peers.device)
            self._rows = self._row.new_zeros(self._peers.world_size * begins[-1])
        self._row[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for bucket, begin in zip(self.buckets, begins, strict=False):
            nodes = bucket.take(self._peers.rank)
            for values, flat in zip(nodes, _flats(bucket, self._row, begin), strict=False):
                bucket.layout.pack(values, flat)
        self._work = self._peers.start_all_gather(self._rows, self._row)

    def wait(self) -> list[bytes]:
        """Wait for the message of every rank, and return their headers, by rank. Raise the
        collective's error if a peer is gone."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        rows = self._rows.view(self._peers.world_size, -1)
        headers = self._peers.result(rows[:, : self._header_bytes])
        return [bytes(header.numpy()) for header in headers]

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
        begins = [-(-self._header_bytes // ALIGNMENT) * ALIGNMENT]
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


# ---------------------------------------------------------------- header

# What every rank sends about a step, as plain bytes: nothing is added up on the way.
#
# Each rank receives the headers of all ranks, and computes the step's totals from them. So losses
# and weights are exact, and the same at every world size: ``math.fsum`` rounds once.

_FIXED = struct.Struct("<QqqqQQQdI4?")
"""Steps done and one more, which is never 0; samples, unexpected, missing, hash; fingerprint; a
checkpoint's step; seconds of own work; number of micro-batches; cancel, pause, save, news."""


class Header(NamedTuple):
    """Hold what one rank sends about a step."""

    step: int
    """Steps done before it."""
    samples: Count
    micro_batches: Sequence[tuple[float, float]]
    """Loss and weight of each of this rank's micro-batches, in order."""
    fingerprint: int = 0
    """``Fingerprints.header`` of the step before, which must be the same on all ranks."""
    stop: Stop | None = None
    checkpoint_step: int = 0
    """Step of a newly committed checkpoint to report; 0 for none."""
    save: bool = False
    has_news: bool = False
    own_s: float = 0.0


class HeaderCode:
    """Encode and decode the headers of one attempt.

    Args:
        most_micro_batches: the largest number of micro-batches of a rank.
    """

    def __init__(self, most_micro_batches: int) -> None:
        self._pairs = struct.Struct(f"<{2 * most_micro_batches}d")
        self._most = most_micro_batches
        self.num_bytes = _FIXED.size + self._pairs.size

    def encode(self, header: Header) -> bytes:
        samples, numbers = header.samples, [each for pair in header.micro_batches for each in pair]
        fixed = _FIXED.pack(
            header.step + 1,
            samples.num_samples,
            samples.num_unexpected,
            samples.num_missing,
            samples.sample_hash,
            header.fingerprint,
            header.checkpoint_step,
            header.own_s,
            len(header.micro_batches),
            header.stop == "cancel",
            header.stop == "pause",
            header.save,
            header.has_news,
        )
        return fixed + self._pairs.pack(*numbers, *[0.0] * (2 * self._most - len(numbers)))

    def decode(self, data: bytes) -> Header | None:
        """Return the header of a rank; None if it sent nothing."""
        mark, *counts, fingerprint, checkpoint, own_s, num_micro, cancel, pause, save, news = (
            _FIXED.unpack_from(data)
        )
        samples, unexpected, missing, sample_hash = counts
        if mark == 0:
            return None
        numbers = self._pairs.unpack_from(data, _FIXED.size)[: 2 * num_micro]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        stop: Stop | None = "cancel" if cancel else "pause" if pause else None
        counted = Count(samples, unexpected, missing, sample_hash)
        return Header(mark - 1, counted, pairs, fingerprint, stop, checkpoint, save, news, own_s)


class HeaderTotals(StepTotals):
    """Hold the totals that all ranks compute from all headers. ``hash_sums`` is the sum of the
    ranks' hashes modulo 2**64, in eight bytes."""

    __slots__ = ()

    def counted(self) -> Count:
        """Return the count of all ranks' samples."""
        facts = self.facts
        sample_hash = int.from_bytes(self.hash_sums, "little")
        return Count(facts.num_samples, facts.num_unexpected, facts.num_missing, sample_hash)


def totals_of(headers: Sequence[Header | None]) -> StepTotals:
    """Return the totals over the headers of all ranks, by rank."""
    found = [header for header in headers if header is not None]
    pairs = [pair for header in found for pair in header.micro_batches]
    samples = sum((header.samples for header in found), Count())
    nonfinite = [
        rank
        for rank, header in enumerate(headers)
        if header is not None and not all(math.isfinite(loss) for loss, _ in header.micro_batches)
    ]
    facts = StepFacts(
        0,
        len(nonfinite),
        samples.num_samples,
        samples.num_unexpected,
        samples.num_missing,
        max((header.checkpoint_step for header in found), default=0),
        sum(header.stop == "cancel" for header in found),
        sum(header.stop == "pause" for header in found),
        sum(header.save for header in found),
        sum(header.has_news for header in found),
    )
    return HeaderTotals(
        _total([loss for loss, _ in pairs]),
        _total([weight for _, weight in pairs]),
        facts,
        (samples.sample_hash & MASK64).to_bytes(8, "little"),
        tuple(0.0 if header is None else float(step_mark(header.step)) for header in headers),
        tuple(0.0 if header is None else header.own_s for header in headers),
        float(sum(rank + 1 for rank in nonfinite)),
        tuple(0.0 if header is None else float(header.fingerprint) for header in headers),
    )


def _total(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):  # infinities of both signs, or too large a sum
        return math.nan


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
