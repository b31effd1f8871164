"""Digest what one forward and backward pass reads and computes, without changing any of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from train_fn.samples.loader import tensors_in
from train_fn.samples.randomness import MASK64
from train_fn.step.audit_rules import Computed
from train_fn.step.word_sums import bytes_of, total_on_device


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
