"""GPT: a small decoder of transformer blocks (Radford et al., "Language models are unsupervised
multitask learners", 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from everstep.spec.text_task import GptArgs

_STD = 0.02
"""Standard deviation of initial weights; what is added to the residual stream starts smaller by the
root of its number."""


class Attention(nn.Module):
    """Causal self-attention. [n, tokens, width] -> the same."""

    def __init__(self, args: GptArgs) -> None:
        super().__init__()
        self.num_heads, self.dropout = args.num_heads, args.dropout
        self.queries_keys_values = nn.Linear(args.width, 3 * args.width)
        self.output = nn.Linear(args.width, args.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, num_tokens, width = x.shape
        heads = self.queries_keys_values(x).view(
            n, num_tokens, 3, self.num_heads, width // self.num_heads
        )
        # each [n, heads, tokens, width / heads]
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        answer: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(n, num_tokens, width))
        return answer


class Block(nn.Module):
    """Attention and a perceptron, each normalised before and added to what came in. [n, tokens,
    width] -> the same."""

    def __init__(self, args: GptArgs) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.attention = Attention(args)
        self.expand, self.contract = (
            nn.Linear(args.width, 4 * args.width),
            nn.Linear(4 * args.width, args.width),
        )
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        answer: torch.Tensor = x + self.dropout(
            self.contract(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))
        )
        return answer


class Gpt(nn.Module):
    """Logits of each next token. int64 [n, tokens] -> float [n, tokens, vocabulary]; at most
    ``context_length`` tokens.

    The buffer ``vocabulary`` says what each token is, so that a checkpoint's ``model.pt`` is enough
    to write text with.
    """

    def __init__(self, args: GptArgs, vocabulary: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("vocabulary", vocabulary)
        # also the last layer, under this one name
        self.tokens = nn.Embedding(len(vocabulary), args.width)
        self.positions = nn.Embedding(args.context_length, args.width)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.norm = nn.LayerNorm(args.width)
        self._draw_weights(args.num_layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def _draw_weights(self, num_layers: int) -> None:
        """From torch's global generator, in the order of the modules."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                added = name.endswith(("attention.output", "contract"))
                nn.init.normal_(
                    module.weight, std=_STD / math.sqrt(2 * num_layers) if added else _STD
                )
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)
