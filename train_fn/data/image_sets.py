"""Image data sets by name."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everstep.spec.tasks import (
    Cifar10Args,
    Cifar10Spec,
    DigitsArgs,
    DigitsSpec,
    FashionMnistArgs,
    FashionMnistSpec,
    ImageDataSpec,
    ImageFolderSpec,
)
from train_fn.data.images import Arrays, ImageData, InMemoryImages, Pixels, load_image_folder
from train_fn.errors import DataMissing
from train_fn.node.node_dir import cache_root, node_lock
from train_fn.user_code.modules import torchvision_datasets


def build_image_data(spec: ImageDataSpec) -> ImageData:
    """Return the data set that ``spec`` names. Raises DataMissing, with what to do, if it is not on
    this node."""
    match spec:
        case DigitsSpec():
            return load_digits(spec.args)
        case FashionMnistSpec():
            return load_fashion_mnist(spec.args)
        case Cifar10Spec():
            return load_cifar10(spec.args)
        case ImageFolderSpec():
            return load_image_folder(spec.args)


def _in_memory(arrays: Arrays, pixels: Pixels, train_pixels: Pixels) -> ImageData:
    """Return decoded images of ten classes as a data set."""
    digest = arrays["digest"].tobytes().decode()
    images = arrays["train_images"]
    return ImageData(
        train=InMemoryImages(images, arrays["train_labels"], train_pixels, digest),
        val=InMemoryImages(arrays["val_images"], arrays["val_labels"], pixels, digest),
        num_classes=10,
        channels=images.shape[1],
        image_size=images.shape[2],
    )


def _download(
    name: str, root: Path, kind: str, leftover: str, is_there: Callable[[], bool], remedy: str
) -> None:
    """Download a data set once per node, by torchvision's class ``kind``. Raises DataMissing with
    what to do if there is no network or no permission."""
    with node_lock(cache_root() / "data" / f"{name}.download.lock"):
        if is_there():
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            getattr(torchvision_datasets(), kind)(str(root), download=True)
        except (OSError, RuntimeError) as exc:
            shutil.rmtree(root / leftover, ignore_errors=True)
            raise DataMissing(
                f"data set {name} is not in {root} on this node, and cannot be downloaded there "
                f"({exc}). {remedy}"
            ) from exc


# ---------------------------------------------------------------- cifar10

# CIFAR-10 (Krizhevsky, 2009) from its python batches.

_DIRECTORY = "cifar-10-batches-py"
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "val": ["test_batch"]}
_CIFAR10_PIXELS = Pixels(scale=1 / 255 / 0.251, offset=0.473 / 0.251)
"""Mean 0.473 and standard deviation 0.251 over all channels of the training images."""


def load_cifar10(args: Cifar10Args) -> ImageData:
    """Return training and validation images. Raises DataMissing if the batches are not here and
    cannot be downloaded."""
    root = Path(args.root).expanduser()
    directory = root / _DIRECTORY
    files = [directory / name for names in _BATCHES.values() for name in names]
    if not all(file.is_file() for file in files):
        _download(
            "cifar10",
            root,
            "CIFAR10",
            _DIRECTORY,
            lambda: all(file.is_file() for file in files),
            f"Put {_DIRECTORY} there on every node, or set task.data.args.root to a directory "
            "that has it",
        )
    arrays = _decode_cifar10(directory)
    train_pixels = Pixels(
        _CIFAR10_PIXELS.scale,
        _CIFAR10_PIXELS.offset,
        shift_pixels=4 if args.augment else 0,
        flips=args.augment,
    )
    return _in_memory(arrays, _CIFAR10_PIXELS, train_pixels)


def _decode_cifar10(directory: Path) -> Arrays:
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


# ---------------------------------------------------------------- digits

# scikit-learn's 1,797 grey 8x8 digits, read from its package without importing it, which would
# cost seconds a rank.

_DIGITS_PIXELS = Pixels(scale=1 / 16 / 0.376, offset=0.305 / 0.376)
"""Bytes are 0 to 16; mean 0.305 and standard deviation 0.376 of their sixteenth over the whole
set."""


def load_digits(args: DigitsArgs) -> ImageData:
    """Training and validation images; raises DataMissing where scikit-learn is not installed."""
    path = _digits_file()
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)
    images = table[:, :64].reshape(-1, 1, 8, 8).astype(np.uint8)
    labels = np.ascontiguousarray(table[:, 64])
    fingerprint = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    held_out = stratified_holdout(labels, args.val_fraction)
    kept = np.setdiff1d(np.arange(len(labels)), held_out)
    train_pixels = Pixels(
        _DIGITS_PIXELS.scale, _DIGITS_PIXELS.offset, shift_pixels=1 if args.augment else 0
    )
    return ImageData(
        train=InMemoryImages(
            images[kept], labels[kept], train_pixels, f"digits/{len(kept)}/{fingerprint}"
        ),
        val=InMemoryImages(images[held_out], labels[held_out], _DIGITS_PIXELS, fingerprint)
        if len(held_out)
        else None,
        num_classes=10,
        channels=1,
        image_size=8,
    )


def stratified_holdout(labels: NDArray[np.int64], fraction: float) -> NDArray[np.int64]:
    """Indices held out, ascending: evenly spaced through the samples sorted by class, so that every
    class gives its share."""
    by_class = np.argsort(labels, kind="stable")
    num_held_out = math.ceil(fraction * len(labels))
    return np.sort(by_class[np.arange(num_held_out) * len(labels) // max(1, num_held_out)])


def _digits_file() -> Path:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataMissing(
            "data set digits comes with scikit-learn, which this node lacks; pip install "
            "'everstep[server]' there"
        )
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataMissing(
            f"data set digits: scikit-learn has no {path}; reinstall scikit-learn on this node"
        )
    return path


# ---------------------------------------------------------------- fashion mnist

# Fashion-MNIST (Xiao et al., 2017) from IDX files, as Debian's package has them or torchvision
# downloads them.

_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "val_images": "t10k-images-idx3-ubyte",
    "val_labels": "t10k-labels-idx1-ubyte",
}
_FASHION_PIXELS = Pixels(scale=1 / 255 / 0.353, offset=0.286 / 0.353)
"""Mean 0.286 and standard deviation 0.353 over the training images."""


def load_fashion_mnist(args: FashionMnistArgs) -> ImageData:
    """Return training and validation images. Raises DataMissing if the files are not here and
    cannot be downloaded."""
    root = Path(args.root).expanduser()
    paths = {name: _find(root, file) for name, file in _FILES.items()}
    if None in paths.values():
        _download(
            "fashion_mnist",
            root,
            "FashionMNIST",
            "FashionMNIST",
            lambda: _find(root, _FILES["val_labels"]) is not None,
            "Install Debian's package dataset-fashion-mnist on every node, or set "
            "task.data.args.root to a directory with its IDX files",
        )
        paths = {name: _find(root, file) for name, file in _FILES.items()}
    found = {name: path for name, path in paths.items() if path is not None}
    if len(found) < len(_FILES):
        raise DataMissing(
            f"data set fashion_mnist: {root} lacks {sorted(_FILES.keys() - found.keys())}"
        )
    arrays = _decode_fashion(found)
    train_pixels = Pixels(_FASHION_PIXELS.scale, _FASHION_PIXELS.offset, flips=args.augment)
    return _in_memory(arrays, _FASHION_PIXELS, train_pixels)


def _find(root: Path, name: str) -> Path | None:
    """Return an IDX file, plain or compressed, in the directory itself or in torchvision's."""
    candidates = [root / name, root / f"{name}.gz", root / "FashionMNIST" / "raw" / name]
    return next((path for path in candidates if path.is_file()), None)


def _decode_fashion(paths: dict[str, Path]) -> Arrays:
    arrays: Arrays = {}
    hashed = hashlib.sha256()
    for name, path in paths.items():
        array = read_idx(path)
        hashed.update(array.tobytes())
        arrays[name] = array[:, None] if name.endswith("images") else array.astype(np.int64)
    arrays["digest"] = np.frombuffer(hashed.hexdigest().encode(), dtype=np.uint8)
    return arrays


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Return an array in LeCun's IDX format: two zero bytes, the type (8: unsigned byte), the
    number of dimensions, their sizes."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataMissing(
            f"data set fashion_mnist: {path} is not an IDX file of bytes; remove it and get it "
            "again"
        )
    num_dims = data[3]
    shape = tuple(
        int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(num_dims)
    )
    if len(data) != 4 + 4 * num_dims + int(np.prod(shape)):
        raise DataMissing(
            f"data set fashion_mnist: {path} is truncated; remove it and get it again"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * num_dims).reshape(shape)
