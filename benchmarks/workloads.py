"""The trainings that are measured, as specs, and the model and samples that every side shares."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import TensorDataset

from everstep.spec.parsing import parse_spec
from everstep.spec.tasks import ImageClassificationSpec, LanguageModelingSpec
from train_fn.data.image_sets import build_image_data
from train_fn.data.images import InMemoryImages
from train_fn.data.text_files import load_text_files
from train_fn.models import Gpt, build_image_model


def _workload(data: str) -> dict[str, Any]:
    """MiniResNet on one data set, two ranks of 64 samples, without augmentation, which the plain
    scripts do not have."""
    return {
        "name": f"bench-{data.replace('_', '-')}",
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet"},
            "data": {"name": data, "args": {"augment": False}},
        },
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "train": {
            "epochs": 1000,
            "global_batch_size": 128,
            "micro_batch_size": 64,
            "eval_every_epochs": 1000,
        },
        "scaling": {"min_workers": 2, "max_workers": 2},
        "checkpoint": {"every_steps": 50},
    }


def _gpt() -> dict[str, Any]:
    """The small GPT, byte by byte over text that every Debian has, two ranks of 8 sequences of 128
    tokens."""
    return {
        "name": "bench-gpt",
        "task": {
            "name": "language_modeling",
            "model": {
                "name": "gpt",
                "args": {"num_layers": 4, "num_heads": 4, "width": 128, "context_length": 128},
            },
            "data": {
                "name": "text_files",
                "args": {"path": "/usr/share/common-licenses", "pattern": "*", "val_fraction": 0.0},
            },
        },
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "train": {
            "epochs": 1000,
            "global_batch_size": 16,
            "micro_batch_size": 8,
            "eval_every_epochs": 1000,
        },
        "scaling": {"min_workers": 2, "max_workers": 2},
        "checkpoint": {"every_steps": 50},
    }


WORKLOADS = {**{data: _workload(data) for data in ("digits", "fashion_mnist")}, "gpt": _gpt()}


def build_model(workload: dict[str, Any]) -> nn.Module:
    """The model itself, in the layout that torch gives it: what the loop does beyond that is its
    own."""
    task = parse_spec(workload).task
    if isinstance(task, LanguageModelingSpec):
        return Gpt(
            task.model.args,
            load_text_files(task.data.args, task.model.args.context_length).vocabulary,
        )
    assert isinstance(task, ImageClassificationSpec)
    data = build_image_data(task.data)
    return build_image_model(
        task.model,
        in_channels=data.channels,
        num_classes=data.num_classes,
        image_size=data.image_size,
    )


def build_train_set(workload: dict[str, Any]) -> TensorDataset:
    """Inputs and targets as two tensors, as a tutorial would hold them.

    Normalised float32 images [n, c, h, w] and int64 labels [n]; or int64 tokens [n, length] and
    those that follow [n, length].
    """
    task = parse_spec(workload).task
    if isinstance(task, LanguageModelingSpec):
        text = load_text_files(task.data.args, task.model.args.context_length).train
        sequences = text.fetch(0, None, np.arange(len(text)))
        return TensorDataset(sequences[:, :-1], sequences[:, 1:])
    assert isinstance(task, ImageClassificationSpec)
    train = build_image_data(task.data).train
    assert isinstance(train, InMemoryImages)
    return TensorDataset(*train.fetch(0, None, np.arange(len(train))))
