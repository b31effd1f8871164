"""What a spec may name: models, data sets, tasks, optimizers and schedules, each with its typed
arguments.

Plain pydantic, so that the service and the client can validate a spec without importing torch;
``train_fn`` builds what is named here, and a unit test holds the two together. Every union is
discriminated by ``name``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveFloat,
    Tag,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

MAX_INT = 2**31 - 1
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
NonNegativeFiniteFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFiniteFloat = Annotated[PositiveFloat, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class NodePath:
    """Marks a field that names a file or directory on the nodes: the operator may say below which
    ones it has to lie."""


class Frozen(BaseModel):
    """Base of what a request says: immutable, unknown fields refused, no silent type coercion from
    strings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )


# ---------------------------------------------------------------- models

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
    """Path, on every node, of a ``state_dict`` saved by torch.save to start from, as torchvision's
    own files hold it; a classifier for another number of classes stays random. None starts from
    random weights."""
    image_size: PositiveInt | None = None
    """Images are resized to this height and width in pixels; None keeps the data set's own size."""


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

# ---------------------------------------------------------------- data sets


class DigitsArgs(Frozen):
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the 1,797 images held out for validation: 0.2 trains on 1,437, 0 trains on all and
    evaluates nothing. The split is fixed and stratified."""
    augment: bool = True
    """Random shifts of up to one pixel, keyed by (seed, epoch, sample index)."""


class DigitsSpec(Frozen):
    """scikit-learn's 1,797 grey 8x8 digits; ships with the package, needs no download."""

    name: Literal["digits"]
    args: DigitsArgs = DigitsArgs()


class FashionMnistArgs(Frozen):
    root: Annotated[str, NodePath()] = "/usr/share/datasets/fashion-mnist"
    """Directory with the IDX files (plain or .gz); downloaded there once a node where they are
    missing and the network allows."""
    augment: bool = True
    """Random horizontal flips, keyed by (seed, epoch, sample index)."""


class FashionMnistSpec(Frozen):
    """Fashion-MNIST: 60,000 training and 10,000 validation grey 28x28 images of ten kinds of
    clothing."""

    name: Literal["fashion_mnist"]
    args: FashionMnistArgs = FashionMnistArgs()


class Cifar10Args(Frozen):
    root: Annotated[str, NodePath()] = "~/.cache/everstep/cifar10"
    """Directory with ``cifar-10-batches-py``; downloaded there once a node where it is missing and
    the network allows it."""
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
    """Random resized crops and flips, keyed by (seed, epoch, sample index); validation takes the
    middle."""


class ImageFolderSpec(Frozen):
    """One directory a class, decoded by the loader's workers."""

    name: Literal["image_folder"]
    args: ImageFolderArgs


ImageDataSpec = Annotated[
    DigitsSpec | FashionMnistSpec | Cifar10Spec | ImageFolderSpec, Field(discriminator="name")
]


class GptArgs(Frozen):
    num_layers: Annotated[int, Field(ge=1, le=256)] = 4
    """Transformer blocks."""
    num_heads: Annotated[int, Field(ge=1, le=256)] = 4
    """Attention heads of each block."""
    width: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Features of a token; divides by ``num_heads``."""
    context_length: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    """Tokens that the model looks back on; the text is packed into sequences of this length, which
    are the samples."""
    dropout: Fraction = 0.0
    """Dropout probability of embeddings, attention and residual branches."""

    @field_validator("width")
    @classmethod
    def _heads_share_the_width(cls, value: int, info: ValidationInfo) -> int:
        num_heads = info.data.get("num_heads")
        if num_heads is not None and value % num_heads:
            raise PydanticCustomError(
                "width_not_divisible",
                "width {width} does not divide by num_heads {num_heads}; make it a multiple",
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
    """Shell pattern of the files that are read below a directory, at any depth; ``*`` reads all."""
    level: Literal["byte", "char"] = "byte"
    """Tokens: ``byte`` reads any file, ``char`` the characters of UTF-8 text that occur in it."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the tokens held out for validation, from the end; 0 evaluates nothing."""


