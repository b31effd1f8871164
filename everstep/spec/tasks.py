"""The built-in tasks' part of a spec, and the catalog of tasks, models and data sets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.spec.sections import (
    AdamSpec,
    AdamWSpec,
    ConstantScheduleSpec,
    CosineScheduleSpec,
    Fraction,
    Frozen,
    LinearScheduleSpec,
    NodePath,
    PositiveInt,
    SgdSpec,
    StepScheduleSpec,
)

TORCHVISION_MODELS: tuple[str, ...] = (
    "alexnet", "convnext_base", "convnext_large", "convnext_small", "convnext_tiny", "densenet121",
    "densenet161", "densenet169", "densenet201", "efficientnet_b0", "efficientnet_b1",
    "efficientnet_b2", "efficientnet_b3", "efficientnet_b4", "efficientnet_b5", "efficientnet_b6",
    "efficientnet_b7", "efficientnet_v2_l", "efficientnet_v2_m", "efficientnet_v2_s", "googlenet",
    "inception_v3", "maxvit_t", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3",
    "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_16gf", "regnet_x_1_6gf",
    "regnet_x_32gf", "regnet_x_3_2gf", "regnet_x_400mf", "regnet_x_800mf", "regnet_x_8gf",
    "regnet_y_128gf", "regnet_y_16gf", "regnet_y_1_6gf", "regnet_y_32gf", "regnet_y_3_2gf",
    "regnet_y_400mf", "regnet_y_800mf", "regnet_y_8gf", "resnet101", "resnet152", "resnet18",
    "resnet34", "resnet50", "resnext101_32x8d", "resnext101_64x4d", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0",
    "squeezenet1_0", "squeezenet1_1", "swin_b", "swin_s", "swin_t", "swin_v2_b", "swin_v2_s",
    "swin_v2_t", "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn",
    "vit_b_16", "vit_b_32", "vit_h_14", "vit_l_16", "vit_l_32", "wide_resnet101_2",
    "wide_resnet50_2",
)  # fmt: skip


class MiniResNetArgs(Frozen):
    width: PositiveInt = 16
    """Channels of the first stage; each later stage doubles them."""
    blocks_per_stage: PositiveInt = 2
    """Residual blocks in each stage."""
    num_stages: Annotated[int, Field(ge=1, le=4)] = 3
    """Stages; each after the first halves height and width."""
    norm: Literal["group", "batch", "sync_batch"] = "group"
    """Normalisation. ``group`` gives the same result at any world size; ``batch`` and
    ``sync_batch`` keep running statistics."""
    dropout: Fraction = 0.0
    """Dropout probability before the classifier."""


class MiniResNetSpec(Frozen):
    """Small residual network for images of any size, with widening channels."""

    name: Literal["mini_resnet"]
    args: MiniResNetArgs = MiniResNetArgs()


class TorchvisionModelArgs(Frozen):
    weights_path: Annotated[str | None, NodePath()] = None
    """Path on every node of a ``state_dict`` to start from, saved by torch.save in the format of
    torchvision's own files. A classifier for another number of classes keeps its random weights.
    Null starts from random weights."""
    image_size: PositiveInt | None = None
    """Height and width in pixels to which images are resized; null keeps the size of the data
    set."""


class TorchvisionModelSpec(Frozen):
    """Any classifier of torchvision.models, by name."""

    name: Literal[TORCHVISION_MODELS]  # type: ignore[valid-type]
    args: TorchvisionModelArgs = TorchvisionModelArgs()


def _model_tag(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if name == "mini_resnet":
        return "mini_resnet"
    return "torchvision" if name in TORCHVISION_MODELS else None


ImageModelSpec = Annotated[
    Annotated[MiniResNetSpec, Tag("mini_resnet")]
    | Annotated[TorchvisionModelSpec, Tag("torchvision")],
    Discriminator(
        _model_tag,
        custom_error_type="unknown_model",
        custom_error_message=(
            "is not a known model; GET /v1/catalog lists them: mini_resnet and "
            "torchvision's classifiers"
        ),
    ),
]


class DigitsArgs(Frozen):
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the 1,797 images held out for validation: 0.2 trains on 1,437 images; 0 trains on
    all and does not evaluate. The split is fixed and stratified."""
    augment: bool = True
    """Random shifts of up to one pixel, keyed by (seed, epoch, sample index)."""


class DigitsSpec(Frozen):
    """scikit-learn's 1,797 grey 8x8 digits. They are part of the package, without a download."""

    name: Literal["digits"]
    args: DigitsArgs = DigitsArgs()


