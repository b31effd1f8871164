"""Image data sets as tasks use them: those in memory, and a folder of files."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from everstep.spec.tasks import ImageFolderArgs
from train_fn.errors import DataMissing
from train_fn.samples.sampler import key, uniform

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


# ---------------------------------------------------------------- folder

IMAGENET = Channels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""As torchvision's weights expect them."""
_EVAL_CROP = 0.875
"""Share of the shorter side that the central crop of an image without augmentation keeps."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels."""


class FolderImages(Dataset[ImageBatch]):
    """Decode one micro-batch at a time into bytes: a fourth of what floats would take on the way to
    the device.

    The augmentation of an image is a function of (seed, epoch, its index).
    """

    def __init__(self, index: ImageIndex, image_size: int, *, augment: bool) -> None:
        self._index, self._size, self._augment = index, image_size, augment
        self.fingerprint = index.fingerprint

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int, /) -> ImageBatch:
        images, labels = self.fetch(0, None, np.array([index]))
        return images[0], labels[0]

    def fetch(self, seed: int, epoch: int | None, indices: NDArray[np.int64]) -> ImageBatch:
        """Return uint8 [n, 3, size, size] with channels innermost in memory, and labels. ``epoch``
        None leaves the images as they are."""
        pixels = np.empty((len(indices), self._size, self._size, 3), dtype=np.uint8)
        for position, index in enumerate(indices.tolist()):
            choices = (
                random.Random(key(seed, epoch, index, 7))
                if self._augment and epoch is not None
                else None
            )
            pixels[position] = self._decode(self._index.path(index), choices)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(
            self._index.labels[indices]
        )

    def _decode(self, path: Path, choices: random.Random | None) -> NDArray[np.uint8]:
        """Return one image [size, size, 3]: cropped and mirrored by ``choices``, or its middle.
        Raises DataMissing with the file."""
        try:
            with Image.open(path) as file:
                width, height = file.size
                box = _random_box(file.size, choices) if choices else _central_box(file.size)
                shrink = min(box[2] - box[0], box[3] - box[1]) / self._size
                # JPEG can be decoded at a half, a fourth or an eighth, which costs that much less
                if shrink >= 2:
                    file.draft("RGB", (math.ceil(width / shrink), math.ceil(height / shrink)))
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as exc:
            raise DataMissing(
                f"data set image_folder: {path} cannot be decoded ({exc}); replace it, or take it "
                "out"
            ) from exc
        across, down = image.width / width, image.height / height
        box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
        resized = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box)
        if choices and choices.random() < 0.5:
            resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(resized)


def load_image_folder(args: ImageFolderArgs) -> ImageData:
    """Return the images of ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg`` below the root. Raises
    DataMissing if there is nothing to train on."""
    root = Path(args.root).expanduser()
    classes = (
        sorted(entry.name for entry in (root / "train").iterdir() if entry.is_dir())
        if (root / "train").is_dir()
        else []
    )
    if not classes:
        raise DataMissing(
            f"data set image_folder: {root / 'train'} has no class directories on this node. Put "
            "the images at "
            f"{root}/train/CLASS/*.jpg on every node (a shared path), or set task.data.args.root"
        )
    train, val = index_images(root / "train", classes), index_images(root / "val", classes)
    if len(train) == 0:
        raise DataMissing(
            f"data set image_folder: no images ({', '.join(sorted(SUFFIXES))}) below "
            f"{root / 'train'}"
        )
    return ImageData(
        train=FolderImages(train, args.image_size, augment=args.augment),
        val=FolderImages(val, args.image_size, augment=False) if len(val) else None,
        num_classes=len(classes),
        channels=3,
        image_size=args.image_size,
        bytes_as=IMAGENET,
    )


def _random_box(size: tuple[int, int], choices: random.Random) -> Box:
    """Return a crop of 8 to 100 % of the area with sides 3:4 to 4:3 (Szegedy et al., 2014)."""
    width, height = size
    for _ in range(10):
        area = width * height * choices.uniform(0.08, 1.0)
        ratio = math.exp(choices.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if crop_width <= width and crop_height <= height:
            left, top = (
                choices.uniform(0, width - crop_width),
                choices.uniform(0, height - crop_height),
            )
            return left, top, left + crop_width, top + crop_height
    return _central_box(size)


def _central_box(size: tuple[int, int]) -> Box:
    width, height = size
    side = min(width, height) * _EVAL_CROP
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


# ---------------------------------------------------------------- image index

# Which images there are. Flat arrays, which forks share: a list of a million paths would be copied
# by each process that counts references to them.

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})


@dataclass(frozen=True)
class ImageIndex:
    """The images of one split by class and path. ``fingerprint`` covers classes, paths and
    sizes."""

    split: Path
    paths: NDArray[np.uint8]
    """All paths below ``split``, one after another."""
    ends: NDArray[np.int64]
    """[n]: where each path ends."""
    labels: NDArray[np.int64]
    """[n]"""
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        start = int(self.ends[index - 1]) if index else 0
        return self.split / os.fsdecode(self.paths[start : int(self.ends[index])].tobytes())


def index_images(split: Path, classes: list[str]) -> ImageIndex:
    """Return the images below ``split/CLASS`` in a fixed order. Raises OSError."""
    paths: list[bytes] = []
    labels: list[int] = []
    hashed = hashlib.sha256()
    for label, name in enumerate(classes):
        for path in sorted(_images_below(split / name)):
            relative = path.relative_to(split)
            hashed.update(
                f"{label} {relative} {path.stat().st_size}\n".encode(errors="surrogateescape")
            )
            paths.append(os.fsencode(relative))
            labels.append(label)
    return ImageIndex(
        split,
        np.frombuffer(b"".join(paths), dtype=np.uint8),
        np.cumsum([len(path) for path in paths], dtype=np.int64),
        np.array(labels, dtype=np.int64),
        hashed.hexdigest(),
    )


def _images_below(directory: Path) -> Iterator[Path]:
    for place, _, files in os.walk(directory, followlinks=True):
        for file in files:
            if Path(file).suffix.lower() in SUFFIXES:
                yield Path(place, file)
