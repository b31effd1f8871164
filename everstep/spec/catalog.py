"""Catalog of what a spec can name: tasks, models, data sets, optimizers and schedules, with their
arguments.

The models are plain pydantic, so that service and client can validate a spec without torch.
``train_fn`` builds what they name; a unit test compares the two. Every union is discriminated by
``name``.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from everstep.spec.field_types import Frozen
from everstep.spec.image_task import (
    TORCHVISION_MODELS,
    Cifar10Spec,
    DigitsSpec,
    FashionMnistSpec,
    ImageClassificationSpec,
    ImageFolderSpec,
    MiniResNetSpec,
    TorchvisionModelSpec,
)
from everstep.spec.optimization import (
    AdamSpec,
    AdamWSpec,
    ConstantScheduleSpec,
    CosineScheduleSpec,
    LinearScheduleSpec,
    SgdSpec,
    StepScheduleSpec,
)
from everstep.spec.text_task import GptSpec, LanguageModelingSpec, TextFilesSpec

TaskSpec = Annotated[ImageClassificationSpec | LanguageModelingSpec, Field(discriminator="name")]


class CatalogEntry(Frozen):
    name: str
    """Value of ``name`` in a spec."""
    description: str
    """One sentence."""
    args_schema: dict[str, Any]
    """JSON schema of the arguments."""
    task: str | None = None
    """For a model or a data set: the task that it belongs to."""


class Catalog(Frozen):
    """Response of ``GET /v1/catalog``."""

    tasks: tuple[CatalogEntry, ...]
    models: tuple[CatalogEntry, ...]
    data: tuple[CatalogEntry, ...]
    optimizers: tuple[CatalogEntry, ...]
    schedules: tuple[CatalogEntry, ...]


def _entry(
    spec: type[BaseModel], name: str | None = None, *, task: str | None = None
) -> CatalogEntry:
    """Return one entry. Models and data sets of a task have their arguments below ``args``, the
    others beside ``name``."""
    arguments: Any = spec.model_fields["args"].annotation if task else spec
    assert isinstance(arguments, type) and issubclass(arguments, BaseModel)
    schema = arguments.model_json_schema()
    schema.get("properties", {}).pop("name", None)
    schema["required"] = [field for field in schema.get("required", []) if field != "name"]
    literal: Any = spec.model_fields["name"].annotation
    return CatalogEntry(
        name=name or literal.__args__[0],
        description=" ".join((spec.__doc__ or "").split()),
        args_schema=schema,
        task=task,
    )


def catalog() -> Catalog:
    """Return everything that a spec can name."""
    images, text = "image_classification", "language_modeling"
    return Catalog(
        tasks=(_entry(ImageClassificationSpec), _entry(LanguageModelingSpec)),
        models=(
            _entry(MiniResNetSpec, task=images),
            _entry(GptSpec, task=text),
            *(_entry(TorchvisionModelSpec, name, task=images) for name in TORCHVISION_MODELS),
        ),
        data=(
            *(
                _entry(spec, task=images)
                for spec in (DigitsSpec, FashionMnistSpec, Cifar10Spec, ImageFolderSpec)
            ),
            _entry(TextFilesSpec, task=text),
        ),
        optimizers=tuple(_entry(spec) for spec in (AdamWSpec, AdamSpec, SgdSpec)),
        schedules=tuple(
            _entry(spec)
            for spec in (
                ConstantScheduleSpec,
                CosineScheduleSpec,
                LinearScheduleSpec,
                StepScheduleSpec,
            )
        ),
    )
