"""Next-token prediction over text."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from everstep.spec.text_task import LanguageModelingSpec
from train_fn.data.text_files import PackedText, load_text_files
from train_fn.models.gpt import Gpt


class LanguageModeling:
    """Batches are int64 [n, context_length + 1]. Losses are sums over tokens, in nats;
    exp(``loss``) is the perplexity."""

    count_flops = True

    def __init__(self, spec: LanguageModelingSpec) -> None:
        self.spec = spec
        self.data = load_text_files(spec.data.args, spec.model.args.context_length)
        self.tokens_per_sample = spec.model.args.context_length

    def build_model(self) -> nn.Module:
        return Gpt(self.spec.model.args, self.data.vocabulary)

    def build_datasets(self) -> dict[str, PackedText | None]:
        return {"train": self.data.train, "val": self.data.val}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = model(batch[:, :-1])
        return _cross_entropy(logits, batch[:, 1:]), batch[:, 1:].numel()

    def metrics(
        self, model: nn.Module, batch: torch.Tensor
    ) -> dict[str, tuple[torch.Tensor, float]]:
        logits, following = model(batch[:, :-1]), batch[:, 1:]
        loss_sum, num_tokens = _cross_entropy(logits, following), following.numel()
        return {
            "loss": (loss_sum, num_tokens),
            "accuracy": ((logits.argmax(dim=-1) == following).sum(), num_tokens),
            "bits_per_token": (loss_sum, num_tokens * math.log(2)),
        }


def _cross_entropy(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Sum over all tokens, in float32 whatever the logits are."""
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum")
