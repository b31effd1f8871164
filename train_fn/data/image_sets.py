"""Image data sets by name."""

from __future__ import annotations

from everstep.spec.image_task import (
    Cifar10Spec,
    DigitsSpec,
    FashionMnistSpec,
    ImageDataSpec,
    ImageFolderSpec,
)
from train_fn.data.cifar10 import load_cifar10
from train_fn.data.digits import load_digits
from train_fn.data.fashion_mnist import load_fashion_mnist
from train_fn.data.image_folder import load_image_folder
from train_fn.data.images import ImageData


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