class TextFilesSpec(Frozen):
    """Text files one after another in the order of their paths, each with an end-of-text token,
    packed into whole sequences."""

    name: Literal["text_files"]
    args: TextFilesArgs


# ---------------------------------------------------------------- tasks


class ImageClassificationSpec(Frozen):
    """Cross-entropy classification of images; reports ``accuracy`` and ``loss`` on the validation
    set."""

    name: Literal["image_classification"]
    model: ImageModelSpec
    data: ImageDataSpec
    label_smoothing: Fraction = 0.0
    """Share of the target spread evenly over all classes."""


class LanguageModelingSpec(Frozen):
    """Next-token prediction; reports ``loss`` in nats a token, ``accuracy`` and ``bits_per_token``
    on the text that is held out."""

    name: Literal["language_modeling"]
    model: GptSpec
    data: TextFilesSpec


TaskSpec = Annotated[ImageClassificationSpec | LanguageModelingSpec, Field(discriminator="name")]

# ---------------------------------------------------------------- optimizers


class ParameterGroupSpec(Frozen):
    parameters: Annotated[str, Field(min_length=1, max_length=512)]
    """Shell pattern over the names of parameters as in the model's ``state_dict``, for example
    ``blocks.0.*``."""
    lr_scale: NonNegativeFiniteFloat = 1.0
    """Their learning rate as a multiple of the optimizer's; 0 leaves them as they are."""
    weight_decay: NonNegativeFiniteFloat | None = None
    """Their weight decay, whatever their dimensions; None decays them like all others."""


class _Optimizer(Frozen):
    lr: PositiveFiniteFloat = 1e-3
    """Peak learning rate; the schedule scales it."""
    weight_decay: NonNegativeFiniteFloat = 0.0
    """Decay of parameters with two or more dimensions; biases and normalisation scales are not
    decayed."""
    groups: list[ParameterGroupSpec] = Field(default_factory=list, max_length=256)
    """Layers with a learning rate or weight decay of their own; the first pattern that matches a
    parameter counts."""


class AdamWSpec(_Optimizer):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"
    beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    beta2: Fraction = 0.999
    """Decay rate of the second moment."""
    eps: PositiveFiniteFloat = 1e-8
    """Added to the denominator."""


class AdamSpec(_Optimizer):
    """torch.optim.Adam."""

    name: Literal["adam"]
    beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    beta2: Fraction = 0.999
    """Decay rate of the second moment."""
    eps: PositiveFiniteFloat = 1e-8
    """Added to the denominator."""


class SgdSpec(_Optimizer):
    """torch.optim.SGD."""

    name: Literal["sgd"]
    momentum: Fraction = 0.9
    """Momentum factor."""
    nesterov: bool = False
    """Nesterov momentum; needs momentum > 0."""

    @field_validator("nesterov")
    @classmethod
    def _nesterov_needs_momentum(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("momentum") == 0:
            raise PydanticCustomError(
                "nesterov_without_momentum", "needs momentum > 0, but momentum is 0"
            )
        return value


OptimizerSpec = Annotated[AdamWSpec | AdamSpec | SgdSpec, Field(discriminator="name")]

# ---------------------------------------------------------------- schedules


class _Schedule(Frozen):
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 to its peak."""


class ConstantScheduleSpec(_Schedule):
    """The peak learning rate after the warm-up."""

    name: Literal["constant"] = "constant"


class CosineScheduleSpec(_Schedule):
    """Half a cosine from the peak to ``final_fraction`` of it at the last step."""

    name: Literal["cosine"]
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the last step as a share of the peak."""


class LinearScheduleSpec(_Schedule):
    """A straight line from the peak to ``final_fraction`` of it at the last step."""

    name: Literal["linear"]
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the last step as a share of the peak."""


class StepScheduleSpec(_Schedule):
    """The learning rate is multiplied by ``gamma`` every ``every_epochs`` epochs."""

    name: Literal["step"]
    every_epochs: PositiveInt = 30
    """Epochs between two reductions."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of each reduction."""


ScheduleSpec = Annotated[
    ConstantScheduleSpec | CosineScheduleSpec | LinearScheduleSpec | StepScheduleSpec,
    Field(discriminator="name"),
]


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
