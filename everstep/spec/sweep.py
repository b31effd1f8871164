"""SweepSpec: runs of one spec with other values of some fields, and which of them train to the
end."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.spec.sections import Frozen, PositiveInt, named
from everstep.wire.events import mode_of

MAX_RUNS = 500
"""Most runs of a sweep."""
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
FieldPath = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^.]+(\.[^.]+)*$")]
SweepName = Annotated[
    str, Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")
]
_OWN_FIELDS = ("name", "project")
"""Fields of a spec that the sweep itself sets, or that all its runs share."""


def _above_low(value: float, info: ValidationInfo) -> float:
    """Refuse a ``high`` that is not above its ``low``."""
    low = info.data.get("low")
    if low is not None and value <= low:
        raise PydanticCustomError(
            "high_not_above_low",
            "high {high} is not above low {low}; raise high or lower low",
            {"high": value, "low": low},
        )
    return value


class UniformSpec(Frozen):
    name: Literal["uniform"]
    low: FiniteFloat
    """Smallest value."""
    high: Annotated[FiniteFloat, AfterValidator(_above_low)]
    """Largest value."""


class LogSpec(Frozen):
    name: Literal["log"]
    low: Annotated[FiniteFloat, Field(gt=0)]
    """Smallest value; the logarithm of the value is uniform."""
    high: Annotated[FiniteFloat, AfterValidator(_above_low)]
    """Largest value."""


class IntSpec(Frozen):
    name: Literal["int"]
    low: Whole
    """Smallest whole number."""
    high: Annotated[Whole, AfterValidator(_above_low)]
    """Largest whole number, which is drawn as often as the others."""


class ChoiceSpec(Frozen):
    name: Literal["choice"]
    values: list[Any] = Field(min_length=1, max_length=MAX_RUNS)
    """Values, each drawn equally often."""


Distribution = Annotated[UniformSpec | LogSpec | IntSpec | ChoiceSpec, Field(discriminator="name")]


class NoSchedulerSpec(Frozen):
    name: Literal["none"] = "none"


class AshaSpec(Frozen):
    name: Literal["asha"]
    reduction_factor: Annotated[int, Field(ge=2, le=100)] = 3
    """Of the runs that reach a rung, one in so many goes on."""
    min_steps: PositiveInt | None = None
    """Steps of the first rung; each further rung has ``reduction_factor`` times as many. Null sets
    two rungs by the run's own length: with a factor of 3, at a ninth and a third of its steps."""


Scheduler = Annotated[NoSchedulerSpec | AshaSpec, Field(discriminator="name"), named("none")]


def _default_is_inferred(schema: dict[str, Any]) -> None:
    del schema["default"]


class SweepSpec(Frozen):
    """A sweep: a spec, the fields to vary, and the metric that says which run is best."""

    spec: dict[str, Any]
    """The spec of every run, as for a single one, but for the fields in ``grid`` and ``random``."""
    name: SweepName | None = None
    """What people call the sweep; null takes the spec's name. Its runs are NAME-000, NAME-001, …"""
    metric: Annotated[str, Field(min_length=1, max_length=128)]
    """Metric by which runs are compared, as in their curves, for example ``val_accuracy``."""
    mode: Literal["min", "max"] = Field(
        default=None, validate_default=True, json_schema_extra=_default_is_inferred
    )
    """Whether the smallest or the largest value is best. If left out, it follows from the metric's
    name, as for ``checkpoint.best_mode``."""
    grid: dict[FieldPath, Annotated[list[Any], Field(min_length=1, max_length=MAX_RUNS)]] = Field(
        default_factory=dict, max_length=20
    )
    """Fields to vary -> values: every combination is tried."""
    random: dict[FieldPath, Distribution] = Field(default_factory=dict, max_length=50)
    """Fields to vary -> distribution from which each run draws a value."""
    max_runs: Annotated[int, Field(ge=1, le=MAX_RUNS)] | None = None
    """Number of runs with ``random``, which share the points of the grid in turn. Without it, the
    limit on the size of the grid."""
    max_parallel: Annotated[int, Field(ge=1, le=MAX_RUNS)] | None = None
    """Most runs at a time that wait or train; null submits all, and the queue decides."""
    scheduler: Scheduler = NoSchedulerSpec()
    """``none`` trains every run to its end. ``asha`` pauses runs at rungs, and lets the best ones
    go on from where they paused."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of ``random``; null draws one, which the sweep then shows."""

    @field_validator("mode", mode="before")
    @classmethod
    def _by_the_metrics_name(cls, value: Any, info: ValidationInfo) -> Any:
        """Infer the mode from the metric's name if it is not given."""
        return mode_of(info.data.get("metric")) if value is None else value

    @field_validator("grid")
    @classmethod
    def _values_differ(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for path, values in value.items():
            written = [json.dumps(each, sort_keys=True) for each in values]
            twice = next((each for each in written if written.count(each) > 1), None)
            if twice is not None:
                raise PydanticCustomError(
                    "value_twice",
                    "{path} has the value {value} twice; remove one",
                    {"path": path, "value": twice},
                )
        return value

    @field_validator("grid", "random")
    @classmethod
    def _may_vary(cls, value: dict[str, Any]) -> dict[str, Any]:
        for path in value:
            if path in _OWN_FIELDS:
                raise PydanticCustomError(
                    "not_to_vary",
                    "{path} cannot vary: the runs of a sweep have one project, and are named "
                    "after it; remove it",
                    {"path": path},
                )
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> SweepSpec:
        paths = sorted([*self.grid, *self.random])
        if not paths:
            raise PydanticCustomError(
                "nothing_to_vary", "nothing varies; set grid, random, or both"
            )
        for path in paths:
            within = next((each for each in paths if path.startswith(f"{each}.")), None)
            if within is not None or paths.count(path) > 1:
                raise PydanticCustomError(
                    "varies_twice",
                    "{path} is set twice, by {other} too; vary it in one place",
                    {"path": path, "other": within or "grid and random"},
                )
        if self.random and self.max_runs is None:
            raise PydanticCustomError(
                "max_runs_missing", "max_runs is required with random; set the number of runs"
            )
        most = self.max_runs or MAX_RUNS
        if self.grid_size > most:
            raise PydanticCustomError(
                "grid_too_large",
                "the grid has {size} points, more than the {most} runs of the sweep; raise "
                "max_runs (at most {limit}) or remove values",
                {"size": self.grid_size, "most": most, "limit": MAX_RUNS},
            )
        return self

    @property
    def grid_size(self) -> int:
        """Return the number of points of the grid; 1 without one."""
        return math.prod(len(values) for values in self.grid.values())

    @property
    def num_runs(self) -> int:
        """Return the number of runs."""
        return (self.max_runs or 0) if self.random else self.grid_size
