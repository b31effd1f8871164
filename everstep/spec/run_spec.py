"""RunSpec: a training request. It is frozen; this module also checks fields against each other
across sections.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.spec.code import CodeSpec, RuntimeEnvSpec
from everstep.spec.sections import (
    AdamWSpec,
    CheckpointSpec,
    ConstantScheduleSpec,
    Frozen,
    NotifySpec,
    OptimizerSpec,
    RecoverySpec,
    ReplaySpec,
    ResumeFrom,
    ScalingSpec,
    ScheduleSpec,
    TrainSpec,
    WandbSpec,
)
from everstep.spec.tasks import TaskSpec

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
PROJECT_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
MAX_TAGS = 64
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME_PATTERN)]
EnvName = Annotated[str, Field(pattern=VARIABLE_PATTERN)]
WANDB_KEY = "WANDB_API_KEY"
"""Variable with the key for Weights & Biases."""
SecretName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


_OF_AUTO = "is gone: checkpoint.every_steps auto follows from how long a save takes. Leave it out"
FORMER: Mapping[tuple[str, str], tuple[Any, str]] = {
    ("checkpoint", "mtbf_s"): (None, _OF_AUTO),
    ("checkpoint", "min_interval_s"): (5.0, _OF_AUTO),
    ("checkpoint", "max_interval_s"): (1800.0, _OF_AUTO),
    ("recovery", "rehearse"): (
        "off",
        "is gone, the service rehearses no runs. Leave it out, and run `everstep rehearse` before "
        "`everstep submit`, which sends what it showed",
    ),
}
"""Fields of earlier versions by section and name: their defaults, and what to tell who sets another
value. Stored specs have them."""


class RunSpec(Frozen):
    """A training request. Only ``name``, and ``task`` or ``code``, are required.

    >>> RunSpec.model_validate({"name": "digits", "task": {"name": "image_classification",
    ...     "model": {"name": "mini_resnet"}, "data": {"name": "digits"}}}).train.global_batch_size
    128
    """

    name: Name
    """What people call the run; need not be unique."""
    project: Annotated[str, Field(pattern=PROJECT_PATTERN)] = "default"
    """Project that the run belongs to."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Higher runs start first."""
    tags: dict[
        Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=256)]
    ] = Field(default_factory=dict, max_length=MAX_TAGS)
    """Free labels to filter by."""
    code: CodeSpec | None = None
    """User code that replaces ``task``."""
    task: TaskSpec | None = None
    """Model and data to train; null if ``code`` is set."""
    optimizer: OptimizerSpec = AdamWSpec()
    """Optimizer and its arguments."""
    schedule: ScheduleSpec = ConstantScheduleSpec()
    """Learning-rate schedule."""
    train: TrainSpec = TrainSpec()
    """Training loop."""
    scaling: ScalingSpec = ScalingSpec()
    """Number of ranks and the resources of each."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When to save, and which checkpoints to keep."""
    recovery: RecoverySpec = RecoverySpec()
    """Error budgets and timeouts."""
    resume_from: ResumeFrom | None = None
    """Start from a checkpoint of another run: same step, weights, optimizer state and position in
    the data."""
    replay: ReplaySpec | None = None
    """Train steps of another run again and compare them; null for any other run."""
    env: dict[EnvName, Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=dict, max_length=256
    )
    """Environment variables of every rank, set before the process group starts."""
    secrets: dict[EnvName, SecretName] = Field(default_factory=dict, max_length=64)
    """Environment variables that are read from files which the operator placed on the nodes. Maps
    the variable to the file's name."""
    notify: NotifySpec | None = None
    """Webhook for status changes; null sends none."""
    wandb: WandbSpec | None = None
    """Record the run at Weights & Biases, with the key of ``secrets`` as ``WANDB_API_KEY``; null
    records none."""
    runtime_env: RuntimeEnvSpec | None = None
    """Packages that ``code`` needs and the nodes do not have. Refused unless the operator allows
    it."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_fields(cls, raw: Any) -> Any:
        """Leave out the fields of earlier versions. ``parse_spec`` refuses those that are set."""
        for section, name in FORMER:
            given = raw.get(section) if isinstance(raw, dict) else None
            if isinstance(given, dict) and name in given:
                raw = {**raw, section: {key: given[key] for key in given if key != name}}
        return raw

    @field_validator("task")
    @classmethod
    def _task_or_code(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a spec with neither or both of ``task`` and ``code``."""
        if value is None and info.data.get("code", "faulty") is None:
            raise PydanticCustomError("task_or_code", "is required; set either task or code")
        if value is not None and info.data.get("code") is not None:
            raise PydanticCustomError(
                "task_and_code", "cannot be set together with code; remove task or code"
            )
        return value

    @field_validator("optimizer", "schedule", "train")
    @classmethod
    def _loop_has_use_for_it(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse settings of Everstep's loop if the user's own replaces that loop."""
        code: CodeSpec | None = info.data.get("code")
        if (
            code is not None
            and code.task is None
            and value != cls.model_fields[str(info.field_name)].default
        ):
            entry, arguments = (
                ("script", "argv") if code.script is not None else ("train_fn", "config")
            )
            raise PydanticCustomError(
                "not_used",
                "has no effect with code.{entry}, which runs its own loop; move it to "
                "code.{arguments}",
                {"entry": entry, "arguments": arguments},
            )
        return value

    @field_validator("checkpoint")
    @classmethod
    def _task_builds_the_rest(cls, value: CheckpointSpec, info: ValidationInfo) -> CheckpointSpec:
        """Refuse to leave parameters out of the checkpoints of the user's own loop."""
        code: CodeSpec | None = info.data.get("code")
        if code is not None and code.task is None and value.parameters != "all":
            raise PydanticCustomError(
                "parameters_without_task",
                "parameters is {parameters}, which needs a task: your own loop decides what it "
                "saves. Set it to all",
                {"parameters": value.parameters},
            )
        return value

    @field_validator("checkpoint")
    @classmethod
    def _pieces_hold_all(cls, value: CheckpointSpec, info: ValidationInfo) -> CheckpointSpec:
        """Refuse checkpoints that a sharded model does not have."""
        train: TrainSpec | None = info.data.get("train")
        if train is None or train.sharding == "none":
            return value
        problem = None
        if value.safetensors:
            problem = (
                "safetensors is true, but checkpoints of a sharded model are pieces. Remove it, "
                "and join them by python -m train_fn.checkpoints.sharded"
            )
        elif value.parameters != "all":
            problem = "parameters is trainable, but pieces hold all parameters. Set it to all"
        if problem is not None:
            raise PydanticCustomError(
                "not_sharded",
                "{problem}, or set train.sharding to none",
                {"problem": problem},
            )
        return value

    @field_validator("replay", "recovery")
    @classmethod
    def _loop_tells_of_its_steps(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what a loop of the user's own does not tell enough of its steps for."""
        code: CodeSpec | None = info.data.get("code")
        if code is None or code.task is not None or value is None:
            return value
        if isinstance(value, ReplaySpec):
            raise PydanticCustomError(
                "replay_without_task",
                "needs a task: a loop of your own records no digests of its steps to compare",
            )
        if value.stragglers == "move":
            raise PydanticCustomError(
                "move_without_task",
                "stragglers: move needs a task: a loop of your own does not tell which of its "
                "ranks is slow; leave recovery.stragglers at report",
            )
        return value

    @field_validator("runtime_env")
    @classmethod
    def _packages_are_for_code(
        cls, value: RuntimeEnvSpec | None, info: ValidationInfo
    ) -> RuntimeEnvSpec | None:
        if value is not None and info.data.get("code", "faulty") is None:
            raise PydanticCustomError(
                "runtime_env_without_code",
                "only applies to runs with code; remove it, or set it to null",
            )
        return value

    @field_validator("secrets")
    @classmethod
    def _secrets_are_no_env(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        twice = sorted(value.keys() & info.data.get("env", {}).keys())
        if twice:
            names = " and ".join(twice)
            raise PydanticCustomError(
                "secret_in_env",
                "{names}: also set in env; set each in only one of the two",
                {"names": names},
            )
        return value

    @field_validator("wandb")
    @classmethod
    def _online_needs_a_key(cls, value: WandbSpec | None, info: ValidationInfo) -> WandbSpec | None:
        if (
            value is not None
            and value.mode == "online"
            and WANDB_KEY not in info.data.get("secrets", (WANDB_KEY,))
        ):
            raise PydanticCustomError(
                "wandb_without_key",
                "mode is online, which needs a key; set secrets.WANDB_API_KEY to the name of the "
                "operator's file with it",
            )
        return value

    @field_validator("scaling")
    @classmethod
    def _workers_have_micro_batches(cls, value: ScalingSpec, info: ValidationInfo) -> ScalingSpec:
        """Refuse a minimum world size at which some ranks would have no micro-batch."""
        train: TrainSpec | None = info.data.get("train")
        code: CodeSpec | None = info.data.get("code")
        if train is None or (code is not None and code.task is None):
            return value
        num_micro = _num_micro_batches(train, value)
        if value.min_workers > num_micro:
            raise PydanticCustomError(
                "more_workers_than_micro_batches",
                "min_workers is {workers}, but a global batch has only {num_micro} "
                "micro-batches; lower scaling.min_workers or train.micro_batch_size",
                {"workers": value.min_workers, "num_micro": num_micro},
            )
        return value

    @property
    def most_workers(self) -> int:
        """Return the most ranks that the run may have. Of a task no more than a global batch has
        micro-batches: others would have nothing to do."""
        return most_workers(self.train, self.scaling, is_own_loop=self.runs_own_function)

    @property
    def full_size(self) -> int:
        """Return the number of ranks by which sums are ordered with ``exactness: elastic``."""
        replayed = self.replay.max_workers if self.replay is not None else None
        return replayed or self.scaling.max_workers

    @property
    def origin(self) -> ResumeFrom | None:
        """Return the checkpoint of another run from which this one begins; None if it begins
        anew."""
        return origin_of(self.resume_from, self.replay)

    @property
    def runs_own_function(self) -> bool:
        """Return whether a user's Ray Train function or script replaces Everstep's training
        loop."""
        return self.code is not None and self.code.task is None

    @property
    def best_by(self) -> tuple[str, Literal["min", "max"]] | None:
        """As ``CheckpointSpec.best_by``."""
        return self.checkpoint.best_by(is_own_loop=self.runs_own_function)

    @property
    def runs_script(self) -> bool:
        """Return whether the user's own loop is a script for torchrun."""
        return self.code is not None and self.code.script is not None

    @property
    def trained_digest(self) -> str:
        """Return a digest of what decides how a rehearsal ends: the code with its arguments, and
        what it is trained by. A run's name, project, size and how often it saves are not part."""
        names = {"code", "task", "optimizer", "schedule", "train", "env", "runtime_env"}
        facts = {
            "spec": self.model_dump(mode="json", include=names),
            "parameters": self.checkpoint.parameters,
            "micro_batch_size": None if self.runs_own_function else self.micro_batch_size,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def micro_batch_size(self) -> int:
        """Return the micro-batch size, with ``auto`` resolved."""
        return _micro_batch_size(self.train, self.scaling)


def origin_of(resume_from: ResumeFrom | None, replay: ReplaySpec | None) -> ResumeFrom | None:
    """Return the checkpoint of another run from which a run begins. A replay begins as its original
    did, or from one of its checkpoints."""
    if resume_from is not None or replay is None or replay.from_step == 0:
        return resume_from
    return ResumeFrom(run_id=replay.run_id, step=replay.from_step)


def _micro_batch_size(train: TrainSpec, scaling: ScalingSpec) -> int:
    if train.micro_batch_size != "auto":
        return train.micro_batch_size
    return auto_micro_batch_size(train.global_batch_size, scaling.max_workers)


def _num_micro_batches(train: TrainSpec, scaling: ScalingSpec) -> int:
    return math.ceil(train.global_batch_size / _micro_batch_size(train, scaling))


def most_workers(train: TrainSpec, scaling: ScalingSpec, *, is_own_loop: bool) -> int:
    """Return ``RunSpec.most_workers`` of a spec with these sections."""
    most = scaling.max_workers
    return most if is_own_loop else min(most, _num_micro_batches(train, scaling))


@lru_cache(maxsize=1024)
def auto_micro_batch_size(global_batch_size: int, max_workers: int) -> int:
    """Return a micro-batch size that shares evenly over the likely world sizes.

    Choose a number of micro-batches that is a multiple of max_workers, at most four per rank at
    full size. Prefer the number that also divides by the most smaller world sizes, so that a group
    that lost ranks still shares evenly.
    """
    candidates = [
        max_workers * factor for factor in (1, 2, 3, 4) if max_workers * factor <= global_batch_size
    ]
    if not candidates:
        return 1

    def evenness(count: int) -> tuple[int, int, int]:
        smaller = sum(
            count % size == 0 for size in range(max(1, max_workers // 2), max_workers + 1)
        )
        return (global_batch_size % count == 0, smaller, -count)

    return math.ceil(global_batch_size / max(candidates, key=evenness))


# ---------------------------------------------------------------- json schema

# The JSON schema of a spec, for editors that complete and check YAML.

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def spec_schema() -> dict[str, Any]:
    """Return the schema. What a spec checks over several fields is not in it."""
    return {"$schema": DIALECT, **RunSpec.model_json_schema(), "title": "Everstep spec"}
