"""Types that fields of a spec share: the strict base model, number ranges, and paths on nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat

MAX_INT = 2**31 - 1
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]


NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
NonNegativeFiniteFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


PositiveFiniteFloat = Annotated[PositiveFloat, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class NodePath:
    """Mark a field as a path on the nodes. The operator can restrict which directories such paths
    may be in."""


def named(default: str) -> BeforeValidator:
    """Let a section without ``name`` be the one that is the default."""

    def with_name(value: Any) -> Any:
        return {"name": default, **value} if isinstance(value, dict) else value

    return BeforeValidator(with_name)


class Frozen(BaseModel):
    """Base of all spec models: immutable, no unknown fields, and no coercion from strings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )
