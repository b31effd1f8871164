"""Models: what the catalog names is what can be built, and what a model saves loads without
Everstep."""

from __future__ import annotations

import pytest
import torch

from everstep.spec.tasks import TORCHVISION_MODELS, ImageClassificationSpec, MiniResNetArgs
from train_fn.models import MiniResNet
from train_fn.tasks.builtin import ImageClassification
from train_fn.user_code.modules import torchvision_models

pytestmark = pytest.mark.own_process


def make_task(model: dict[str, object], data: str = "digits") -> ImageClassification:
    spec = {"name": "image_classification", "model": model, "data": {"name": data}}
    return ImageClassification(ImageClassificationSpec.model_validate(spec))


def test_the_catalog_names_every_classifier_of_torchvision() -> None:
    models = torchvision_models()
    assert sorted(TORCHVISION_MODELS) == sorted(models.list_models(module=models))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_a_torchvision_model_trains_on_grey_digits(name: str) -> None:
    task = make_task({"name": name, "args": {"image_size": 32}})
    batch = task.data.train.fetch(0, 0, torch.arange(8).numpy())  # type: ignore[attr-defined]
    loss_sum, weight = task.loss(task.build_model(), batch)
    loss_sum.backward()
    assert weight == 8
    assert loss_sum.isfinite()


def test_a_model_with_auxiliary_heads_answers_with_logits_alone() -> None:
    model = make_task({"name": "googlenet"}).build_model().train()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)


@pytest.mark.parametrize("image_size", [8, 28, 64])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_mini_resnet_takes_images_of_any_size(image_size: int, norm: str) -> None:
    model = MiniResNet(MiniResNetArgs.model_validate({"norm": norm, "width": 8}), 3, 7, image_size)
    assert model(torch.randn(2, 3, image_size, image_size)).shape == (2, 7)


def test_label_smoothing_is_for_training_only() -> None:
    task = make_task({"name": "mini_resnet"})
    smoothed = ImageClassification(task.spec.model_copy(update={"label_smoothing": 0.5}))
    model = task.build_model()
    batch = task.data.train.fetch(0, None, torch.arange(16).numpy())  # type: ignore[attr-defined]
    assert task.loss(model, batch)[0] != smoothed.loss(model, batch)[0]
    assert (
        task.metrics(model, batch)["loss"][0]
        == smoothed.metrics(model, batch)["loss"][0]
        == task.loss(model, batch)[0]
    )
