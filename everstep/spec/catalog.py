"""What a spec may name: models, data sets, tasks, optimizers and schedules, each with its typed
arguments.

Plain pydantic, so that the service and the client can validate a spec without importing torch;
``train_fn`` builds what is named here, and a unit test holds the two together. Every union is
discriminated by ``name``.
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
    """What a spec writes in ``name``."""
    description: str
    """One sentence."""
    args_schema: dict[str, Any]
    """JSON schema of its arguments."""
    task: str | None = None
    """Of a model or a data set: the task that takes it."""


class Catalog(Frozen):
    """Answer of ``GET /v1/catalog``."""

    tasks: tuple[CatalogEntry, ...]
    models: tuple[CatalogEntry, ...]
    data: tuple[CatalogEntry, ...]
    optimizers: tuple[CatalogEntry, ...]
    schedules: tuple[CatalogEntry, ...]


def _entry(
    spec: type[BaseModel], name: str | None = None, *, task: str | None = None
) -> CatalogEntry:
    """One entry; what belongs to a task keeps its arguments below ``args``, the others beside
    ``name``."""
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
    """Everything that a spec may name, in the order in which a reader looks for it."""
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
