"""Data sets and loaders: the same pixels for the same key, and a clear word
where data is missing."""

from __future__ import annotations

import gzip
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from everstep.spec.run_spec import RunSpec
from everstep.spec.tasks import Cifar10Args, DigitsArgs, FashionMnistArgs, ImageFolderArgs
from tests.support.raw_specs import TASK
from train_fn.data.image_sets import (
    load_cifar10,
    load_digits,
    load_fashion_mnist,
    read_idx,
    stratified_holdout,
)
from train_fn.data.images import load_image_folder
from train_fn.errors import DataMissing
from train_fn.samples.loader import KeyedDataset, Loader, num_loader_workers
from train_fn.samples.sampler import MicroBatch

pytestmark = pytest.mark.own_process

CPU = torch.device("cpu")


def make_spec(num_workers: int | str = "auto", cpus: float = 1) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "data",
            "task": TASK,
            "train": {"loader": {"num_workers": num_workers}},
            "scaling": {"resources_per_worker": {"CPU": cpus}},
        }
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


# ---------------------------------------------------------------- digits


def test_digits_are_those_of_scikit_learn_and_the_split_is_fixed() -> None:
    from sklearn.datasets import load_digits as reference

    digits = reference()
    data = load_digits(DigitsArgs(augment=False))
    assert data.val is not None
    assert (len(data.train), len(data.val)) == (1437, 360)
    held_out = stratified_holdout(digits.target, 0.2)
    images, labels = data.val.fetch(0, None, np.arange(360))  # type: ignore[attr-defined]
    assert np.array_equal(labels.numpy(), digits.target[held_out])
    restored = (images[:, 0].numpy() * 0.376 + 0.305) * 16
    assert np.allclose(restored, digits.images[held_out], atol=1e-4)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.2, 0.5, 0.99])
def test_every_class_gives_its_share_to_validation(fraction: float) -> None:
    labels = np.repeat(np.arange(10), np.arange(10, 110, 10))
    held_out = stratified_holdout(labels, fraction)
    assert len(set(held_out.tolist())) == len(held_out) == int(np.ceil(fraction * 550))
    shares = np.bincount(labels[held_out], minlength=10) - fraction * np.arange(10, 110, 10)
    assert np.abs(shares).max() <= 1


def test_without_validation_all_digits_train() -> None:
    data = load_digits(DigitsArgs(val_fraction=0))
    assert (len(data.train), data.val) == (1797, None)


# ---------------------------------------------------------------- files of other data sets


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    path.write_bytes(
        gzip.compress(header + array.tobytes())
        if path.suffix == ".gz"
        else header + array.tobytes()
    )


def write_fashion(root: Path) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte.gz": generator.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte.gz": generator.integers(0, 10, 20, dtype=np.uint8),
        "t10k-images-idx3-ubyte": generator.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": generator.integers(0, 10, 10, dtype=np.uint8),
    }
    root.mkdir()
    for name, array in arrays.items():
        write_idx(root / name, array)
    return arrays


def test_fashion_mnist_reads_plain_and_compressed_files(tmp_path: Path) -> None:
    arrays = write_fashion(tmp_path / "fashion")
    data = load_fashion_mnist(FashionMnistArgs(root=str(tmp_path / "fashion"), augment=False))
    images, labels = data.train.fetch(0, 0, np.array([3, 1]))  # type: ignore[attr-defined]
    restored = (images[:, 0].numpy() * 0.353 + 0.286) * 255
    assert np.allclose(restored, arrays["train-images-idx3-ubyte.gz"][[3, 1]], atol=1e-3)
    assert labels.tolist() == arrays["train-labels-idx1-ubyte.gz"][[3, 1]].tolist()
    assert data.val is not None
    assert len(data.val) == 10


def test_changed_files_have_another_fingerprint(tmp_path: Path) -> None:
    arrays = write_fashion(tmp_path / "fashion")
    args = FashionMnistArgs(root=str(tmp_path / "fashion"))
    first = load_fashion_mnist(args).train.fingerprint
    assert load_fashion_mnist(args).train.fingerprint == first
    path = tmp_path / "fashion" / "train-labels-idx1-ubyte.gz"
    write_idx(path, 9 - arrays[path.name])
    assert load_fashion_mnist(args).train.fingerprint != first


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "images"
    write_idx(path, np.zeros((4, 2, 2), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataMissing, match=r"images is truncated; remove it"):
        read_idx(path)


def test_cifar10_reads_its_authors_batches(tmp_path: Path) -> None:
    directory = tmp_path / "cifar" / "cifar-10-batches-py"
    directory.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        batch = {
            b"data": generator.integers(0, 256, (4, 3072), dtype=np.uint8),
            b"labels": [number] * 4,
        }
        (directory / name).write_bytes(pickle.dumps(batch))
    data = load_cifar10(Cifar10Args(root=str(tmp_path / "cifar")))
    images, labels = data.train.fetch(0, 0, np.array([0, 19]))  # type: ignore[attr-defined]
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [0, 4]


@pytest.mark.parametrize("load", ["image_folder", "fashion_mnist", "cifar10"])
def test_data_that_is_not_there_says_what_to_do(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    root = str(tmp_path / "nowhere")
    with pytest.raises(DataMissing, match=rf"{load}.*nowhere.*task\.data\.args\.root"):
        match load:
            case "image_folder":
                load_image_folder(ImageFolderArgs(root=root))
            case "fashion_mnist":
                load_fashion_mnist(FashionMnistArgs(root=root))
            case _:
                load_cifar10(Cifar10Args(root=root))


# ---------------------------------------------------------------- loader


class Noisy(Dataset[float]):
    """Draws from all three global generators, as users' transforms do."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        return index + random.random() + float(np.random.random()) + float(torch.rand(()))


def test_users_transforms_depend_on_the_sample_alone() -> None:
    keyed = KeyedDataset(Noisy(), 0, default_collate, training=True)
    both = keyed.__getitems__(MicroBatch(1, 0, np.array([5, 6])))
    alone = keyed.__getitems__(MicroBatch(1, 7, np.array([6])))
    assert both.batch[1] == alone.batch[0]
    assert keyed.__getitems__(MicroBatch(2, 0, np.array([6]))).batch[0] != alone.batch[0]


class Failing(Noisy):
    def __getitem__(self, index: int) -> float:
        raise LookupError(f"sample {index} is broken")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_raises_is_heard(num_workers: int) -> None:
    keyed = KeyedDataset(Failing(), 0, default_collate, training=True)
    loader = Loader(keyed, [MicroBatch(0, 0, np.array([17]))], make_spec(num_workers), 1, CPU)
    with pytest.raises(LookupError, match="sample 17 is broken"):
        next(loader)
    loader.close()


def test_loader_processes_follow_the_spec_and_the_cores() -> None:
    in_memory = load_digits(DigitsArgs()).train
    assert num_loader_workers(make_spec(), in_memory, 1) == 0
    assert num_loader_workers(make_spec(3), in_memory, 1) == 3
    assert num_loader_workers(make_spec(cpus=1), Noisy(), 1) == 1
    assert num_loader_workers(make_spec(cpus=64), Noisy(), 1) == min(
        64, len(os.sched_getaffinity(0)), 16
    )
