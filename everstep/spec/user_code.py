"""User code in a spec: the archive, what of it runs, and the packages it needs."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.code.rules import DIGEST_PATTERN, ENTRY_PATTERN, REQUIREMENT_PATTERN
from everstep.spec.field_types import Frozen


def _json_value(value: Any) -> Any:
    """Refuse what JSON cannot say, at any depth: it could neither be stored nor given to the code
    as it was written."""
    level = [value]
    while level:
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                raise PydanticCustomError(
                    "not_finite", "holds {value}; numbers must be finite", {"value": str(item)}
                )
            if isinstance(item, dict) and not all(isinstance(key, str) for key in item):
                raise PydanticCustomError("not_json", "holds a key that is not text")
            if item is not None and not isinstance(item, str | int | float | list | dict):
                raise PydanticCustomError(
                    "not_json",
                    "holds a {kind}; only text, numbers, booleans, null, lists and mappings",
                    {"kind": type(item).__name__},
                )
        inner = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        ]
        level = [item for items in inner for item in items]
    return value


EntryPoint = Annotated[str, Field(pattern=ENTRY_PATTERN, max_length=256)]
Arguments = Annotated[dict[str, Any], AfterValidator(_json_value)]


class CodeSpec(Frozen):
    """Code of one's own: an uploaded archive, and what of it is run. Either ``task`` or
    ``train_fn``."""

    archive: Annotated[str, Field(pattern=DIGEST_PATTERN)]
    """Digest that POST /v1/code answered with."""
    task: EntryPoint | None = None
    """``package.module:ClassName`` of a task; Everstep's loop trains it."""
    train_fn: EntryPoint | None = None
    """``package.module:function`` of a Ray Train function, which trains by itself."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments of the task's class."""
    config: Arguments = Field(default_factory=dict)
    """What the train_fn is called with."""

    @field_validator("train_fn")
    @classmethod
    def _one_of_both(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "task" in info.data and (value is None) == (info.data["task"] is None):
            raise PydanticCustomError(
                "task_or_train_fn", "give either task or train_fn: what of the archive is to run"
            )
        return value

    @field_validator("args", "config")
    @classmethod
    def _of_what_is_run(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        owner, other = ("task", "config") if info.field_name == "args" else ("train_fn", "args")
        if value and info.data.get(owner, "") is None:
            raise PydanticCustomError(
                "argument_of_the_other",
                "belongs to {owner}; put it into {other}",
                {"owner": owner, "other": other},
            )
        return value


Requirement = Annotated[str, Field(max_length=200, pattern=REQUIREMENT_PATTERN)]


class RuntimeEnvSpec(Frozen):
    """Packages that code of one's own needs and nodes lack, where the operator allows such."""

    pip: Annotated[list[Requirement], Field(min_length=1, max_length=64)]
    """Requirements as ``einops>=0.8`` has it, by name and version: no options, paths or URLs."""
