"""What a task is: a plain class that says what is trained on what. Everstep calls it on every
rank."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

Sum = torch.Tensor | float | int
"""A sum over a micro-batch; a tensor has no dimensions."""


class Task(Protocol):
    """The part that every task has, but for ``loss``, which one with ``training_step`` may leave
    out. Optional methods: ``metrics``, ``build_metrics``, ``training_step``, ``build_optimizer``,
    ``build_scheduler``, ``after_step``, ``collate``, ``on_epoch_end``, ``state_dict`` and
    ``load_state_dict``. Optional attributes: ``validation_loss``, ``count_flops``,
    ``flops_per_sample`` and ``tokens_per_sample``."""

    def build_model(self) -> nn.Module:
        """The model on CPU; its weights may be drawn from torch's global generator, which is
        seeded."""

    def build_datasets(self) -> dict[str, Any]:
        """``{"train": dataset, "val": dataset or None}``, map-style or iterable; a ``fingerprint``
        attribute guards resumes."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Sum]:
        """(loss summed over the micro-batch, weight: how many samples or tokens it is a sum
        over). It gets ``step`` and ``epoch`` by name if it has such parameters."""
