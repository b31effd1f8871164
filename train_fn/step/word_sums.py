"""Sums over the words of tensors: equal for equal bits, additive over any cut between words, and as
fast as memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad


class Words(NamedTuple):
    """Sum of the 8-byte words of some bytes, and the bytes after the last whole word as a
    number."""

    whole: int
    rest: int


def word_sum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's 8-byte words modulo 2**64, at memory speed."""
    return joined(words_in(bytes_of(tensor)))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, without a copy if it is contiguous: shape (nbytes,), uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def words_in(data: torch.Tensor) -> Words:
    """Return the words of a part of ``bytes_of``. Only the last part may end within a word."""
    whole = data.numel() // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()  # torch reads words only where they are aligned
    if whole == data.numel():
        return Words(int(data.view(torch.int64).sum()), 0)
    words = int(data[:whole].view(torch.int64).sum()) if whole else 0
    return Words(words, int.from_bytes(bytes(data[whole:].tolist()), "little"))


def start_totals(parts: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """Start to sum both numbers of ``words_in`` for each part, modulo 2**64. Return what returns
    the sums.

    A GPU sums the values that the parts have when its stream comes to it, and is waited for once,
    by the returned function.
    """
    if not parts or not parts[0].is_cuda:
        totals = [sum(words_in(data)) for data in parts]
        return lambda: totals
    on_device = torch.stack(list(map(total_on_device, parts)))
    return on_device.tolist


def total_on_device(data: torch.Tensor) -> torch.Tensor:
    """Return the sum of both numbers of ``words_in`` where the data is: shape (), int64."""
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    if whole == data.numel():
        return data.view(torch.int64).sum()
    rest = pad(data[whole:], (0, whole + 8 - data.numel()))
    return data[:whole].view(torch.int64).sum() + rest.view(torch.int64)[0]


def joined(words: Words) -> int:
    """Return the ``word_sum`` of a tensor from the sums over its parts."""
    signed = (words.whole + (1 << 63)) % (1 << 64) - (1 << 63)  # as torch's sum wraps
    return signed ^ words.rest
