"""Image data sets as tasks use them, and the one kind that is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch.utils.data import Dataset

from train_fn.samples.sampler import uniform

Arrays = dict[str, NDArray[Any]]
"""What files of a data set were decoded into: once for all ranks of a node."""
ImageBatch = tuple[torch.Tensor, torch.Tensor]
"""Images [n, channels, height, width], float32 and normalised or uint8; labels int64 [n]."""


class ImageSet(Protocol):
    """Map-style: ``dataset[i]`` is one sample. ``fingerprint`` changes when the data does."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Channels:
    """Mean and standard deviation of each channel, on a scale from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class ImageData:
    """The data that a data set gives to the task; ``val`` is None if nothing is held out."""

    train: ImageSet
    val: ImageSet | None
    num_classes: int
    channels: int
    image_size: int
    """Smaller side in pixels."""
    bytes_as: Channels | None = None
    """How images that come as bytes are normalised, on the device."""


@dataclass(frozen=True)
class Pixels:
    """How bytes become numbers (``value * scale - offset``), and how training images are
    augmented."""

    scale: float
    offset: float
    shift_pixels: int = 0
    flips: bool = False


class InMemoryImages(Dataset[ImageBatch]):
    """Images as one uint8 array. They are fetched and augmented one
    micro-batch at a time."""

    in_memory = True

    def __init__(
        self, images: Images, labels: NDArray[np.int64], pixels: Pixels, fingerprint: str
    ) -> None:
        assert images.ndim == 4 and len(images) == len(labels)
        self.images, self.labels = images, labels
        self.pixels, self.fingerprint = pixels, fingerprint

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> ImageBatch:
        images, labels = self.fetch(0, None, np.array([index]))
        return images[0], labels[0]

    def fetch(self, seed: int, epoch: int | None, indices: NDArray[np.int64]) -> ImageBatch:
        """A collated micro-batch in the order of ``indices``, augmented for ``epoch``; None leaves
        the images as they are."""
        images = self.images[indices]
        if epoch is not None and self.pixels.shift_pixels:
            images = shift(images, seed, epoch, indices, self.pixels.shift_pixels)
        if epoch is not None and self.pixels.flips:
            images = flip(images, seed, epoch, indices)
        normalised = (
            torch.from_numpy(images)
            .to(torch.float32)
            .mul_(self.pixels.scale)
            .sub_(self.pixels.offset)
        )
        return normalised, torch.from_numpy(self.labels[indices])


# ---------------------------------------------------------------- augment

# Augmentation of whole micro-batches, keyed by (seed, epoch, sample index): the same on any rank,
# in any order.

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
