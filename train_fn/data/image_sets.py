"""Image data sets by name."""

from __future__ import annotations

from everstep.catalog import DigitsSpec, ImageDataSpec
from train_fn.data.digits import load_digits
from train_fn.data.images import ImageData


def build_image_data(spec: ImageDataSpec) -> ImageData:
    """The data set that ``spec`` names; raises DataMissing, saying what to do, when it is not on this node."""
    match spec:
        case DigitsSpec():
            return load_digits(spec.args)
    raise NotImplementedError(spec.name)
