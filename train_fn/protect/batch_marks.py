"""Marks of a batch as the loop got it: a short digest of a few values of each of its parts.

A restart reads the last batch again and compares. Ranks compare theirs, since equal batches train
on the same samples several times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from train_fn.errors import BadTask

_MOST_VALUES = 1024
"""Values of a tensor that enter, evenly spaced over it."""
_MOST_PARTS = 256
_MOST_DEPTH = 6
_BITS = 60
EQUAL_STEPS = 3
"""Steps in a row in which ranks may have equal batches."""


class Taken:
    """A few values of a batch, copied before the loop can change it. On a GPU they are read when
    the marks are first asked for."""

    def __init__(self, batch: Any) -> None:
        self._values = dict(_parts(batch, "batch", 0))
        self._marks: dict[str, int] | None = None

    @property
    def marks(self) -> dict[str, int]:
        """Return a digest of each part, by its place in the batch."""
        if self._marks is None:
            self._marks = {name: _digest(value) for name, value in self._values.items()}
            self._values = {}
        return self._marks

    @property
    def whole(self) -> int:
        """Return one number for the whole batch; never 0."""
        return _digest(repr(self.marks)) or 1


def differing(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    """Return the places whose digests differ, or that only one batch has."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if one.get(name) != other.get(name)]


class EqualBatches:
    """Find ranks that train on the same batches step after step. Data that is the same in every
    step says nothing."""

    def __init__(self) -> None:
        self._before: Sequence[int] = ()
        self._num_equal = 0

    def note(self, marks: Sequence[int]) -> None:
        """Note the batches of a step, one mark for each rank; 0 is not known. Raises BadTask."""
        known = [mark for mark in marks if mark]
        is_equal = len(set(known)) < len(known)
        is_new = bool(self._before) and not set(marks) & set(self._before)
        self._num_equal = self._num_equal + 1 if is_equal and (is_new or not self._before) else 0
        self._before = list(marks)
        if self._num_equal < EQUAL_STEPS:
            return
        first, second = _equal_ranks(marks)
        raise BadTask(
            f"es.loader: ranks {first} and {second} got the same batches in {EQUAL_STEPS} steps, "
            "so samples count twice. Divide the data: sampler=DistributedSampler(dataset) in the "
            "DataLoader, torch.manual_seed(seed + rank) before es.protect for a sampler that draws "
            "by itself, or es.loader(dataset, global_batch_size=…)"
        )


def _equal_ranks(marks: Sequence[int]) -> tuple[int, int]:
    for rank, mark in enumerate(marks):
        if mark and mark in marks[:rank]:
            return marks.index(mark), rank
    raise AssertionError("no ranks are equal")


def _parts(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield name, _few(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            yield name, _few(torch.from_numpy(np.ascontiguousarray(value)))
        else:
            yield name, repr(value.reshape(-1)[:_MOST_PARTS].tolist())
    elif isinstance(value, Mapping) and depth < _MOST_DEPTH:
        for key in list(value)[:_MOST_PARTS]:
            yield from _parts(value[key], f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple) and depth < _MOST_DEPTH:
        if all(isinstance(each, bool | int | float | str | bytes) for each in value):
            yield name, repr(value[:_MOST_VALUES])
            return
        for at, each in enumerate(value[:_MOST_PARTS]):
            yield from _parts(each, f"{name}[{at}]", depth + 1)
    elif isinstance(value, bool | int | float | str | bytes) or value is None:
        yield name, repr(value)
    elif isinstance(getattr(value, "__dict__", None), dict) and depth < _MOST_DEPTH:
        for key, each in list(vars(value).items())[:_MOST_PARTS]:
            yield from _parts(each, f"{name}.{key}", depth + 1)


def _few(tensor: torch.Tensor) -> tuple[str, torch.Tensor | None]:
    form = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return form, None
    flat = tensor.detach().reshape(-1)
    if flat.numel() > _MOST_VALUES:
        return form, flat[_places(flat.numel()).to(flat.device)]
    return form, flat.clone()


@cache
def _places(size: int) -> torch.Tensor:
    return torch.linspace(0, size - 1, _MOST_VALUES, dtype=torch.float64).long()


def _digest(value: Any) -> int:
    if isinstance(value, tuple):
        form, tensor = value
        hashed = hashlib.blake2b(form.encode(), digest_size=8)
        if tensor is not None:
            hashed.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    else:
        hashed = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(hashed.digest(), "little") >> (64 - _BITS)
