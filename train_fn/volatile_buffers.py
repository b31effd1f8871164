"""Buffers that a forward pass changes, running statistics above all: kept for a step that fails, and the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from train_fn.collectives import Peers

_ALIGNMENT = 16
"""Bytes: what any dtype's elements may begin at."""


class Place(NamedTuple):
    """Where a module has a buffer. Modules may put another tensor there in each pass (``self.mean = 0.9 * self.mean + …``)."""

    module: nn.Module
    name: str

    def buffer(self) -> torch.Tensor | None:
        """The one that is there now."""
        return self.module._buffers[self.name]


def places_of(model: nn.Module) -> list[Place]:
    """Of all buffers of a model, in the order of its modules."""
    return [Place(module, name) for module in model.modules() for name, buffer in module._buffers.items() if buffer is not None]


class VolatileBuffers:
    """The buffers of one replica, in the order of their modules. A step keeps, starts, waits and adopts, or fails and puts back.

    One that has another shape than before (a mask that is made for each length, say) follows from the batch, and is left alone.
    """

    def __init__(self, places: list[Place], peers: Peers) -> None:
        self._places = places
        self._peers = peers
        buffers = [buffer for buffer in self._buffers if buffer is not None]
        assert len(buffers) == len(places)
        self._before = [buffer.detach().clone() for buffer in buffers]
        self._is_kept = False
        self._flat = torch.empty(0)
        self._shares: list[torch.Tensor] = []
        """Of the flat bytes those of each buffer, with its dtype and shape."""
        self._work: dist.Work | None = None
        if buffers and not peers.alone:
            self._flat, self._shares = _flat_like(buffers)

    @property
    def _buffers(self) -> list[torch.Tensor | None]:
        return [place.buffer() for place in self._places]

    def keep(self) -> None:
        """Remember what the forward passes of the step that begins may change."""
        self._is_kept = True
        _copy(self._before, self._buffers)

    def put_back(self) -> None:
        """Take back what the forward passes of a step that was not committed changed."""
        if self._is_kept:
            _copy(self._buffers, self._before)
        self._is_kept = False

    def start(self) -> None:
        """Send rank 0's to all: after the step's last forward pass, so that they travel while its backward runs."""
        if not self._shares:
            return
        if self._peers.rank == 0:
            _copy(self._shares, self._buffers)
        self._work = self._peers.start_broadcast(self._flat, 0)

    def wait(self) -> None:
        """Until rank 0's are here; raises what the collective raised when a peer is gone."""
        if self._work is not None:
            self._work.wait()

    def adopt(self) -> None:
        """Take rank 0's over. The step commits."""
        _copy(self._buffers, self._shares)
        self._is_kept = False


def _flat_like(buffers: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Bytes for all of them one after the other, and of these the tensors of each one's dtype and shape."""
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + math.ceil(size / _ALIGNMENT) * _ALIGNMENT)
    flat = torch.empty(begins[-1], dtype=torch.uint8, device=buffers[0].device)
    shares = [
        flat[begin : begin + size].view(buffer.dtype).view(buffer.shape)
        for buffer, begin, size in zip(buffers, begins, sizes, strict=False)
    ]
    return flat, shares


def _copy(to: Sequence[torch.Tensor | None], source: Sequence[torch.Tensor | None]) -> None:
    """Those that are alike."""
    pairs = [(a, b) for a, b in zip(to, source, strict=False) if a is not None and b is not None and is_alike(a, b)]
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def is_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype
