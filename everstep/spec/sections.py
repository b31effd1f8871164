"""Sections of a spec: training, scaling, checkpoints, recovery, the origin and the webhook."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.spec.field_types import (
    Fraction,
    Frozen,
    NonNegativeInt,
    PositiveFiniteFloat,
    PositiveInt,
)
from everstep.wire.metric_names import mode_of

Seconds = PositiveFiniteFloat
ResourceName = Annotated[str, Field(min_length=1, max_length=128)]


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


class NotifySpec(Frozen):
    """Where to tell of changes of the run's status, by a signed POST of the service."""

    url: Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\[\]:-]+(/[!-~]*)?$", max_length=2048)]
    """Its origin must be one that the operator allows."""
    on: list[Literal["RUNNING", "RECOVERING", "PAUSED", "SUCCEEDED", "FAILED", "CANCELLED"]] = (
        Field(default=["SUCCEEDED", "FAILED", "CANCELLED"], min_length=1, max_length=6)
    )
    """Statuses that are told when the run gets into them."""
