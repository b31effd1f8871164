"""One directory a class: found, decoded into bytes, cropped by the sample's own key,
normalised on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from everstep.spec.tasks import ImageClassificationSpec, ImageFolderArgs
from train_fn.data.images import index_images, load_image_folder
from train_fn.errors import DataMissing
from train_fn.tasks.builtin import ImageClassification


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes; the images of a class have its colour."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("ant", "bée", "cat")):
            directory = tmp_path / "images" / split / name
            directory.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 40, (60, 80, 3), dtype=np.uint8)
                pixels[..., label] += 200
                Image.fromarray(pixels).save(
                    directory / f"{number}.{'png' if number % 2 else 'jpg'}"
                )
    return tmp_path / "images"


def test_images_come_as_bytes_and_the_task_normalises_them(root: Path) -> None:
    spec = {
        "name": "image_classification",
        "model": {"name": "mini_resnet", "args": {"width": 8, "blocks_per_stage": 1}},
        "data": {"name": "image_folder", "args": {"root": str(root), "image_size": 16}},
    }
    task = ImageClassification(ImageClassificationSpec.model_validate(spec))
    images, labels = batch = task.data.train.fetch(0, 0, np.array([0, 5, 11]))  # type: ignore[attr-defined]
    assert (images.dtype, images.shape, labels.tolist()) == (torch.uint8, (3, 3, 16, 16), [0, 1, 2])
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.float().mean(dim=(2, 3)).argmax(dim=1).tolist() == [0, 1, 2]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (images.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(task._prepare(images), expected)
    loss_sum, weight = task.loss(task.build_model(), batch)
    assert loss_sum.isfinite()
    assert weight == 3


def test_crops_depend_on_seed_epoch_and_sample_alone(root: Path) -> None:
    train = load_image_folder(ImageFolderArgs(root=str(root), image_size=16)).train
    both, _ = train.fetch(3, 1, np.array([2, 7]))  # type: ignore[attr-defined]
    alone, _ = train.fetch(3, 1, np.array([7]))  # type: ignore[attr-defined]
    assert torch.equal(both[1], alone[0])
    for seed, epoch in ((3, 2), (4, 1)):
        assert not torch.equal(train.fetch(seed, epoch, np.array([7]))[0], alone)  # type: ignore[attr-defined]


def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same(tmp_path: Path) -> None:
    gradient = np.linspace(0, 255, 640 * 480).reshape(480, 640)
    image = Image.fromarray(
        np.stack([gradient, gradient.T.reshape(480, 640), gradient[::-1]], -1).astype(np.uint8)
    )
    for name in ("train", "val"):
        (tmp_path / "big" / name / "one").mkdir(parents=True)
        image.save(
            tmp_path / "big" / name / "one" / f"a.{'jpg' if name == 'train' else 'png'}", quality=95
        )
    data = load_image_folder(
        ImageFolderArgs(root=str(tmp_path / "big"), image_size=32, augment=False)
    )
    assert data.val is not None
    jpeg, png = (part.fetch(0, None, np.array([0]))[0].float() for part in (data.train, data.val))  # type: ignore[attr-defined]
    assert (jpeg - png)[:, (0, 2)].abs().mean() < 6


def test_a_broken_file_is_named(root: Path) -> None:
    path = root / "train" / "ant" / "0.jpg"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataMissing, match=r"ant/0\.jpg cannot be decoded"):
        load_image_folder(ImageFolderArgs(root=str(root))).train.fetch(0, 0, np.array([0]))  # type: ignore[attr-defined]


def test_the_index_has_each_image_by_class_and_path_and_changes_with_them(root: Path) -> None:
    classes = ["ant", "bée", "cat"]
    first = index_images(root / "train", classes)
    assert [first.path(index).name for index in range(4)] == ["0.jpg", "1.png", "2.jpg", "3.png"]
    assert first.path(4) == root / "train" / "bée" / "0.jpg"
    assert first.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert index_images(root / "train", classes).fingerprint == first.fingerprint
    (root / "train" / "cat" / "new").mkdir()
    (root / "train" / "cat" / "0.jpg").rename(root / "train" / "cat" / "new" / "0.jpg")
    changed = index_images(root / "train", classes)
    assert changed.fingerprint != first.fingerprint
    assert [
        changed.path(index).relative_to(root / "train" / "cat").as_posix() for index in (8, 11)
    ] == ["1.png", "new/0.jpg"]
