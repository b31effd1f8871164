"""RunSpec: everything that a training request says. Frozen, and validated completely at the
edge."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.code.rules import DIGEST_PATTERN, ENTRY_PATTERN, REQUIREMENT_PATTERN
from everstep.errors import FieldError, InvalidSpec
from everstep.spec import plain_text
from everstep.spec.catalog import (
    AdamWSpec,
    ConstantScheduleSpec,
    Fraction,
    Frozen,
    NonNegativeInt,
    OptimizerSpec,
    PositiveFiniteFloat,
    PositiveInt,
    ScheduleSpec,
    TaskSpec,
)
from everstep.spec.field_errors import few, field_errors
from everstep.spec.reserved_env import reserved_reason
from everstep.wire.metric_names import mode_of

Seconds = PositiveFiniteFloat
_LEAST_AMOUNT, _MOST_AMOUNT = 0.0001, 1e18
"""Of a resource; Ray counts them in ten-thousandths."""
_RAYS_OWN = {
    "cpu": "CPU",
    "gpu": "GPU",
    "memory": "memory",
    "object_store_memory": "object_store_memory",
}
"""Resources that every node of Ray has, by their names in lower case."""
ResourceName = Annotated[str, Field(min_length=1, max_length=128)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")]
MAX_WORKERS = 16_384


def _max_reaches_min(value: float, info: ValidationInfo) -> float:
    """``max_X`` is not below the ``min_X`` that stands before it."""
    greatest = str(info.field_name)
    smallest = greatest.replace("max_", "min_", 1)
    least = info.data.get(smallest)
    if least is not None and value < least:
        raise PydanticCustomError(
            "max_below_min",
            (
                "{greatest} {value} is smaller than {smallest} {least}; raise {greatest} or lower "
                "{smallest}"
            ),
            {"greatest": greatest, "smallest": smallest, "value": value, "least": least},
        )
    return value


EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SecretName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class LoaderSpec(Frozen):
    num_workers: Annotated[int, Field(ge=0, le=128)] | Literal["auto"] = "auto"
    """Loader processes a rank; ``auto`` is 0 for data in memory, else the cores that a rank has."""
    prefetch_factor: PositiveInt = 4
    """Micro-batches that each loader process keeps ready."""


class TrainSpec(Frozen):
    epochs: PositiveInt = 1
    """Passes over the training set."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps, whatever ``epochs`` says."""
    global_batch_size: PositiveInt = 128
    """Samples in one optimizer step, whatever the world size."""
    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Samples in one forward pass; which rank runs it does not matter. ``auto`` picks one that
    divides well over likely world sizes."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward; fp16 uses a loss scaler."""
    grad_clip_norm: PositiveFiniteFloat | None = None
    """Largest global L2 norm of the gradient; None does not clip."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial weights, data order, augmentation and dropout."""
    eval_every_epochs: PositiveInt = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    deterministic: bool | Literal["auto"] = "auto"
    """Deterministic kernels; ``auto`` is on for CPU and off for GPU, where they cost speed."""
    compile: bool = False
    """torch.compile the model; the first step of every attempt is then slow."""
    loader: LoaderSpec = LoaderSpec()
    """How samples are loaded."""
    ema_decay: Fraction | None = None
    """Decay of an exponential moving average of the weights, evaluated and saved beside them; None
    keeps none."""

    @field_validator("micro_batch_size")
    @classmethod
    def _micro_fits_global(cls, value: int | str, info: ValidationInfo) -> int | str:
        largest = info.data.get("global_batch_size")
        if isinstance(value, int) and largest is not None and value > largest:
            raise PydanticCustomError(
                "micro_exceeds_global",
                (
                    "micro_batch_size {value} is larger than global_batch_size {largest}; make it "
                    "at "
                    "most {largest}"
                ),
                {"value": value, "largest": largest},
            )
        return value


