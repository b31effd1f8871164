"""Which samples of iterable data make up each global batch: the data is read as a fixed number of
streams, whatever the world size.

Iterable data has no index to permute. It is read as ``num_streams`` streams instead, each in its
own order, as loader processes of one DataLoader would read it. Every micro-batch of a global batch
comes from one certain stream, and a rank runs the micro-batches of whole streams, so that another
world size moves streams to other ranks and changes no global batch. A stream that ends begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from everstep.spec.run_spec import RunSpec
from train_fn.samples.sampler import IndexArray, MicroBatch, Sampler, share_of


def num_streams_of(spec: RunSpec) -> int:
    """One stream for each loader process at full size, but no more than there are micro-batches:
    the same in every attempt."""
    asked = spec.train.loader.num_workers
    processes = asked if isinstance(asked, int) else 1
    num_micro = -(-spec.train.global_batch_size // spec.micro_batch_size)
    return min(num_micro, spec.scaling.max_workers * max(1, processes))


@dataclass(frozen=True)
class StreamSampler(Sampler):
    """As ``Sampler``. An index is ``ordinal * num_streams + stream``: the ordinal counts the
    stream's samples in the whole run."""

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

    def stream_of(self, micro: MicroBatch) -> int:
        return int(micro.indices[0]) % self.num_streams

    def of_stream(self, stream: int, epoch: int, k: int) -> list[MicroBatch]:
        """The micro-batches of a global batch that come from a stream, in order; may be empty where
        the batch is a short one."""
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
        """What a stream gives to every global batch from that of ``first`` on, without end."""
        stream, epoch, k = self.stream_of(first), first.epoch, first.k
        while True:
            yield self.of_stream(stream, epoch, k)
            epoch, k = (epoch, k + 1) if k + 1 < self.steps_per_epoch else (epoch + 1, 0)

    def _numbers(self, stream: int, size: int) -> range:
        return share_of(-(-size // self.micro_batch_size), stream, self.num_streams)

    def _in_batch(self, stream: int, size: int) -> int:
        """Samples that a stream gives to a global batch of ``size``."""
        numbers = self._numbers(stream, size)
        return max(
            0,
            min(numbers.stop * self.micro_batch_size, size) - numbers.start * self.micro_batch_size,
        )

    def _in_epoch(self, stream: int) -> int:
        full = (self.steps_per_epoch - 1) * self._in_batch(stream, self.global_batch_size)
        return full + self._in_batch(stream, self.size_of(self.steps_per_epoch - 1))
