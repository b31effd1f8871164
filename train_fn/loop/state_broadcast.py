"""A restored state on its way from the rank that has it to all others."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from train_fn.errors import StateNotWhole
from train_fn.state.tensor_tree import TensorShape, put_together, shapes, take_apart, tree_digest
from train_fn.step.fingerprints import word_sum
from train_fn.step.peers import Peers

CHUNK_BYTES = 32 << 20
"""Tensors travel in pieces of about this size, so that a rank needs little more memory than the
state takes."""
_IN_FLIGHT = 2
"""Pieces that travel while an earlier one is checked."""


class _Sent(NamedTuple):
    """A piece on its way: tensors of one dtype in a row."""

    part: list[TensorShape]
    flat: torch.Tensor
    work: dist.Work | None


def broadcast(peers: Peers, state: dict[str, Any] | None, holder: int) -> dict[str, Any]:
    """Return ``state`` of rank ``holder`` on every rank. A collective.

    Other ranks pass None, or the same state if they have it already. Nothing travels if all have
    it. Otherwise the structure travels first, then the tensors, in pieces of one dtype. Every rank
    compares what arrived with what the holder sent before anything is returned.

    Raises:
        PeersGone: a peer is gone, so that the state did not arrive whole.
        StateNotWhole: other bytes arrived than the holder sent.
    """
    lacking = peers.gather(state is None)
    if state is not None and not any(lacking):
        return state
    tensors: list[torch.Tensor] = []
    own = take_apart(state, tensors) if peers.rank == holder else None
    skeleton = peers.share(own, holder)
    parts = _chunks(sorted(shapes(skeleton), key=lambda shape: shape.position))
    sums, arrived = [tree_digest(skeleton)], []
    for sent in _in_flight(peers, parts, tensors, holder):
        if sent.work is not None:
            sent.work.wait()
        flat = peers.result(sent.flat)
        sums.append(str(word_sum(flat)))
        if state is None:
            pieces = torch.split(flat, [shape.numel for shape in sent.part])
            arrived += [
                piece.view(shape.shape) for shape, piece in zip(sent.part, pieces, strict=True)
            ]
    _require_the_same(peers, sums, holder, skeleton["step"])
    if state is not None:
        return state
    received: dict[str, Any] = put_together(skeleton, arrived)
    return received


def _in_flight(
    peers: Peers, parts: list[list[TensorShape]], tensors: list[torch.Tensor], holder: int
) -> Iterator[_Sent]:
    """Start to send each part, and yield it once the next ones travel, too."""
    waiting: deque[_Sent] = deque()
    for part in parts:
        flat = _flat(peers, part, tensors if peers.rank == holder else None)
        waiting.append(_Sent(part, flat, peers.start_broadcast(flat, holder)))
        if len(waiting) > _IN_FLIGHT:
            yield waiting.popleft()
    yield from waiting


def _flat(
    peers: Peers, part: list[TensorShape], tensors: list[torch.Tensor] | None
) -> torch.Tensor:
    """Return the part's tensors in a row, or memory for them."""
    if tensors is None:
        num_elements = sum(shape.numel for shape in part)
        return torch.empty(num_elements, dtype=part[0].dtype, device=peers.device)
    rows = [tensors[shape.position].to(peers.device).reshape(-1) for shape in part]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _require_the_same(peers: Peers, sums: list[str], holder: int, step: int) -> None:
    """Raise StateNotWhole on every rank if one of them received other bytes than were sent."""
    digests = peers.gather(hashlib.sha256(repr(sums).encode()).hexdigest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[holder]]
    if differing:
        raise StateNotWhole(
            step,
            f"rank {', '.join(map(str, differing))} received other bytes than rank {holder} sent. "
            "Have the network between their nodes checked",
        )


def _chunks(tensors: list[TensorShape]) -> list[list[TensorShape]]:
    """Group tensors of one dtype into pieces not much larger than CHUNK_BYTES, in order."""
    chunks: list[list[TensorShape]] = []
    size = 0
    for tensor in tensors:
        if not chunks or chunks[-1][0].dtype != tensor.dtype or size >= CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.nbytes
    return chunks
