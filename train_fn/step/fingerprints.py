"""Digests of what all ranks must have in common after each step: the summed gradient, and a part of
the weights that moves on, so that all of them have been compared after ``MOST_PARTS`` steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from train_fn.errors import FOUND_WITHIN
from train_fn.samples.randomness import MASK64
from train_fn.step.word_sums import bytes_of, start_totals

MOST_PARTS = FOUND_WITHIN - 1
"""Parts of the weights of a large model. One is digested at each step and compared at the next."""
PART_BYTES = 1 << 16
"""A smaller part costs little less, so that of a small model is larger than one of 63."""
_WORD = 8
_SMALL_BYTES = 1 << 16
"""Tensors below it are concatenated: a call for each would cost more than the copy."""
_SPREAD = 0x9E3779B97F4A7C15
"""An odd number: a product with it carries a change of any bit into the high bits."""
HEADER_BITS = 36


class Fingerprints:
    """Digest the gradients and weights of one replica.

    The digest of a gradient is the sum of its 8-byte words modulo 2**64, so it adds up over any cut
    between words, and is as fast as memory.

    Args:
        parameters: those that the optimizer changes, in the model's order. Sparse gradients are
            left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [each for each in parameters if each.layout is torch.strided]
        self._parts = parts_of([each.nbytes for each in self._parameters])
        small: dict[torch.dtype, list[nn.Parameter]] = {}
        for each in self._parameters:
            if each.nbytes < _SMALL_BYTES:
                small.setdefault(each.dtype, []).append(each)
        self._small = list(small.values())
        self._large = [each for each in self._parameters if each.nbytes >= _SMALL_BYTES]
        self.gradient: int | None = None
        """Digest of the last step's summed gradient; None if there was none."""
        self.weights: int | None = None
        """Digest of a part of the weights before the last step's update."""
        self._totals: Callable[[], list[int]] = list
        self._num_gradients: int | None = None
        """Totals that are those of gradients; None if there are none to digest."""

    def start(self, step: int, *, gradient: bool = True) -> None:
        """Start to digest the gradients, and the part of the weights that is due after ``step``
        steps done. Nothing here waits for a GPU, which digests what it holds at this point of its
        stream."""
        gradients = self._gradients() if gradient else []
        self._num_gradients = len(gradients) if gradient else None
        self._totals = start_totals([*gradients, *self._weights(step)])

    def finish(self) -> None:
        """Take the digests that ``start`` began as those of the step."""
        totals, of_gradients = self._totals(), self._num_gradients
        self.gradient = None if of_gradients is None else sum(totals[:of_gradients]) & MASK64
        self.weights = sum(totals[of_gradients or 0 :]) & MASK64

    def of_gradients(self) -> int:
        """Return the digest of the present gradients."""
        return sum(start_totals(self._gradients())()) & MASK64

    @property
    def header(self) -> int:
        """Return both digests in ``HEADER_BITS`` bits, to compare between ranks; 0 before the first
        step."""
        if self.weights is None:
            return 0
        mixed = (self.weights * _SPREAD + (self.gradient or 0)) * _SPREAD & MASK64
        return mixed >> (64 - HEADER_BITS)

    def _weights(self, step: int) -> list[torch.Tensor]:
        """Return the bytes of the part of the weights that is due."""
        found = []
        for number, begin, end in self._parts[step % len(self._parts)]:
            data = _in_memory(self._parameters[number])
            found.append(data if end - begin == data.numel() else data[begin:end])
        return found

    def _gradients(self) -> list[torch.Tensor]:
        """Return the bytes of all dense gradients. Small ones of a dtype are together, one after
        the other."""
        small = [dense for parameters in self._small if (dense := _dense_gradients(parameters))]
        together = [bytes_of(torch._C._nn.flatten_dense_tensors(dense)) for dense in small]
        return [*together, *map(_in_memory, _dense_gradients(self._large))]


def parts_of(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Cut tensors of these sizes in bytes into parts of nearly equal size. Return for each part
    (number of the tensor, first byte, byte after the last)."""
    words = [-(-size // _WORD) for size in sizes]
    total = sum(words)
    num_parts = min(max(1, total * _WORD // PART_BYTES), MOST_PARTS)
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(num_parts)]
    for part, pieces in enumerate(parts):
        first, last = part * total // num_parts, (part + 1) * total // num_parts
        start = 0
        for number, count in enumerate(words):
            begin, end = max(first, start), min(last, start + count)
            if begin < end:
                end_byte = min((end - start) * _WORD, sizes[number])
                pieces.append((number, (begin - start) * _WORD, end_byte))
            start += count
    return parts


def _dense_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    gradients = [each.grad for each in parameters]
    return [each for each in gradients if each is not None and not each.is_sparse]


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in the order of its memory, without a copy if it is dense."""
    if not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis]))
    return bytes_of(tensor)
