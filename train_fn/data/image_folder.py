"""Images in one directory a class, decoded by the loader's processes."""

from __future__ import annotations

import hashlib
import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from everstep.catalog import ImageFolderArgs
from train_fn.data.images import ImageData
from train_fn.errors import DataMissing

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
"""Of ImageNet's channels, as torchvision's weights expect them."""
_EVAL_CROP = 0.875
"""Share of the shorter side that the central crop of an image without augmentation keeps."""


class FolderImages(Dataset[tuple[torch.Tensor, int]]):
    """Decodes one image at a time. Random choices come from python's generator, which is seeded for each sample."""

    def __init__(self, files: list[Path], labels: list[int], fingerprint: str, image_size: int, *, augment: bool) -> None:
        self._files = np.array([str(file) for file in files])  # an array, so that loader processes share its memory
        self._labels = np.array(labels)
        self.fingerprint = fingerprint
        self._size, self._augment = image_size, augment

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, int]:
        with Image.open(self._files[index]) as file:
            image = file.convert("RGB")
        box = _random_box(image.size) if self._augment else _central_box(image.size)
        resized = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box)
        if self._augment and random.random() < 0.5:
            resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float().div_(255)
        return pixels.sub_(_MEAN).div_(_STD), int(self._labels[index])


def load_image_folder(args: ImageFolderArgs) -> ImageData:
    """``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg`` below the root; raises DataMissing when there is nothing to train on."""
    root = Path(args.root).expanduser()
    classes = sorted(entry.name for entry in (root / "train").iterdir() if entry.is_dir()) if (root / "train").is_dir() else []
    if not classes:
        raise DataMissing(
            f"data set image_folder: {root / 'train'} has no class directories on this node. Put the images at "
            f"{root}/train/CLASS/*.jpg on every node (a shared path), or set task.data.args.root"
        )
    train = _scan(root / "train", classes, args, augment=args.augment)
    if train is None:
        raise DataMissing(f"data set image_folder: no images ({', '.join(sorted(SUFFIXES))}) below {root / 'train'}")
    return ImageData(
        train=train,
        val=_scan(root / "val", classes, args, augment=False),
        num_classes=len(classes),
        channels=3,
        image_size=args.image_size,
    )


def _scan(split: Path, classes: list[str], args: ImageFolderArgs, *, augment: bool) -> FolderImages | None:
    """The images of one split in a fixed order; None where there are none. Its fingerprint covers names and sizes."""
    files, labels = [], []
    hashed = hashlib.sha256()
    for label, name in enumerate(classes):
        directory = split / name
        found = sorted(path for path in directory.rglob("*") if path.suffix.lower() in SUFFIXES) if directory.is_dir() else []
        for path in found:
            hashed.update(f"{label} {path.relative_to(split)} {path.stat().st_size}\n".encode())
        files += found
        labels += [label] * len(found)
    if not files:
        return None
    return FolderImages(files, labels, hashed.hexdigest(), args.image_size, augment=augment)


def _random_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a crop of 8 to 100 % of the area with sides 3:4 to 4:3 (Szegedy et al., 2014)."""
    width, height = size
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if crop_width <= width and crop_height <= height:
            left, top = random.uniform(0, width - crop_width), random.uniform(0, height - crop_height)
            return left, top, left + crop_width, top + crop_height
    return _central_box(size)


def _central_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    width, height = size
    side = min(width, height) * _EVAL_CROP
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
