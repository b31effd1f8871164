"""The part of a spec about a user's own code, and what its environment may contain."""

from __future__ import annotations

import math
import os
import sys
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.code import DIGEST_PATTERN, ENTRY_PATTERN, REQUIREMENT_PATTERN, script_fault
from everstep.spec.sections import Frozen


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


_OWNER_OF = {"args": "task", "argv": "script", "config": "train_fn"}
"""Field with arguments -> the entry point that gets them."""

EntryPoint = Annotated[str, Field(pattern=ENTRY_PATTERN, max_length=256)]
Arguments = Annotated[dict[str, Any], AfterValidator(_json_value)]


def _script(value: str) -> str:
    """Refuse what cannot be the path, or the module, of a script in an archive."""
    if fault := script_fault(value):
        raise PydanticCustomError("script", "{fault}", {"fault": fault})
    return value


Script = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_script)]


Argument = Annotated[str, Field(max_length=4096)]


class CodeSpec(Frozen):
    """User code: an uploaded archive and its entry point: ``task``, ``script`` or ``train_fn``."""

    archive: Annotated[str, Field(pattern=DIGEST_PATTERN)]
    """Digest that POST /v1/code returned."""
    task: EntryPoint | None = None
    """Task class as ``package.module:ClassName``; Everstep's loop trains it."""
    script: Script | None = None
    """Script for torchrun, as its path in the archive (``train.py``), or as a module
    (``-m pkg.train``). Every rank runs it, in the environment that torchrun gives."""
    train_fn: EntryPoint | None = None
    """Ray Train function as ``package.module:function``, which runs its own loop."""
    datasets: EntryPoint | None = None
    """Function as ``package.module:function`` that returns ``{name: ray.data.Dataset}`` for
    ``ray.train.get_dataset_shard`` in the train_fn."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments of the task class."""
    config: Arguments = Field(default_factory=dict)
    """Argument of the train_fn."""
    argv: Annotated[list[Argument], Field(max_length=1000)] = Field(default_factory=list)
    """Command-line arguments of the script."""

    @field_validator("train_fn")
    @classmethod
    def _one_of_them(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse none or several of ``task``, ``script`` and ``train_fn``."""
        if not {"task", "script"} <= info.data.keys():
            return value
        if [value, info.data["task"], info.data["script"]].count(None) != 2:
            raise PydanticCustomError(
                "one_entry_point",
                "set exactly one of task, script and train_fn: the entry point to run",
            )
        return value

    @field_validator("datasets")
    @classmethod
    def _of_a_train_fn(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("train_fn", "") is None:
            raise PydanticCustomError(
                "datasets_of_none",
                "are those of a train_fn: a task or script builds its own data. Leave datasets "
                "out, or set train_fn",
            )
        return value

    @field_validator("args", "config", "argv")
    @classmethod
    def _of_what_is_run(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse arguments of an entry point that is not set."""
        owner = _OWNER_OF[str(info.field_name)]
        set_ones = [each for each in _OWNER_OF.values() if info.data.get(each) is not None]
        if value and info.data.get(owner, "") is None and set_ones:
            other = next(name for name, each in _OWNER_OF.items() if each == set_ones[0])
            raise PydanticCustomError(
                "argument_of_the_other",
                "is only passed to code.{owner}; move it to code.{other}",
                {"owner": owner, "other": other},
            )
        return value


Requirement = Annotated[str, Field(max_length=200, pattern=REQUIREMENT_PATTERN)]


class RuntimeEnvSpec(Frozen):
    """Packages that user code needs and the nodes do not have, if the operator allows them."""

    pip: Annotated[list[Requirement], Field(min_length=1, max_length=64)]
    """Requirements such as ``einops>=0.8``, by name and version: no options, paths or URLs."""


# ---------------------------------------------------------------- hash seed

# Fix the order in which Python iterates over sets of strings: one PYTHONHASHSEED for all
# processes.

VARIABLE, FIXED = "PYTHONHASHSEED", "0"


def fix_hash_seed() -> None:
    """Re-execute this program with a fixed PYTHONHASHSEED, unless one is set or a debugger is
    attached.

    A task that builds data or weights from a set would otherwise build different ones on each rank
    and in each attempt. Python reads the variable only at startup.
    """
    if os.environ.get(VARIABLE, "random") != "random" or sys.gettrace() is not None:
        return
    os.environ[VARIABLE] = FIXED
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


# ---------------------------------------------------------------- reserved env

# Environment variables that a spec may not set, in ``env`` or ``secrets``, and what to do
# instead.


class Reserved(NamedTuple):
    """Variable names with one reason, in capitals; a trailing ``*`` matches any suffix."""

    names: tuple[str, ...]
    reason: str
    """Message for the user, with the fix."""


RESERVED = (
    Reserved(
        (
            "RAY_*",
            "EVERSTEP_*",
            "LD_*",
            "DYLD_*",
            "PYTHON*",
            "PIP_*",
            "GLIBC_*",
            "TORCHELASTIC_*",
            "GCONV_PATH",
            "BASH_ENV",
        ),
        "is reserved: Ray, Everstep, the dynamic loader, Python or pip reads it before your code "
        "runs. Remove it; if ranks need it, ask the operator to set it on the nodes",
    ),
    Reserved(
        (
            "MASTER_ADDR",
            "MASTER_PORT",
            "RANK",
            "LOCAL_RANK",
            "GROUP_RANK",
            "NODE_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
        ),
        "is reserved: Everstep sets it for each rank. Remove it",
    ),
    Reserved(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        "is reserved: Ray assigns the devices. Remove it, and set the resources of a rank in "
        "scaling",
    ),
    Reserved(
        (
            *(
                "AWS_*",
                "BOTO_CONFIG",
                "GOOGLE_APPLICATION_CREDENTIALS",
                "GOOGLE_CLOUD_*",
                "GCE_METADATA_*",
                "CLOUDSDK_*",
            ),
            *("CLOUD_STORAGE_*", "STORAGE_EMULATOR_HOST"),
        ),
        "is reserved: it selects the credentials and endpoint with which ranks write checkpoints, "
        "and others can read the spec. The operator sets it on the nodes. Remove it, and pass "
        "settings of your own code under other names",
    ),
    Reserved(
        ("HOME", "XDG_CONFIG_HOME"),
        "is reserved: the storage's credentials are searched below it. Remove it; for caches set "
        "XDG_CACHE_HOME, TORCH_HOME or HF_HOME",
    ),
)


def reserved_reason(name: str) -> str | None:
    """Return why a spec may not set this variable; None where it may.

    >>> reserved_reason("AWS_ENDPOINT_URL") is None, reserved_reason("NCCL_DEBUG") is None
    (False, True)
    """
    upper = name.upper()
    for names, reason in RESERVED:
        if any(
            upper.startswith(each[:-1]) if each.endswith("*") else upper == each for each in names
        ):
            return reason
    return None
