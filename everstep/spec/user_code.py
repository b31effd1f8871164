"""User code in a spec: the archive, its entry point and the packages that it needs."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.code.rules import DIGEST_PATTERN, ENTRY_PATTERN, REQUIREMENT_PATTERN
from everstep.spec.field_types import Frozen


def _json_value(value: Any) -> Any:
    """Refuse values that JSON cannot represent, at any depth: they could not be stored and passed
    on unchanged."""
    level = [value]
    while level:
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                raise PydanticCustomError(
                    "not_finite", "contains {value}; use finite numbers", {"value": str(item)}
                )
            if isinstance(item, dict) and not all(isinstance(key, str) for key in item):
                raise PydanticCustomError(
                    "not_json", "contains a key that is not text; use text keys"
                )
            if item is not None and not isinstance(item, str | int | float | list | dict):
                raise PydanticCustomError(
                    "not_json",
                    "contains a {kind}; use only text, numbers, booleans, null, lists and mappings",
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
    """User code: an uploaded archive and its entry point, either ``task`` or ``train_fn``."""

    archive: Annotated[str, Field(pattern=DIGEST_PATTERN)]
    """Digest that POST /v1/code returned."""
    task: EntryPoint | None = None
    """Task class as ``package.module:ClassName``; Everstep's loop trains it."""
    train_fn: EntryPoint | None = None
    """Ray Train function as ``package.module:function``, which runs its own loop."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments of the task class."""
    config: Arguments = Field(default_factory=dict)
    """Argument of the train_fn."""

    @field_validator("train_fn")
    @classmethod
    def _one_of_both(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse neither or both of ``task`` and ``train_fn``."""
        if "task" in info.data and (value is None) == (info.data["task"] is None):
            raise PydanticCustomError(
                "task_or_train_fn", "set exactly one of task and train_fn: the entry point to run"
            )
        return value

    @field_validator("args", "config")
    @classmethod
    def _of_what_is_run(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Refuse arguments of the entry point that is not set."""
        owner, other = ("task", "config") if info.field_name == "args" else ("train_fn", "args")
        if value and info.data.get(owner, "") is None:
            raise PydanticCustomError(
                "argument_of_the_other",
                "is only passed to {owner}; move it to {other}",
                {"owner": owner, "other": other},
            )
        return value


Requirement = Annotated[str, Field(max_length=200, pattern=REQUIREMENT_PATTERN)]


class RuntimeEnvSpec(Frozen):
    """Packages that user code needs and the nodes do not have, if the operator allows them."""

    pip: Annotated[list[Requirement], Field(min_length=1, max_length=64)]
    """Requirements such as ``einops>=0.8``, by name and version: no options, paths or URLs."""