class ScalingSpec(Frozen):
    min_workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1
    """The run waits below this many ranks."""
    max_workers: Annotated[int, Field(ge=1, le=MAX_WORKERS), AfterValidator(_max_reaches_min)] = 1
    """Ranks that the run uses where the cluster has room."""
    resources_per_worker: dict[ResourceName, PositiveFiniteFloat] = Field(
        default_factory=lambda: {"CPU": 1.0}
    )
    """Ray resources of one rank; GPUs are added by ``use_gpu``."""
    use_gpu: bool | Literal["auto"] = "auto"
    """One GPU a rank; ``auto`` uses GPUs where the cluster has them. NCCL on GPU, gloo on CPU."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "SPREAD"
    """Ray's placement of ranks over nodes."""
    accelerator_type: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Ray accelerator type, for example ``A100``; needs ``use_gpu``."""

    @field_validator("accelerator_type")
    @classmethod
    def _accelerator_needs_gpu(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("use_gpu") is False:
            raise PydanticCustomError(
                "accelerator_without_gpu",
                "accelerator_type needs use_gpu true or auto, but use_gpu is false",
            )
        return value


def _default_is_inferred(schema: dict[str, Any]) -> None:
    del schema["default"]


class CheckpointSpec(Frozen):
    every_steps: PositiveInt | Literal["auto"] | None = 50
    """Optimizer steps between two checkpoints; None saves by time only, and always at the end.
    ``auto`` saves as often as loses the least: from the measured cost of a save and the mean time
    between failures, by the formula of Young and Daly."""
    every_s: Seconds | None = None
    """Seconds between two checkpoints; None saves by steps only."""
    mtbf_s: Seconds | None = None
    """Mean seconds between failures for ``every_steps: auto``; None estimates it from the failures
    that the run has had."""
    min_interval_s: Seconds = 5.0
    """Shortest time between two checkpoints that ``auto`` may choose; also when the first one is
    made."""
    max_interval_s: Annotated[Seconds, AfterValidator(_max_reaches_min)] = 1800.0
    """Longest time between two checkpoints that ``auto`` may choose."""
    keep_latest: PositiveInt = 3
    """Newest checkpoints that are kept; the best one is kept besides."""
    best_metric: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Validation metric that names the best checkpoint, for example ``accuracy``; None keeps only
    the latest."""
    best_mode: Literal["min", "max"] = Field(
        default=None, validate_default=True, json_schema_extra=_default_is_inferred
    )
    """Whether the best is the smallest or the largest value. Left out, it follows from the metric's
    name: ``min`` where that ends in loss, error, perplexity or the like (mse, mae, nll, wer, cer),
    else ``max``."""
    safetensors: bool = False
    """Write the weights as ``model.safetensors`` too, beside ``model.pt``."""
    max_failed_saves: PositiveInt = 5
    """Saves that may fail one after the other before the run says ``storage_unavailable``. Training
    goes on, and saving is tried again and again with growing pauses of up to a minute."""
    on_failed_saves: Literal["continue", "pause"] = "continue"
    """What a run does that is ``storage_unavailable``: train on without new checkpoints, or pause.
    A paused run holds no resources; when it is resumed it goes on from its newest checkpoint, and
    the steps since are done again."""

    @field_validator("best_mode", mode="before")
    @classmethod
    def _by_the_metrics_name(cls, value: Any, info: ValidationInfo) -> Any:
        return mode_of(info.data.get("best_metric")) if value is None else value


class RecoverySpec(Frozen):
    max_user_errors: NonNegativeInt = 1
    """Restarts after an exception of user code; the same error at the same step twice stops at
    once."""
    max_system_failures: NonNegativeInt = 100
    """Restarts after lost workers, nodes and the like; progress gives the budget back."""
    hang_timeout_s: Seconds | None = None
    """A rank without a step for so long is taken for hung; None learns it: max(60 s, 10 x p99 of
    its steps)."""
    deadline_s: Seconds | None = None
    """The run fails with ``deadline_exceeded`` so many seconds after its creation; None never."""


