"""The built-in models. Tasks import it."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from everstep.spec.tasks import (
    GptArgs,
    ImageModelSpec,
    MiniResNetArgs,
    MiniResNetSpec,
    TorchvisionModelArgs,
)
from train_fn.errors import BadTask, DataMissing
from train_fn.user_code.modules import torchvision_models

# ---------------------------------------------------------------- gpt

# GPT: a small decoder of transformer blocks (Radford et al., "Language models are unsupervised
# multitask learners", 2019).

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


# ---------------------------------------------------------------- mini resnet

# MiniResNet: a small residual network (He et al., "Deep residual learning", 2015) for images of
# any size.

STRIDED_STEM_PIXELS = 16
"""Images larger than this are halved by the stem, which makes them four times cheaper."""
_GROUP_CHANNELS = 16
"""Channels that are normalised together. Fewer learn more slowly: measured on digits."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where shapes change. [n, in,
    h, w] -> [n, out, h/s, w/s]."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = build_norm(norm, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = build_norm(norm, out_channels)
        self.shortcut: nn.Module = nn.Identity()
        # oneDNN (torch 2.13, AVX2, channels innermost) writes past the end of memory where a 1x1
        # convolution with a stride has fewer than 8 channels.
        self._leaves_out = stride if in_channels < 8 else 1
        if stride != 1 or in_channels != out_channels:
            stride //= self._leaves_out
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        if self._leaves_out > 1:
            x = x[..., :: self._leaves_out, :: self._leaves_out]
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class MiniResNet(nn.Module):
    """Stem, stages of residual blocks with doubling channels, global average, linear classifier.
    [n, c, h, w] -> [n, classes]."""

    def __init__(
        self, args: MiniResNetArgs, in_channels: int, num_classes: int, image_size: int
    ) -> None:
        super().__init__()
        width = args.width
        stem_stride = 2 if image_size > STRIDED_STEM_PIXELS else 1
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, stem_stride, 1, bias=False),
            build_norm(args.norm, width),
            nn.ReLU(),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(args.num_stages):
            for position in range(args.blocks_per_stage):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(ResidualBlock(channels, width << stage, stride, args.norm))
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(args.dropout)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x))
        logits: torch.Tensor = self.classifier(self.dropout(x.mean(dim=(2, 3))))
        return logits


def build_norm(norm: str, channels: int) -> nn.Module:
    """``group`` normalises each sample by itself, so that shares of a batch do not matter; the
    others look at the micro-batch."""
    match norm:
        case "group":
            groups = channels // _GROUP_CHANNELS if channels % _GROUP_CHANNELS == 0 else 1
            return nn.GroupNorm(groups, channels)
        case "batch":
            return nn.BatchNorm2d(channels)
        case _:
            return nn.SyncBatchNorm(channels)


# ---------------------------------------------------------------- pretrained

# Weights to start from, out of a file.

_INSIDE = ("state_dict", "model", "model_state_dict")
"""Under which names other programs keep the weights within what they save."""
_PREFIXES = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before names."""
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
"""Torchvision's files for densenet keep names that Python once allowed: norm.1 is norm1."""
_SHOWN = 5

logger = logging.getLogger(__name__)


def load_weights(
    model: nn.Module, path: Path, *, num_classes: int, ignored: tuple[str, ...] = ()
) -> list[str]:
    """Start ``model`` from a file of ``torch.save``; the names of what stays random.

    A layer whose first dimension is ``num_classes`` in the model and another number in the file is
    a classifier of other classes, and stays random. Everything else has to fit, by name and shape.

    Args:
        ignored: beginnings of names in the file that the model does without, such as auxiliary
            heads.

    Raises:
        DataMissing: there is no such file on this node, or it cannot be read.
        BadTask: it does not hold weights of this model.
    """
    found = _read(path)
    wanted = model.state_dict()
    unknown = [name for name in found if name not in wanted and not name.startswith(ignored)]
    missing = [
        name for name in wanted if name not in found and not name.endswith("num_batches_tracked")
    ]
    other = [name for name in wanted if name in found and found[name].shape != wanted[name].shape]
    random = [
        name for name in other if wanted[name].ndim > 0 and wanted[name].shape[0] == num_classes
    ]
    if unknown or missing or len(random) < len(other):
        problems = {
            "unknown": unknown,
            "missing": missing,
            "of another shape": [name for name in other if name not in random],
        }
        said = "; ".join(
            f"{len(names)} {what} ({_list(names)})" for what, names in problems.items() if names
        )
        raise BadTask(f"task.model.args.weights_path: {path} does not fit the model: {said}")
    taken = {name: value for name, value in found.items() if name in wanted and name not in random}
    model.load_state_dict(taken, strict=False)
    if random:
        logger.info("%s is for other classes: %s start from random weights", path, _list(random))
    return random


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise DataMissing(
            f"task.model.args.weights_path: there is no file {path} on this node; put it on every "
            "node"
        )
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:
        raise DataMissing(
            f"task.model.args.weights_path: {path} cannot be read as weights "
            f"({type(exc).__name__}: {str(exc)[:200]}); "
            "save the model's state_dict() by torch.save"
        ) from exc
    if isinstance(content, dict):
        content = next(
            (content[name] for name in _INSIDE if isinstance(content.get(name), dict)), content
        )
    if not isinstance(content, dict) or not all(
        isinstance(value, torch.Tensor) for value in content.values()
    ):
        raise BadTask(
            f"task.model.args.weights_path: {path} holds no state_dict of tensors by name"
        )
    weights = {_OLD_DENSENET.sub(r"\1", str(name)): value for name, value in content.items()}
    for prefix in _PREFIXES:
        if weights and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


# ---------------------------------------------------------------- image models

# Image classifiers by name: ours, and those of torchvision.

_WITH_AUXILIARY_HEADS = frozenset({"googlenet", "inception_v3"})
_AUXILIARY_HEADS = ("aux1.", "aux2.", "AuxLogits.")
TORCHVISION_CHANNELS = 3


def build_image_model(
    spec: ImageModelSpec, *, in_channels: int, num_classes: int, image_size: int
) -> nn.Module:
    """Return the model on CPU, with weights from torch's global generator. ``image_size`` is the
    smaller side in pixels."""
    if isinstance(spec, MiniResNetSpec):
        return MiniResNet(spec.args, in_channels, num_classes, image_size)
    return _torchvision_model(spec.name, spec.args, num_classes)


def _torchvision_model(name: str, args: TorchvisionModelArgs, num_classes: int) -> nn.Module:
    """Return a classifier of torchvision without its auxiliary heads, so that it returns one tensor
    of logits in training, too."""
    options: dict[str, object] = {"num_classes": num_classes}
    if name in _WITH_AUXILIARY_HEADS:
        options |= {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_") and args.image_size is not None:
        options["image_size"] = args.image_size
    model: nn.Module = torchvision_models().get_model(name, weights=None, **options)
    if args.weights_path is not None:
        load_weights(
            model,
            Path(args.weights_path).expanduser(),
            num_classes=num_classes,
            ignored=_AUXILIARY_HEADS,
        )
    return model
