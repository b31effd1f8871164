"""Choose the samples of each global batch from iterable data, which is read as a fixed number of
streams at every world size.

Iterable data has no index to permute. Instead it is read as ``num_streams`` streams, each in its
own order, as the loader processes of one DataLoader would read it. Every micro-batch of a global
batch has a fixed stream, and a rank runs the micro-batches of whole streams. So another world size
moves streams to other ranks, but changes no global batch. A stream that ends starts again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from everstep.spec.run_spec import RunSpec
from train_fn.samples.sampler import IndexArray, MicroBatch, Sampler, share_of


def num_streams_of(spec: RunSpec) -> int:
    """Return the number of streams: one for each loader process at the largest world size, but at
    most one for each micro-batch. It is the same in every attempt."""
    asked = spec.train.loader.num_workers
    processes = asked if isinstance(asked, int) else 1
    num_micro = -(-spec.train.global_batch_size // spec.micro_batch_size)
    return min(num_micro, spec.scaling.max_workers * max(1, processes))


@dataclass(frozen=True)
class StreamSampler(Sampler):
    """Sample iterable data, like ``Sampler``. An index is ``ordinal * num_streams + stream``. The
    ordinal counts the stream's samples over the whole run."""

    num_streams: int = 1

    def global_batch(self, epoch: int, k: int) -> IndexArray:
        return np.concatenate(
            [
                micro.indices
                for stream in range(self.num_streams)
                for micro in self.of_stream(stream, epoch, k)
            ]
        )

    def share(self, epoch: int, k: int, rank: int, world_size: int) -> list[MicroBatch]:
        streams = share_of(self.num_streams, rank, world_size)
        return [micro for stream in streams for micro in self.of_stream(stream, epoch, k)]

    def numbers(self, k: int, rank: int, world_size: int) -> range:
        streams = share_of(self.num_streams, rank, world_size)
        size = self.size_of(k)
        if not streams:
            return range(0)
        return range(self._numbers(streams[0], size).start, self._numbers(streams[-1], size).stop)

    def stream_of(self, micro: MicroBatch) -> int:
        return int(micro.indices[0]) % self.num_streams

    def of_stream(self, stream: int, epoch: int, k: int) -> list[MicroBatch]:
        """Return the micro-batches of a global batch that come from a stream, in order. There may
        be none if the batch is short."""
        size = self.size_of(k)
        ordinal = epoch * self._in_epoch(stream) + k * self._in_batch(
            stream, self.global_batch_size
        )
        micros = []
        for number in self._numbers(stream, size):
            length = min(self.micro_batch_size, size - number * self.micro_batch_size)
            indices = (
                np.arange(ordinal, ordinal + length, dtype=np.int64) * self.num_streams + stream
            )
            micros.append(MicroBatch(epoch, number, indices, k))
            ordinal += length
        return micros

    def batches_from(self, first: MicroBatch) -> Iterator[list[MicroBatch]]:
        """Yield a stream's micro-batches for each global batch from that of ``first`` on, without
        end."""
        stream, epoch, k = self.stream_of(first), first.epoch, first.k
        while True:
            yield self.of_stream(stream, epoch, k)
            epoch, k = (epoch, k + 1) if k + 1 < self.steps_per_epoch else (epoch + 1, 0)

    def _numbers(self, stream: int, size: int) -> range:
        return share_of(-(-size // self.micro_batch_size), stream, self.num_streams)

    def _in_batch(self, stream: int, size: int) -> int:
        """Return the number of a stream's samples in a global batch of ``size`` samples."""
        numbers = self._numbers(stream, size)
        return max(
            0,
            min(numbers.stop * self.micro_batch_size, size) - numbers.start * self.micro_batch_size,
        )

    def _in_epoch(self, stream: int) -> int:
        full = (self.steps_per_epoch - 1) * self._in_batch(stream, self.global_batch_size)
        return full + self._in_batch(stream, self.size_of(self.steps_per_epoch - 1))
