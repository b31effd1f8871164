"""Copy nested dicts with tensors into reused memory, or split them into structure and tensors for
sending, and join them again.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from train_fn.errors import BadTask
from train_fn.step.fingerprints import word_sum

_WORTH_IT = 1 << 20
"""Bytes from which it pays to take a tensor's memory ahead."""
_PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
_FIXED = frozenset({*_PLAIN, type(None), torch.dtype, torch.device})


@dataclass(frozen=True)
class TensorShape:
    """Stand for a tensor in a tree after ``take_apart``. ``position`` is its index in the list of
    tensors."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def copy_to_cpu(tree: Any, reuse: Any = None) -> Any:
    """Return a copy of ``tree`` on the CPU. Tensors of ``reuse``, an earlier copy, are overwritten
    if shape and dtype match.

    CUDA tensors are copied to pinned memory, and the copies are complete on return. The copy shares
    nothing with ``tree``, and loads with ``weights_only=True``. Raise BadTask, with the path of the
    value, for a value that could not be loaded again.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def place(tensor: torch.Tensor, earlier: Any) -> torch.Tensor:
        target: torch.Tensor = (
            earlier
            if _fits(tensor, earlier)
            else new_memory(tensor.shape, tensor.dtype, pinned=needs_pinning(tensor))
        )
        pairs.append((target, tensor.detach() if tensor.requires_grad else tensor))
        return target

    copied = _kept(tree, reuse, place)
    _copy(pairs)
    if on_gpu():
        torch.cuda.current_stream().synchronize()
    return copied


def lacking_memory(tree: Any, reuse: Any) -> tuple[Any, list[TensorShape]]:
    """Return the part of ``reuse`` that ``copy_to_cpu(tree, reuse)`` would use, with a TensorShape
    where it would pin memory or take much of it, and these. ``put_together`` fills them in. Nothing
    of ``tree`` is kept alive. Raise BadTask as ``copy_to_cpu`` does."""
    lacking: list[TensorShape] = []

    def place(tensor: torch.Tensor, earlier: Any) -> Any:
        if _fits(tensor, earlier):
            return earlier
        if not needs_pinning(tensor) and (on_gpu() or tensor.nbytes < _WORTH_IT):
            return None
        lacking.append(TensorShape(len(lacking), tuple(tensor.shape), tensor.dtype))
        return lacking[-1]

    return _kept(tree, reuse, place), lacking


def on_gpu() -> bool:
    """Return whether this process uses a GPU, so that a state may be there."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def needs_pinning(tensor: torch.Tensor) -> bool:
    """Return whether a copy of ``tensor`` on the CPU goes to pinned memory."""
    return tensor.is_cuda


def new_memory(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Return a tensor on the CPU with any contents. To pin memory takes long; any thread may."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)


def memory_in_use(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the CPU whose pages are there already, pinned if this process uses a GPU.
    A copy into other memory waits for the kernel to provide them."""
    memory = new_memory(shape, dtype, pinned=on_gpu())
    return memory if on_gpu() else memory.zero_()


def _fits(tensor: torch.Tensor, earlier: Any) -> bool:
    """Return whether ``earlier`` can hold a copy of ``tensor``."""
    return (
        isinstance(earlier, torch.Tensor)
        and earlier.shape == tensor.shape
        and earlier.dtype == tensor.dtype
    )


