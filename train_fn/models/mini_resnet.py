"""MiniResNet: a small residual network (He et al., "Deep residual learning", 2015) for images of
any size."""

from __future__ import annotations

import torch
from torch import nn

from everstep.spec.image_task import MiniResNetArgs

STRIDED_STEM_PIXELS = 16
"""Images larger than this are halved by the stem, which makes them four times cheaper."""
_GROUP_CHANNELS = 16
"""Channels that are normalised together. Fewer learn more slowly: measured on digits."""


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where shapes change. [n, in,
    h, w] -> [n, out, h/s, w/s]."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = build_norm(norm, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = build_norm(norm, out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
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
                blocks.append(Block(channels, width << stage, stride, args.norm))
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
