"""Digests of what all ranks must have in common after each step: the summed gradient, and a part of
the weights that moves on, so that all of them have been compared after ``MOST_PARTS`` steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from train_fn.errors import FOUND_WITHIN
from train_fn.samples.loader import tensors_in
from train_fn.samples.sampler import MASK64, key

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
        sizes = [local(each).nbytes for each in self._parameters]
        self._parts = parts_of(sizes)
        self._whole: list[nn.Parameter] = []
        """Of whole words, which may be added up in any order."""
        self._other: list[nn.Parameter] = []
        for each, size in zip(self._parameters, sizes, strict=True):
            (self._other if size % _WORD else self._whole).append(each)
        self._places: list[int] = []
        self._rows: list[tuple[int, int]] = []
        """Where the gradients of whole words were last, and how they followed each other there."""
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

    def combine(self, of_ranks: Iterable[tuple[int, int]]) -> None:
        """Let ``finish`` take the sums of these digests of gradient and weights: each rank's are of
        its rows of sharded tensors."""
        totals = [sum(each) & MASK64 for each in zip(*of_ranks, strict=True)]
        self._totals, self._num_gradients = lambda: totals, 1

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
        """Return the bytes of all dense gradients. Those of whole words that follow each other in
        one memory, as in DDP's buckets, are together; so are other small ones of a dtype."""
        whole = _dense_gradients(self._whole)
        places = [each.data_ptr() for each in whole]
        if places != self._places or not all(
            _has_behind(whole[first], size) for first, size in self._rows
        ):
            self._places, self._rows = places, rows_of(whole)
        found: list[torch.Tensor] = []
        alone: list[torch.Tensor] = []
        for first, size in self._rows:
            each = whole[first]
            if size == each.nbytes:
                alone.append(each)
            else:
                row = each.as_strided((size // each.itemsize,), (1,))
                found.append(row.view(torch.uint8))
        # In the model's order: those that end within a word are added up in no other.
        return [*found, *_together(alone), *_together(_dense_gradients(self._other))]


def rows_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return which tensors follow each other without a gap in one memory: for each row (index of
    the first, bytes of all)."""
    rows: list[tuple[int, int]] = []
    end, memory = -1, -1
    for index in sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr()):
        tensor = tensors[index]
        begin, own_memory = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        if rows and (begin, own_memory) == (end, memory):
            rows[-1] = (rows[-1][0], rows[-1][1] + tensor.nbytes)
        else:
            rows.append((index, tensor.nbytes))
        end, memory = begin + tensor.nbytes, own_memory
    return rows


def _has_behind(tensor: torch.Tensor, size: int) -> bool:
    """Return whether a tensor's memory has so many bytes from where the tensor begins."""
    begin = tensor.storage_offset() * tensor.itemsize
    return begin + size <= tensor.untyped_storage().nbytes()


def _together(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bytes of tensors, with small ones of a dtype one after the other."""
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    found = []
    for tensor in tensors:
        if tensor.nbytes < _SMALL_BYTES:
            small.setdefault(tensor.dtype, []).append(_in_order(tensor))
        else:
            found.append(_in_memory(tensor))
    flat = map(torch._C._nn.flatten_dense_tensors, small.values())
    return [*map(bytes_of, flat), *found]


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
    return [local(each) for each in gradients if each is not None and not each.is_sparse]


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in the order of its memory, without a copy if it is dense."""
    return bytes_of(_in_order(local(tensor)))


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor with its axes in the order of its memory."""
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis]))


# ---------------------------------------------------------------- audit rules

# Which steps are audited, whose micro-batch each rank computes again, and who computed wrongly.
# Everything here is pure, so all ranks decide alike.

_STEPS, _RANKS, _PLACES = 13, 14, 15
"""Purposes of the draws for audits."""


class Computed(NamedTuple):
    """Hold what one rank computed of a micro-batch: equal for equal bits."""

    samples: int
    """Digest of the batch."""
    loss: str
    """The exact loss and weight, in hexadecimal."""
    gradient: int
    """Digest of the gradients of this micro-batch alone."""
    buffers: int
    """Digest of what the forward pass changed, such as running statistics."""

    def differing(self, other: Computed) -> list[str]:
        """Return what differs, in words; nothing if all is equal."""
        words = ("its samples", "its loss", "its gradient", "what its forward pass changes")
        return [word for word, one, two in zip(words, self, other, strict=True) if one != two]


class Dispute(NamedTuple):
    """Two computations of one micro-batch that differ."""

    number: int
    """Of the micro-batch, in the global batch."""
    owner: int
    """The rank whose micro-batch it is."""
    auditor: int
    own: Computed
    audited: Computed


def is_audited(seed: int, step: int, fraction: float) -> bool:
    """Return whether the step after ``step`` steps done is audited: ``fraction`` of all are."""
    return key(seed, step, _STEPS) < fraction * (1 << 64)


def audited_rank(seed: int, step: int, rank: int, world_size: int) -> int:
    """Return the rank of whose micro-batches ``rank`` computes one again: its neighbour at a
    distance that changes from audit to audit. A rank that is alone audits itself."""
    if world_size == 1:
        return 0
    return (rank + 1 + key(seed, step, _RANKS) % (world_size - 1)) % world_size


def audited_place(seed: int, step: int, rank: int, share_size: int) -> int:
    """Return which of the micro-batches in the share of ``rank`` is computed again."""
    return key(seed, step, rank, _PLACES) % share_size


def settled(dispute: Dispute, again: Sequence[Computed]) -> tuple[int, ...]:
    """Return the ranks that computed a disputed micro-batch wrongly; none if it cannot be decided.

    The result of most ranks counts, if at least two computations had it.

    Args:
        again: what each rank found when all of them computed the micro-batch once more.
    """
    usual, count = Counter(again).most_common(1)[0]
    results = [
        (dispute.owner, dispute.own),
        (dispute.auditor, dispute.audited),
        *enumerate(again),
    ]
    agreeing = sum(found == usual for _, found in results)
    if 2 * count <= len(again) or agreeing < 2:
        return ()
    return tuple(sorted({rank for rank, found in results if found != usual}))


# ---------------------------------------------------------------- word sums

# Sums over the words of tensors: equal for equal bits, additive over any cut between words, and as
# fast as memory.


class Words(NamedTuple):
    """Sum of the 8-byte words of some bytes, and the bytes after the last whole word as a
    number."""

    whole: int
    rest: int


def word_sum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's 8-byte words modulo 2**64, at memory speed."""
    return joined(words_in(bytes_of(tensor)))


def local(tensor: Any) -> Any:
    """Return this rank's rows of a tensor that is sharded over ranks, or another one as it is."""
    if not hasattr(tensor, "device_mesh"):  # importing its class takes half a second
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, or of this rank's rows of it, without a copy if it is
    contiguous: shape (nbytes,), uint8."""
    own: torch.Tensor = local(tensor)
    return own.detach().contiguous().reshape(-1).view(torch.uint8)


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


# ---------------------------------------------------------------- pass record

# Digest what one forward and backward pass reads and computes, without changing any of it.


class PassRecord:
    """Watch one pass of a micro-batch by hooks, within a ``with`` block around it.

    Gradients are those of this pass alone: tensor hooks see them before they are added to others.

    Args:
        module: computes (loss sum, weight) of a batch.
        parameters: those that get gradients.
        buffers: returns the tensors that a forward pass changes, as they are now.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        buffers: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        self._module, self._parameters, self._buffers = module, parameters, buffers
        self._handles: list[RemovableHandle] = []
        self._samples: list[torch.Tensor] = []
        self._changed: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._measured: tuple[Any, Any] | None = None

    def __enter__(self) -> Self:
        self._handles = [
            self._module.register_forward_pre_hook(self._before),
            self._module.register_forward_hook(self._after),
            *(
                parameter.register_hook(partial(self._gradient, number))  # type: ignore[no-untyped-call]
                for number, parameter in enumerate(self._parameters)
            ),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def computed(self) -> Computed:
        """Return the digests. Waits for the device."""
        assert self._measured is not None, "no pass was made"
        loss, weight = (float(value) for value in self._measured)
        return Computed(
            _total(self._samples),
            f"{loss.hex()} {weight.hex()}",
            _total(self._gradients),
            _total(self._changed),
        )

    def _before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        tensors = tensors_in(arguments)
        self._samples = _digests(each for each in tensors if each.layout is torch.strided)

    @torch.no_grad()
    def _after(self, module: nn.Module, arguments: tuple[Any, ...], answer: Any) -> None:
        loss_sum, weight = answer
        self._measured = (loss_sum.detach(), weight)
        self._changed = _digests(self._buffers())

    @torch.no_grad()
    def _gradient(self, number: int, gradient: torch.Tensor) -> None:
        parts = [gradient]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            parts = [gradient.indices(), gradient.values()]
        self._gradients += [(2 * number + 1) * digest for digest in _digests(parts)]


def _digests(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a digest of each tensor, which depends on its place among them: shape (), int64."""
    return [
        (2 * place + 1) * total_on_device(bytes_of(tensor)) for place, tensor in enumerate(tensors)
    ]


def _total(digests: list[torch.Tensor]) -> int:
    return sum(int(digest.item()) for digest in digests) & MASK64