def plain_apart(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Like ``take_apart``, for a tree that is to be loaded with ``weights_only=True``. The result
    shares nothing with ``tree``. Raise BadTask, with the path of the value, for a value that could
    not be loaded again."""

    def place(tensor: torch.Tensor, _: Any) -> TensorShape:
        tensors.append(tensor.detach())
        return TensorShape(len(tensors) - 1, tuple(tensor.shape), tensor.dtype)

    return _kept(tree, None, place)


Place = Callable[[torch.Tensor, Any], Any]
"""Returns what stands for a tensor. The second argument stood there in an earlier tree."""


def _kept(tree: Any, reuse: Any, place: Place) -> Any:
    try:
        return _laid_out(tree, reuse, place)
    except _Unkept as exc:
        raise _unkept(exc.path, exc.kind) from None


def _unkept(path: str, kind: type) -> BadTask:
    return BadTask(
        f"the training state cannot be kept: {path} is a {kind.__module__}.{kind.__qualname__}, "
        "which no checkpoint that loads with weights_only=True may hold. Let state_dict() of the "
        "model, optimizer or task give tensors, numbers, strings, lists and dicts in its place"
    )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is made of others, as quantized moments are: its bytes are not all of
    it. DTensors are kept in pieces."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return not plain and is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


class _Unkept(Exception):
    """Report a value of a type that could not be loaded again. ``path`` is its place in the
    tree."""

    def __init__(self, kind: type, path: str = "") -> None:
        super().__init__(kind, path)
        self.kind, self.path = kind, path

    def below(self, name: object) -> _Unkept:
        return _Unkept(self.kind, f"{name}/{self.path}" if self.path else str(name))


def _laid_out(tree: Any, reuse: Any, place: Place) -> Any:
    """Return ``tree`` with plain values of its own, and with what ``place`` returns for each
    tensor."""
    if isinstance(tree, torch.Tensor):
        if _is_wrapper(tree):
            raise _Unkept(type(tree))
        return place(tree, reuse)
    if isinstance(tree, dict):
        if _FIXED.issuperset(map(type, tree.values())) and _FIXED.issuperset(map(type, tree)):
            return dict(tree)
        return dict(_items_laid_out(tree.items(), reuse if isinstance(reuse, dict) else {}, place))
    if isinstance(tree, list | tuple):
        kind = (
            list
            if isinstance(tree, list)
            else torch.Size
            if isinstance(tree, torch.Size)
            else tuple
        )
        if _FIXED.issuperset(map(type, tree)):
            return kind(tree)
        same = isinstance(reuse, list | tuple) and len(reuse) == len(tree)
        return kind(
            value
            for _, value in _items_laid_out(
                enumerate(tree), dict(enumerate(reuse)) if same else {}, place
            )
        )
    return _plain(tree)


def _items_laid_out(
    items: Iterable[tuple[Any, Any]], reuse: Mapping[Any, Any], place: Place
) -> Iterator[tuple[Any, Any]]:
    """Yield the names and laid-out values of a dict or list. Raise _Unkept with the name added."""
    for name, value in items:
        try:
            yield _plain(name), _laid_out(value, reuse.get(name), place)
        except _Unkept as exc:
            raise exc.below(name) from None


def _plain(value: Any) -> Any:
    """Return an unshared value that loads with ``weights_only=True``. Numpy numbers and enums
    become their plain values."""
    if type(value) in _FIXED:
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(value.item())
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if type(value) in (set, bytearray):
        return copy.copy(value)
    raise _Unkept(type(value))


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source to its target. CUDA copies are queued on the stream."""
    on_host = [pair for pair in pairs if not pair[1].is_cuda]
    for target, source in pairs:
        if source.is_cuda:
            target.copy_(source, non_blocking=True)
    if on_host:
        targets, sources = zip(*on_host, strict=True)
        torch._foreach_copy_(targets, sources)


def take_apart(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``tree`` with a TensorShape for every tensor. Append the tensors to ``tensors``."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach())
        return TensorShape(len(tensors) - 1, tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return {name: take_apart(value, tensors) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(take_apart(value, tensors) for value in tree)
    return tree


def put_together(tree: Any, tensors: Sequence[Any]) -> Any:
    """Undo ``take_apart``, with ``tensors`` or what stands for them."""
    if isinstance(tree, TensorShape):
        return tensors[tree.position]
    if isinstance(tree, dict):
        return {name: put_together(value, tensors) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(put_together(value, tensors) for value in tree)
    return tree


def shapes(tree: Any) -> list[TensorShape]:
    """Return every TensorShape in ``tree``, by position."""
    if isinstance(tree, TensorShape):
        return [tree]
    values = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    )
    return [shape for value in values for shape in shapes(value)]


def size_bytes(tree: Any) -> int:
    """Return the bytes of all tensors in ``tree``."""
    tensors: list[torch.Tensor] = []
    take_apart(tree, tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def of_own_types(value: Any, own: Any) -> Any:
    """Return ``value`` with the kinds of dicts that ``own`` has: a saved state has plain ones, and
    a scheduler may need its Counter."""
    if isinstance(own, dict) and isinstance(value, dict):
        found = {name: of_own_types(each, own.get(name)) for name, each in value.items()}
        return type(own)(found) if type(own) in (Counter, OrderedDict) else found
    if isinstance(own, list) and isinstance(value, list) and len(own) == len(value):
        return [of_own_types(each, other) for each, other in zip(value, own, strict=True)]
    return value


# ---------------------------------------------------------------- digest

# Compute digests of training states, to compare them between ranks and attempts.


def digest(state: dict[str, Any]) -> str:
    """Return a digest of a state, to compare counters, ledger and all bits of all tensors.

    A tensor enters as the sum of its 8-byte words modulo 2**64, which runs at memory speed. The
    tail's times and the newest checkpoint are left out, since they may differ between ranks.
    """
    hashed = hashlib.sha256(f"{state['step']} {state['ledger']} {state['fingerprint']}".encode())
    for name in ("model", "optimizer", "scaler", "ema"):
        hashed.update(_text(state[name], name))
    # which older states do not have
    for name in ("unsaved", "task", "scheduler", "chain", "piece", "shards"):
        if state.get(name):
            hashed.update(_text(state[name], name))
    return hashed.hexdigest()


def tree_digest(tree: Any, name: str = "") -> str:
    """Return a digest of nested plain values and tensors. ``name`` is for errors. Raise BadTask for
    a tensor that no state can hold."""
    return hashlib.sha256(_text(tree, name)).hexdigest()


def _text(tree: Any, name: str) -> bytes:
    return "".join(
        f"{path} {_leaf_text(leaf, path)}\n" for path, leaf in leaves(tree, name)
    ).encode()


def _leaf_text(leaf: Any, path: str) -> str:
    if isinstance(leaf, torch.Tensor):
        if _is_wrapper(leaf):
            raise _unkept(path, type(leaf))
        return str(word_sum(leaf))
    return repr(sorted(map(repr, leaf))) if isinstance(leaf, set) else repr(leaf)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested dicts, lists and tuples with its path, in order."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, f"{path}/{name}")
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree):
            yield from leaves(value, f"{path}/{position}")
    else:
        yield path, tree