class ResumeFrom(Frozen):
    run_id: Annotated[str, Field(min_length=1, max_length=64)]
    """Run of the same project whose checkpoint this one begins from."""
    step: NonNegativeInt | Literal["latest", "best"] = "latest"
    """Steps in that checkpoint; ``latest`` and ``best`` (by that run's ``checkpoint.best_metric``)
    become a number when the run is submitted."""


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


class NotifySpec(Frozen):
    """Where to tell of changes of the run's status, by a signed POST of the service."""

    url: Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\[\]:-]+(/[!-~]*)?$", max_length=2048)]
    """Its origin must be one that the operator allows."""
    on: list[Literal["RUNNING", "RECOVERING", "PAUSED", "SUCCEEDED", "FAILED", "CANCELLED"]] = (
        Field(default=["SUCCEEDED", "FAILED", "CANCELLED"], min_length=1, max_length=6)
    )
    """Statuses that are told when the run gets into them."""


class RunSpec(Frozen):
    """A training request. Only ``name``, and ``task`` or ``code``, are required.

    >>> RunSpec.model_validate({"name": "digits", "task": {"name": "image_classification",
    ...     "model": {"name": "mini_resnet"}, "data": {"name": "digits"}}}).train.global_batch_size
    128
    """

    name: Name
    """What people call the run; need not be unique."""
    project: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")] = "default"
    """Project that the run belongs to."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Higher runs start first."""
    tags: dict[
        Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=256)]
    ] = Field(default_factory=dict, max_length=64)
    """Free labels to filter by."""
    code: CodeSpec | None = None
    """Own code, in place of ``task``."""
    task: TaskSpec | None = None
    """What is trained on what; null where ``code`` brings it."""
    optimizer: OptimizerSpec = AdamWSpec()
    """The optimizer and its arguments."""
    schedule: ScheduleSpec = ConstantScheduleSpec()
    """Learning rate over steps."""
    train: TrainSpec = TrainSpec()
    """The training loop."""
    scaling: ScalingSpec = ScalingSpec()
    """Ranks and their resources."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When state is saved and what is kept."""
    recovery: RecoverySpec = RecoverySpec()
    """Budgets and time-outs."""
    resume_from: ResumeFrom | None = None
    """Begin from a checkpoint of another run: at its step, with its weights, optimizer and place in
    the data."""
    env: dict[EnvName, Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=dict, max_length=256
    )
    """Environment of every rank, set before the process group exists."""
    secrets: dict[EnvName, SecretName] = Field(default_factory=dict, max_length=64)
    """Variables of every rank that are read from files which the operator put on the nodes:
    variable to name of the file."""
    notify: NotifySpec | None = None
    """A webhook; null tells nobody."""
    runtime_env: RuntimeEnvSpec | None = None
    """Packages that ``code`` needs beside those of the nodes; denied unless the operator allows
    it."""

    @field_validator("task")
    @classmethod
    def _task_or_code(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("code", "faulty") is None:
            raise PydanticCustomError("task_or_code", "is required, or code in its place")
        if value is not None and info.data.get("code") is not None:
            raise PydanticCustomError(
                "task_and_code", "code takes its place; leave one of the two out"
            )
        return value

    @field_validator("optimizer", "schedule", "train")
    @classmethod
    def _loop_has_use_for_it(cls, value: Any, info: ValidationInfo) -> Any:
        code: CodeSpec | None = info.data.get("code")
        if (
            code is not None
            and code.train_fn is not None
            and value != cls.model_fields[str(info.field_name)].default
        ):
            raise PydanticCustomError(
                "not_used",
                "says nothing to code.train_fn, which trains by itself; put it into code.config",
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
                "is for code of your own; leave it out, or set it to null",
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
                "{names}: in env, too; set each in one of the two",
                {"names": names},
            )
        return value

    @field_validator("scaling")
    @classmethod
    def _workers_have_micro_batches(cls, value: ScalingSpec, info: ValidationInfo) -> ScalingSpec:
        train: TrainSpec | None = info.data.get("train")
        code: CodeSpec | None = info.data.get("code")
        if train is None or (code is not None and code.train_fn is not None):
            return value
        num_micro = math.ceil(train.global_batch_size / _micro_batch_size(train, value))
        if value.min_workers > num_micro:
            raise PydanticCustomError(
                "more_workers_than_micro_batches",
                "min_workers {workers} ranks would share {num_micro} micro-batches of a global "
                "batch; "
                "lower scaling.min_workers or train.micro_batch_size",
                {"workers": value.min_workers, "num_micro": num_micro},
            )
        return value

    @property
    def runs_own_function(self) -> bool:
        """Whether a Ray Train function of the user's trains, and not Everstep's loop."""
        return self.code is not None and self.code.train_fn is not None

    @property
    def micro_batch_size(self) -> int:
        """The micro-batch size in samples, with ``auto`` resolved."""
        return _micro_batch_size(self.train, self.scaling)


def _micro_batch_size(train: TrainSpec, scaling: ScalingSpec) -> int:
    if train.micro_batch_size != "auto":
        return train.micro_batch_size
    return auto_micro_batch_size(train.global_batch_size, scaling.max_workers)


def auto_micro_batch_size(global_batch_size: int, max_workers: int) -> int:
    """Samples per micro-batch that divide evenly over as many of the likely world sizes as is
    cheap.

    Takes the count of micro-batches that divides by max_workers and by as many smaller world sizes
    as possible, at most four micro-batches a rank at full size, so that a shrunk group still shares
    evenly.
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


def parse_spec(raw: Any) -> RunSpec:
    """RunSpec from parsed JSON or YAML; raises InvalidSpec with one entry for each fault, all found
    at once.

    What a run was once taken with is read by ``RunSpec`` itself, which refuses nothing that it did
    not refuse then.
    """
    faults = (*plain_text.faults(raw), *_amount_faults(raw), *_env_faults(raw))
    try:
        spec = RunSpec.model_validate(raw)
    except ValidationError as exc:
        found = field_errors(RunSpec, raw, exc)
        named = {fault.loc for fault in found}
        raise InvalidSpec(
            (*found, *few([fault for fault in faults if fault.loc not in named]))
        ) from exc
    if faults:
        raise InvalidSpec(few(faults))
    return spec


def _env_faults(raw: Any) -> list[FieldError]:
    found = []
    for field in ("env", "secrets"):
        variables = raw.get(field) if isinstance(raw, dict) else None
        names = (
            [name for name in variables if isinstance(name, str)]
            if isinstance(variables, dict)
            else []
        )
        found += [
            FieldError((field, name), reason)
            for name in names
            if (reason := reserved_reason(name)) is not None
        ]
    return found


def _amount_faults(raw: Any) -> list[FieldError]:
    path = ("scaling", "resources_per_worker")
    node = raw
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    amounts = (
        {name: amount for name, amount in node.items() if isinstance(amount, int | float)}
        if isinstance(node, dict)
        else {}
    )
    return [
        FieldError(
            (*path, str(name)),
            (
                "is no resource of Ray's, which tells upper from lower case; did you mean "
                f"{_RAYS_OWN[near]}?"
            ),
        )
        for name in (node if isinstance(node, dict) else ())
        if (near := str(name).casefold().removesuffix("s")) in _RAYS_OWN and name != _RAYS_OWN[near]
    ] + [
        FieldError(
            (*path, str(name)),
            (
                f"must be at least {_LEAST_AMOUNT:g}, the least that Ray counts, and at most "
                f"{_MOST_AMOUNT:g}"
            ),
        )
        for name, amount in amounts.items()
        if not _LEAST_AMOUNT <= amount <= _MOST_AMOUNT
    ]
