"""Augmentation of whole micro-batches, keyed by (seed, epoch, sample index): the same on any rank,
in any order."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from train_fn.samples.randomness import uniform

Images = NDArray[np.uint8]
"""[n, channels, height, width]"""


def shift(images: Images, seed: int, epoch: int, indices: NDArray[np.int64], pixels: int) -> Images:
    """Move each image by up to ``pixels`` in both directions, the full way half as often as any
    other; what moves in is zero."""
    num, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels)))
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    rows = np.rint(uniform(seed, epoch, indices, "shift-y") * 2 * pixels).astype(np.intp)
    columns = np.rint(uniform(seed, epoch, indices, "shift-x") * 2 * pixels).astype(np.intp)
    return windows[np.arange(num), :, rows, columns]


def flip(images: Images, seed: int, epoch: int, indices: NDArray[np.int64]) -> Images:
    """Mirror half of the images left to right, in place."""
    chosen = uniform(seed, epoch, indices, "flip") < 0.5
    images[chosen] = images[chosen][..., ::-1]
    return images
