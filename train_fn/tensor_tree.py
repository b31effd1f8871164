"""Nested dicts with tensors in them: copied into reused memory, or taken apart for the wire and put together again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorShape:
    """Stands for a tensor in a tree that was taken apart; ``position`` is its place in the list of tensors."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def copy_to_cpu(tree: Any, reuse: Any = None) -> Any:
    """A copy of ``tree`` on the CPU; tensors of ``reuse``, an earlier copy, are overwritten where they fit.

    Of CUDA tensors the copies lie in pinned memory, and are complete on return.
    """
    copied = _copied(tree, reuse)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
    return copied


def _copied(tree: Any, reuse: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        fits = isinstance(reuse, torch.Tensor) and reuse.shape == tree.shape and reuse.dtype == tree.dtype
        target = reuse if fits else torch.empty(tree.shape, dtype=tree.dtype, pin_memory=tree.is_cuda)
        return target.copy_(tree.detach(), non_blocking=True)
    if isinstance(tree, dict):
        old = reuse if isinstance(reuse, dict) else {}
        return {name: _copied(value, old.get(name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        same = isinstance(reuse, list | tuple) and len(reuse) == len(tree)
        return type(tree)(_copied(value, reuse[position] if same else None) for position, value in enumerate(tree))
    return tree


def take_apart(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """``tree`` with a TensorShape for every tensor, which is appended to ``tensors``."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach())
        return TensorShape(len(tensors) - 1, tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return {name: take_apart(value, tensors) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(take_apart(value, tensors) for value in tree)
    return tree


def put_together(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of ``take_apart``."""
    if isinstance(tree, TensorShape):
        return tensors[tree.position]
    if isinstance(tree, dict):
        return {name: put_together(value, tensors) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(put_together(value, tensors) for value in tree)
    return tree


def shapes(tree: Any) -> list[TensorShape]:
    """Every TensorShape in ``tree``, by position."""
    if isinstance(tree, TensorShape):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [shape for value in values for shape in shapes(value)]


def size_bytes(tree: Any) -> int:
    """Bytes of all tensors in ``tree``."""
    tensors: list[torch.Tensor] = []
    take_apart(tree, tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
