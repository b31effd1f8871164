"""scikit-learn's 1,797 grey 8x8 digits, read from its package without importing it, which would
cost seconds a rank."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everstep.spec.image_task import DigitsArgs
from train_fn.data.images import ImageData, InMemoryImages, Pixels
from train_fn.errors import DataMissing

_PIXELS = Pixels(scale=1 / 16 / 0.376, offset=0.305 / 0.376)
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
    train_pixels = Pixels(_PIXELS.scale, _PIXELS.offset, shift_pixels=1 if args.augment else 0)
    return ImageData(
        train=InMemoryImages(
            images[kept], labels[kept], train_pixels, f"digits/{len(kept)}/{fingerprint}"
        ),
        val=InMemoryImages(images[held_out], labels[held_out], _PIXELS, fingerprint)
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