class FashionMnistArgs(Frozen):
    root: Annotated[str, NodePath()] = "/usr/share/datasets/fashion-mnist"
    """Directory with the IDX files (plain or .gz). If they are missing, each node downloads them
    there once, if it has network access."""
    augment: bool = True
    """Random horizontal flips, keyed by (seed, epoch, sample index)."""


class FashionMnistSpec(Frozen):
    """Fashion-MNIST: 60,000 training and 10,000 validation grey 28x28 images of ten kinds of
    clothing."""

    name: Literal["fashion_mnist"]
    args: FashionMnistArgs = FashionMnistArgs()


class Cifar10Args(Frozen):
    root: Annotated[str, NodePath()] = "~/.cache/everstep/cifar10"
    """Directory with ``cifar-10-batches-py``. If it is missing, each node downloads it there once,
    if it has network access."""
    augment: bool = True
    """Random flips and shifts of up to four pixels, keyed by (seed, epoch, sample index)."""


class Cifar10Spec(Frozen):
    """CIFAR-10: 50,000 training and 10,000 validation colour 32x32 images of ten classes."""

    name: Literal["cifar10"]
    args: Cifar10Args = Cifar10Args()


class ImageFolderArgs(Frozen):
    root: Annotated[str, NodePath()]
    """Directory on every node with ``train/CLASS/*.jpg`` and, for validation,
    ``val/CLASS/*.jpg``."""
    image_size: PositiveInt = 224
    """Height and width in pixels after cropping."""
    augment: bool = True
    """Random resized crops and flips, keyed by (seed, epoch, sample index). Validation uses the
    centre crop."""


class ImageFolderSpec(Frozen):
    """Images in one directory per class, decoded by the loader's workers."""

    name: Literal["image_folder"]
    args: ImageFolderArgs


ImageDataSpec = Annotated[
    DigitsSpec | FashionMnistSpec | Cifar10Spec | ImageFolderSpec, Field(discriminator="name")
]


class ImageClassificationSpec(Frozen):
    """Cross-entropy classification of images; reports ``accuracy`` and ``loss`` on the validation
    set."""

    name: Literal["image_classification"]
    model: ImageModelSpec
    data: ImageDataSpec
    label_smoothing: Fraction = 0.0
    """Share of the target that is spread evenly over all classes."""


# ---------------------------------------------------------------- text task

# Language modelling: its model, data and their arguments.


class GptArgs(Frozen):
    num_layers: Annotated[int, Field(ge=1, le=256)] = 4
    """Transformer blocks."""
    num_heads: Annotated[int, Field(ge=1, le=256)] = 4
    """Attention heads of each block."""
    width: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Width of a token's features; must be a multiple of ``num_heads``."""
    context_length: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    """Context length in tokens. The text is packed into sequences of this length, which are the
    samples."""
    dropout: Fraction = 0.0
    """Dropout probability of embeddings, attention and residual branches."""

    @field_validator("width")
    @classmethod
    def _heads_share_the_width(cls, value: int, info: ValidationInfo) -> int:
        num_heads = info.data.get("num_heads")
        if num_heads is not None and value % num_heads:
            raise PydanticCustomError(
                "width_not_divisible",
                "width {width} is not a multiple of num_heads {num_heads}; change one of them",
                {"width": value, "num_heads": num_heads},
            )
        return value


class GptSpec(Frozen):
    """A small GPT: pre-normalised transformer blocks with causal attention, learned positions, tied
    embeddings."""

    name: Literal["gpt"]
    args: GptArgs = GptArgs()


class TextFilesArgs(Frozen):
    path: Annotated[str, Field(min_length=1), NodePath()]
    """A text file, or a directory of them, on every node."""
    pattern: Annotated[str, Field(min_length=1)] = "*.txt"
    """Shell pattern of the files to read below a directory, at any depth; ``*`` reads all."""
    level: Literal["byte", "char"] = "byte"
    """Tokens: ``byte`` works with any file; ``char`` uses the characters that occur in the UTF-8
    text."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the tokens, from the end, held out for validation; 0 does not evaluate."""


class TextFilesSpec(Frozen):
    """Text files, concatenated in the order of their paths with an end-of-text token after each,
    and packed into whole sequences."""

    name: Literal["text_files"]
    args: TextFilesArgs


class LanguageModelingSpec(Frozen):
    """Next-token prediction; reports ``loss`` in nats per token, ``accuracy`` and
    ``bits_per_token`` on the held-out text."""

    name: Literal["language_modeling"]
    model: GptSpec
    data: TextFilesSpec


# ---------------------------------------------------------------- catalog

# Catalog of what a spec can name: tasks, models, data sets, optimizers and schedules, with their
# arguments.
#
# The models are plain pydantic, so that service and client can validate a spec without torch.
# ``train_fn`` builds what they name; a unit test compares the two. Every union is discriminated by
# ``name``.

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
