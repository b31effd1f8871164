"""Tensors on the CPU whose memory another process can map: the copy of a state that it writes while training goes on.

Many tensors lie in one block, a file that exists in memory alone; a descriptor a block is handed over, not one a tensor.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 64
_numbers = itertools.count()
_lock = threading.Lock()


class Block(mmap.mmap):
    """Memory of several tensors, which keep it; closed when the last of them is gone."""

    number: int
    """No other block of this process has it."""
    fd: int
    address: int

    @classmethod
    def of_size(cls, size_bytes: int, *, pinned: bool) -> Block:
        """New memory. Raises OSError where there are no more descriptors."""
        fd = os.memfd_create("everstep-state", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            block = cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        block.number, block.fd = next(_numbers), fd
        block.address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
        weakref.finalize(block, os.close, fd).atexit = False
        if pinned:
            _pin(block, size_bytes)
        with _lock:
            _blocks.add(block)
        return block


_blocks: weakref.WeakSet[Block] = weakref.WeakSet()


class Place(NamedTuple):
    """Where a tensor's bytes lie, and what they are."""

    block: int | None
    """The block's number; None of a tensor without bytes, which lies nowhere."""
    offset: int
    """In bytes."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor_in(self, blocks: Mapping[int, mmap.mmap]) -> torch.Tensor:
        """The tensor, in memory that was mapped; ``blocks`` by their numbers."""
        if self.block is None:
            return torch.empty(self.shape, dtype=self.dtype)
        size_bytes = self.dtype.itemsize * math.prod(self.shape)
        memory = torch.frombuffer(blocks[self.block], dtype=torch.uint8, count=size_bytes, offset=self.offset)
        return memory.view(self.dtype).view(self.shape)


def lay_out(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each target, which has its source's dtype and no element, memory for the source's shape: all of them in one block.

    For CUDA sources the block is pinned. Where the system has no such memory the targets' is ordinary.
    """
    offsets, end = [], 0
    for _, source in pairs:
        offsets.append(end)
        end += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = _block(end, pinned=any(source.is_cuda for _, source in pairs))
    for (target, source), offset in zip(pairs, offsets, strict=True):
        if block is None or not source.nbytes:
            target.data = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        else:
            # A storage of its own for each: torch.save writes a tensor's whole storage.
            memory = torch.frombuffer(block, dtype=torch.uint8, count=source.nbytes, offset=offset)
            target.data = memory.view(source.dtype).view(source.shape)


def place_of(tensor: torch.Tensor) -> tuple[Place, Block | None] | None:
    """Where a tensor lies, and the block; None if it lies in none."""
    shape, dtype, address = tuple(tensor.shape), tensor.dtype, tensor.data_ptr()
    if not tensor.nbytes:
        return Place(None, 0, shape, dtype), None
    with _lock:
        for block in _blocks:
            if 0 <= address - block.address < len(block):
                return Place(block.number, address - block.address, shape, dtype), block
    return None


def _block(size_bytes: int, *, pinned: bool) -> Block | None:
    if sys.platform != "linux" or not size_bytes:
        return None
    try:
        return Block.of_size(size_bytes, pinned=pinned)
    except OSError:
        return None


def _pin(block: Block, size_bytes: int) -> None:
    """Have CUDA copy to a block without a detour; where it cannot, copies are right all the same."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(block.address, size_bytes, 0)) == 0:
        weakref.finalize(block, runtime.cudaHostUnregister, block.address).atexit = False
