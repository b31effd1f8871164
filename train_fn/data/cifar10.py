"""CIFAR-10 (Krizhevsky, 2009) from its python batches."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from everstep.spec.image_task import Cifar10Args
from train_fn.data.cache import Arrays, decoded_once
from train_fn.data.images import ImageData, InMemoryImages, Pixels
from train_fn.errors import DataMissing
from train_fn.node.node_dir import cache_root, node_lock
from train_fn.user_code.torchvision_ops import torchvision_datasets

_DIRECTORY = "cifar-10-batches-py"
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "val": ["test_batch"]}
_PIXELS = Pixels(scale=1 / 255 / 0.251, offset=0.473 / 0.251)
"""Mean 0.473 and standard deviation 0.251 over all channels of the training images."""


def load_cifar10(args: Cifar10Args) -> ImageData:
    """Return training and validation images. Raises DataMissing if the batches are not here and
    cannot be downloaded."""
    root = Path(args.root).expanduser()
    directory = root / _DIRECTORY
    files = [directory / name for names in _BATCHES.values() for name in names]
    if not all(file.is_file() for file in files):
        _download(root, files)
    arrays: Any = decoded_once("cifar10", files, lambda: _decode(directory))
    digest = arrays["digest"].tobytes().decode()
    train_pixels = Pixels(
        _PIXELS.scale, _PIXELS.offset, shift_pixels=4 if args.augment else 0, flips=args.augment
    )
    return ImageData(
        train=InMemoryImages(arrays["train_images"], arrays["train_labels"], train_pixels, digest),
        val=InMemoryImages(arrays["val_images"], arrays["val_labels"], _PIXELS, digest),
        num_classes=10,
        channels=3,
        image_size=32,
    )


def _decode(directory: Path) -> Arrays:
    """Return the images and labels of the batches. They are pickles, as their authors published
    them: only as trustworthy as whoever put them there."""
    arrays: Arrays = {}
    hashed = hashlib.sha256()
    for split, names in _BATCHES.items():
        batches = [
            pickle.loads((directory / name).read_bytes(), encoding="bytes") for name in names
        ]
        images = np.concatenate(
            [np.asarray(batch[b"data"], dtype=np.uint8) for batch in batches]
        ).reshape(-1, 3, 32, 32)
        labels = np.concatenate([np.asarray(batch[b"labels"], dtype=np.int64) for batch in batches])
        hashed.update(images.tobytes() + labels.tobytes())
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    arrays["digest"] = np.frombuffer(hashed.hexdigest().encode(), dtype=np.uint8)
    return arrays


def _download(root: Path, files: list[Path]) -> None:
    """Download the data once per node, by torchvision. Raises DataMissing with what to do if there
    is no network or no permission."""
    with node_lock(cache_root() / "data" / "cifar10.download.lock"):
        if all(file.is_file() for file in files):
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            torchvision_datasets().CIFAR10(str(root), download=True)
        except (OSError, RuntimeError) as exc:
            shutil.rmtree(root / _DIRECTORY, ignore_errors=True)
            raise DataMissing(
                f"data set cifar10 is not in {root} on this node, and cannot be downloaded there "
                f"({exc}). "
                f"Put {_DIRECTORY} there on every node, or set task.data.args.root to a directory "
                "that has it"
            ) from exc
