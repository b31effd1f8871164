"""Optimizers and learning-rate schedules in a spec."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.spec.field_types import (
    Fraction,
    Frozen,
    NonNegativeFiniteFloat,
    NonNegativeInt,
    PositiveFiniteFloat,
    PositiveInt,
    named,
)


class ParameterGroupSpec(Frozen):
    parameters: Annotated[str, Field(min_length=1, max_length=512)]
    """Shell pattern for names of parameters in the model's ``state_dict``, for example
    ``blocks.0.*``."""
    lr_scale: NonNegativeFiniteFloat = 1.0
    """Multiplier of the optimizer's learning rate; 0 freezes these parameters."""
    weight_decay: NonNegativeFiniteFloat | None = None
    """Weight decay of these parameters, whatever their dimensions; null applies the optimizer's
    rule."""


class _Optimizer(Frozen):
    lr: PositiveFiniteFloat = 1e-3
    """Peak learning rate; the schedule scales it."""
    weight_decay: NonNegativeFiniteFloat = 0.0
    """Weight decay of parameters with two or more dimensions. Biases and normalisation scales are
    not decayed."""
    groups: list[ParameterGroupSpec] = Field(default_factory=list, max_length=256)
    """Parameters with their own learning rate or weight decay. The first pattern that matches a
    parameter applies."""


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
                "nesterov_without_momentum", "needs momentum > 0, but momentum is 0; set momentum"
            )
        return value


OptimizerSpec = Annotated[
    AdamWSpec | AdamSpec | SgdSpec, Field(discriminator="name"), named("adamw")
]


class _Schedule(Frozen):
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 to its peak."""


class ConstantScheduleSpec(_Schedule):
    """Constant at the peak learning rate after the warm-up."""

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
    """Multiply the learning rate by ``gamma`` every ``every_epochs`` epochs."""

    name: Literal["step"]
    every_epochs: PositiveInt = 30
    """Epochs between reductions."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of each reduction."""


ScheduleSpec = Annotated[
    ConstantScheduleSpec | CosineScheduleSpec | LinearScheduleSpec | StepScheduleSpec,
    Field(discriminator="name"),
    named("constant"),
]
