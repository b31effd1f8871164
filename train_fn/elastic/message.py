"""One message that every rank sends to all others in a step: its header, and its nodes of what is
small. Each rank adds these nodes itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from train_fn.elastic.bucket import ALIGNMENT, Bucket, complete
from train_fn.step.peers import Peers


class Message:
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
