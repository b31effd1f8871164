"""Fashion-MNIST (Xiao et al., 2017) from IDX files, as Debian's package has them or torchvision
downloads them."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everstep.spec.image_task import FashionMnistArgs
from train_fn.data.cache import Arrays, decoded_once
from train_fn.data.images import ImageData, InMemoryImages, Pixels
from train_fn.errors import DataMissing
from train_fn.node.node_dir import cache_root, node_lock
from train_fn.user_code.torchvision_ops import torchvision_datasets

_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "val_images": "t10k-images-idx3-ubyte",
    "val_labels": "t10k-labels-idx1-ubyte",
}
_PIXELS = Pixels(scale=1 / 255 / 0.353, offset=0.286 / 0.353)
"""Mean 0.286 and standard deviation 0.353 over the training images."""


def load_fashion_mnist(args: FashionMnistArgs) -> ImageData:
    """Return training and validation images. Raises DataMissing if the files are not here and
    cannot be downloaded."""
    root = Path(args.root).expanduser()
    paths = {name: _find(root, file) for name, file in _FILES.items()}
    if None in paths.values():
        _download(root)
        paths = {name: _find(root, file) for name, file in _FILES.items()}
    found = {name: path for name, path in paths.items() if path is not None}
    if len(found) < len(_FILES):
        raise DataMissing(
            f"data set fashion_mnist: {root} lacks {sorted(_FILES.keys() - found.keys())}"
        )
    arrays = decoded_once("fashion_mnist", found.values(), lambda: _decode(found))
    digest = bytes(arrays["digest"].tobytes()).decode()
    train_pixels = Pixels(_PIXELS.scale, _PIXELS.offset, flips=args.augment)
    return ImageData(
        train=InMemoryImages(arrays["train_images"], arrays["train_labels"], train_pixels, digest),  # type: ignore[arg-type]
        val=InMemoryImages(arrays["val_images"], arrays["val_labels"], _PIXELS, digest),  # type: ignore[arg-type]
        num_classes=10,
        channels=1,
        image_size=28,
    )


def _find(root: Path, name: str) -> Path | None:
    """Return an IDX file, plain or compressed, in the directory itself or in torchvision's."""
    candidates = [root / name, root / f"{name}.gz", root / "FashionMNIST" / "raw" / name]
    return next((path for path in candidates if path.is_file()), None)


def _decode(paths: dict[str, Path]) -> Arrays:
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


def _download(root: Path) -> None:
    """Download the data once per node, by torchvision. Raises DataMissing with what to do if there
    is no network or no permission."""
    with node_lock(cache_root() / "data" / "fashion_mnist.download.lock"):
        if _find(root, _FILES["val_labels"]) is not None:
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            torchvision_datasets().FashionMNIST(str(root), download=True)
        except (OSError, RuntimeError) as exc:
            shutil.rmtree(root / "FashionMNIST", ignore_errors=True)
            raise DataMissing(
                f"data set fashion_mnist is not in {root} on this node, and cannot be downloaded "
                f"there ({exc}). Install Debian's "
                "package dataset-fashion-mnist on every node, or set task.data.args.root to a "
                "directory with its IDX files"
            ) from exc
