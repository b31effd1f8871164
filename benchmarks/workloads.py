"""The trainings that are measured, as specs, and the model and images that every side shares."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import TensorDataset

from everstep.spec import parse_spec
from train_fn.data.image_sets import build_image_data
from train_fn.data.images import InMemoryImages
from train_fn.models.image_models import build_image_model


def _workload(data: str) -> dict[str, Any]:
    """MiniResNet on one data set, two ranks of 64 samples, without augmentation, which the plain scripts do not have."""
    return {
        "name": f"bench-{data.replace('_', '-')}",
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet"},
            "data": {"name": data, "args": {"augment": False}},
        },
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "train": {"epochs": 1000, "global_batch_size": 128, "micro_batch_size": 64, "eval_every_epochs": 1000},
        "scaling": {"min_workers": 2, "max_workers": 2},
        "checkpoint": {"every_steps": 50},
    }


WORKLOADS = {data: _workload(data) for data in ("digits", "fashion_mnist")}


def build_model(workload: dict[str, Any]) -> nn.Module:
    spec = parse_spec(workload)
    data = build_image_data(spec.task.data)
    return build_image_model(spec.task.model, in_channels=data.channels, num_classes=data.num_classes, image_size=data.image_size)


def build_train_set(workload: dict[str, Any]) -> TensorDataset:
    """The training images as two tensors, normalised, as a tutorial would hold them: float32 [n, c, h, w] and int64 [n]."""
    train = build_image_data(parse_spec(workload).task.data).train
    assert isinstance(train, InMemoryImages)
    return TensorDataset(*train.fetch(0, None, np.arange(len(train))))
