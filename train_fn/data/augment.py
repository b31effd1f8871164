"""Augmentation of whole micro-batches, keyed by (seed, epoch, sample index): the same on any rank, in any order."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from train_fn.randomness import uniform

Images = NDArray[np.uint8]
"""[n, channels, height, width]"""


def shift(images: Images, seed: int, epoch: int, indices: NDArray[np.int64], pixels: int) -> Images:
    """Move each image by up to ``pixels`` in both directions; what moves in is zero."""
    num, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels)))
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    choices = 2 * pixels + 1
    rows = (uniform(seed, epoch, indices, "shift-y") * choices).astype(np.intp)
    columns = (uniform(seed, epoch, indices, "shift-x") * choices).astype(np.intp)
    return windows[np.arange(num), :, rows, columns]


def flip(images: Images, seed: int, epoch: int, indices: NDArray[np.int64]) -> Images:
    """Mirror half of the images left to right, in place."""
    chosen = uniform(seed, epoch, indices, "flip") < 0.5
    images[chosen] = images[chosen][..., ::-1]
    return images
