"""A restored state on its way from the rank that has it to all others."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from train_fn.errors import StateNotWhole
from train_fn.state.digest import word_sum
from train_fn.state.tensor_tree import put_together, shapes, take_apart
from train_fn.step.peers import Peers

CHUNK_BYTES = 32 << 20
"""Tensors travel in pieces of about this size, so that a receiver needs little more memory than the
state takes."""


def broadcast(peers: Peers, state: dict[str, Any] | None, holder: int) -> dict[str, Any]:
    """Return ``state`` of rank ``holder`` on every rank. Its structure travels first, then its
    tensors, in pieces of one dtype. A collective.

    Raises:
        PeersGone: a peer is gone, so that the state did not arrive whole.
        StateNotWhole: other bytes arrived than the holder sent.
    """
    tensors: list[torch.Tensor] = []
    skeleton = peers.share(take_apart(state, tensors) if peers.rank == holder else None, holder)
    if peers.rank != holder:
        ordered = sorted(shapes(skeleton), key=lambda shape: shape.position)
        tensors = [torch.empty(shape.shape, dtype=shape.dtype) for shape in ordered]
    sums = []
    for group in _chunks(tensors):
        flat = torch.cat([tensor.to(peers.device).reshape(-1) for tensor in group])
        work = peers.start_broadcast(flat, holder)
        if work is not None:
            work.wait()
        arrived = peers.result(flat)
        sums.append(word_sum(arrived))
        if peers.rank != holder:
            for part, tensor in zip(
                torch.split(arrived, [tensor.numel() for tensor in group]), group, strict=True
            ):
                tensor.copy_(part.view(tensor.shape))
    if not peers.alone:
        _require_the_same(peers, sums, holder, skeleton["step"])
    received: dict[str, Any] = put_together(skeleton, tensors)
    return received


def _require_the_same(peers: Peers, sums: list[int], holder: int, step: int) -> None:
    """Raise StateNotWhole on every rank if one of them received other bytes than were sent."""
    digests = peers.gather(hashlib.sha256(repr(sums).encode()).hexdigest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[holder]]
    if differing:
        raise StateNotWhole(
            step,
            f"rank {', '.join(map(str, differing))} received other bytes than rank {holder} sent. "
            "Have the network between their nodes checked",
        )


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors of one dtype into pieces not much larger than CHUNK_BYTES, in order."""
    chunks: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        if not chunks or chunks[-1][0].dtype != tensor.dtype or size >= CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return chunks
