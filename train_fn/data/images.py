"""Image data sets as tasks use them, and the one kind that is in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch.utils.data import Dataset

from train_fn.node.node_dir import cache_root, once_a_node
from train_fn.samples.sampler import uniform

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
    """Images as one uint8 array (in memory or memory-mapped). They are fetched and augmented one
    micro-batch at a time."""

    in_memory = True

    def __init__(
        self, images: Images, labels: NDArray[np.int64], pixels: Pixels, fingerprint: str
    ) -> None:
        assert images.ndim == 4 and len(images) == len(labels)
        # of a memory map, a plain view: cheaper to index
        self.images, self.labels = np.asarray(images), np.asarray(labels)
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


# ---------------------------------------------------------------- cache

# Decode data once per node: the first process decodes under a lock, all others map the result into
# memory.

Arrays = dict[str, NDArray[np.generic]]


def decoded_once(name: str, sources: Iterable[Path], decode: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of ``decode``, memory-mapped from this node's cache. Call it only if the
    cache does not have them.

    Args:
        name: of the data set.
        sources: files that are decoded. If the size or time of one changes, they are decoded
            again.
    """
    stamps = [
        f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sources
    ]
    return cached(name, hashlib.sha256(repr(stamps).encode()).hexdigest()[:16], decode)


def cached(name: str, key: str, decode: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that this node's cache has under ``name`` and ``key``, memory-mapped. Fill
    the cache from ``decode`` if it has none."""
    directory = cache_root() / "data" / f"{name}-{key}"
    once_a_node(directory, lambda temporary: _write(temporary, decode()))
    return {
        path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
        for path in sorted(directory.glob("*.npy"))
    }


def _write(directory: Path, arrays: Arrays) -> None:
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array, allow_pickle=False)
