"""Sections of a spec: training, scaling, checkpoints, recovery, resume point and webhook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.wire.events import mode_of

# ---------------------------------------------------------------- field types

# Types that fields of a spec share: the strict base model, number ranges, and paths on nodes.

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


# ---------------------------------------------------------------- sections

Seconds = PositiveFiniteFloat
ResourceName = Annotated[str, Field(min_length=1, max_length=128)]


MAX_WORKERS = 16_384


def _max_reaches_min(value: float, info: ValidationInfo) -> float:
    """Refuse a ``max_X`` that is below its ``min_X``."""
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


def _on_or_off(value: Any) -> Any:
    """Return what the words say, which YAML 1.2 takes for texts."""
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


class LoaderSpec(Frozen):
    num_workers: Annotated[int, Field(ge=0, le=128)] | Literal["auto"] = "auto"
    """Loader processes per rank. ``auto`` is 0 for data in memory, else the number of cores of a
    rank."""
    prefetch_factor: PositiveInt = 4
    """Micro-batches that each loader process prefetches."""


_UNSHARDED: tuple[tuple[str, Any, str], ...] = (
    ("exactness", "world_size", "Leave exactness out"),
    ("audit_fraction", 0.0, "Leave audit_fraction out"),
    ("unused_parameters", "zero", "Leave unused_parameters out, and use all parameters"),
)
"""Fields of ``train``, what they must be if the model is sharded, and what to do."""

_SAME_BITS = (("audit_fraction", 0), ("exactness", "world_size"))
"""Fields of ``train`` that need kernels of the same bits, and what they are if they do not."""


class TrainSpec(Frozen):
    epochs: PositiveInt = 1
    """Passes over the training set."""
    max_steps: PositiveInt | None = None
    """Train this many optimizer steps, in as many epochs as they take, whatever ``epochs`` says."""
    batch_by: Literal["samples", "tokens"] = "samples"
    """What ``global_batch_size`` and ``micro_batch_size`` count. ``tokens`` puts samples of about
    the same length together, as many as fit, padding included: the data sets give ``lengths``, a
    number for each sample. No global batch has more, and a micro-batch only if a single sample
    does."""
    global_batch_size: PositiveInt = 128
    """Samples, or tokens, per optimizer step, independent of the world size."""
    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Samples, or tokens, per forward pass. It does not matter which rank runs which micro-batch.
    ``auto`` picks a size that divides well over likely world sizes."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of forward and backward; fp16 uses a loss scaler."""
    grad_clip_norm: PositiveFiniteFloat | None = None
    """Clip the gradient to this global L2 norm; null does not clip."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed for initial weights, data order, augmentation and dropout."""
    eval_every_epochs: PositiveInt = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    exactness: Literal["world_size", "elastic"] = "world_size"
    """Which runs have the same results, bit for bit. ``world_size``: those with the same number of
    ranks in every step. ``elastic``: all, whatever the number of ranks and its changes, at the cost
    of a few percent of time."""
    on_out_of_memory: Literal["fail", "smaller"] = "fail"
    """What follows when a rank runs out of memory while it trains. ``fail`` ends the run if it does
    so again. ``smaller`` goes on with half the micro-batch and the same global batch: sums round
    otherwise, BatchNorm sees fewer samples at once, dropout draws others."""
    audit_fraction: Share = 0.0
    """Share of the steps in which every rank computes a micro-batch of another rank again, to find
    processors that compute wrongly without an error. 0.001 costs about 0.1 % of time; 0 audits
    none."""
    deterministic: bool | Literal["auto"] = "auto"
    """Use deterministic kernels. ``auto`` is on for CPU, and off for GPU, where they are slower;
    with ``exactness: elastic`` or audits it is on, and operators without such a kernel are
    refused."""
    compile: bool = False
    """Compile the model with torch.compile. The first step of every attempt is then slow."""
    loader: LoaderSpec = LoaderSpec()
    """How samples are loaded."""
    unused_parameters: Literal["zero", "allow"] = "zero"
    """What a step does with parameters that none of its micro-batches used. ``zero`` gives them a
    gradient of zero, so that momentum and weight decay act on them; the run's first micro-batch
    must use all. ``allow`` gives them none, and the optimizer skips them, as plain torch does on
    one rank: for data-dependent control flow, such as a mixture of experts."""
    ema_decay: Fraction | None = None
    """Decay of an exponential moving average of the weights, which is evaluated and saved too; null
    keeps none."""
    sharding: Literal["none", "optimizer", "full", "hybrid"] = "none"
    """How the model is spread over the ranks. ``none``: each rank has all of it, by
    DistributedDataParallel. ``optimizer``: each rank has all weights and its rows of the moments,
    updates these rows, and gathers those of the others. ``full``: each rank has its rows of all
    weights and moments, by FSDP2; the task's ``shard_modules(model)`` returns the modules that are
    gathered one at a time, else their size decides. ``hybrid``: as ``full``, over the ranks of each
    node, so that each node has all of it; where nodes have different numbers of ranks, or one each,
    as ``full``."""
    heirs: Annotated[bool | PositiveInt, BeforeValidator(_on_or_off)] = True
    """Of a sharded model: copy each rank's rows to another node, every step (``true``), every N
    steps, or never (``false``). A node's death costs no step, fewer than N, or those since the last
    checkpoint. Where another node has the same rows, as with ``hybrid``, nothing is sent."""

    @property
    def wants_determinism(self) -> bool | Literal["auto"]:
        """Return ``deterministic``, with ``auto`` resolved where ``exactness`` or audits need
        it."""
        return True if self.exactness == "elastic" or self.audit_fraction else self.deterministic

    @field_validator("deterministic", "compile")
    @classmethod
    def _computes_the_same_bits(cls, value: bool | str, info: ValidationInfo) -> bool | str:
        """Refuse what computes other bits at another world size, in another attempt, or on another
        rank."""
        needed = info.field_name != "compile"
        if value is needed or value == "auto":
            return value
        for name, default in _SAME_BITS:
            if (found := info.data.get(name, default)) != default:
                raise PydanticCustomError(
                    "other_bits",
                    "{field} is {value}, and {name} {found} needs {needed}: kernels must compute "
                    "the same bits on all ranks. Leave {field} out, or set {name} to {default}",
                    {
                        "field": info.field_name,
                        "value": str(value).lower(),
                        "name": name,
                        "found": found,
                        "needed": str(needed).lower(),
                        "default": default,
                    },
                )
        return value

    @field_validator("on_out_of_memory")
    @classmethod
    def _knows_smaller_batches(cls, value: str, info: ValidationInfo) -> str:
        """Refuse to halve micro-batches on which the run's bits or its order of samples depend."""
        for name, found in (("exactness", "elastic"), ("batch_by", "tokens")):
            if value == "smaller" and info.data.get(name) == found:
                raise PydanticCustomError(
                    "not_smaller",
                    "is smaller, and {name} is {found}, which needs one size of micro-batches for "
                    "the whole run. Set a smaller micro_batch_size, or leave {name} out",
                    {"name": name, "found": found},
                )
        return value

    @field_validator("sharding")
    @classmethod
    def _shards_by_rows_alone(cls, value: str, info: ValidationInfo) -> str:
        """Refuse settings under which a model cannot be sharded."""
        for name, fits, way_out in _UNSHARDED if value != "none" else ():
            if (found := info.data.get(name, fits)) != fits:
                raise PydanticCustomError(
                    "not_sharded",
                    "is {sharding}, and {field} is {found}, which no sharded model has yet. "
                    "{way_out}, or set sharding to none",
                    {
                        "sharding": value,
                        "field": name,
                        "found": str(found).lower(),
                        "way_out": way_out,
                    },
                )
        if value != "none" and info.data.get("precision") == "fp16":
            raise PydanticCustomError(
                "not_sharded",
                "is {sharding}, and precision is fp16, whose loss scaler no sharded model has. Set "
                "precision to bf16, or sharding to none",
                {"sharding": value},
            )
        return value

    @field_validator("heirs")
    @classmethod
    def _are_of_a_sharded_model(cls, value: bool | int, info: ValidationInfo) -> bool | int:
        if value is not True and info.data.get("sharding") == "none":
            raise PydanticCustomError(
                "not_sharded_at_all",
                "is {value}, and sharding is none: every rank has all of the model. Leave heirs "
                "out, or set sharding",
                {"value": str(value).lower()},
            )
        return value

    @field_validator("micro_batch_size")
    @classmethod
    def _micro_fits_global(cls, value: int | str, info: ValidationInfo) -> int | str:
        largest = info.data.get("global_batch_size")
        if isinstance(value, int) and largest is not None and value > largest:
            raise PydanticCustomError(
                "micro_exceeds_global",
                (
                    "micro_batch_size {value} is larger than global_batch_size {largest}; make it "
                    "at most {largest}"
                ),
                {"value": value, "largest": largest},
            )
        return value


class ScalingSpec(Frozen):
    min_workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1
    """The run waits while fewer ranks than this can be placed."""
    max_workers: Annotated[int, Field(ge=1, le=MAX_WORKERS), AfterValidator(_max_reaches_min)] = 1
    """Ranks that the run uses if the cluster has room. A run of a task uses no more than a global
    batch has micro-batches."""
    resources_per_worker: dict[ResourceName, PositiveFiniteFloat] = Field(
        default_factory=lambda: {"CPU": 1.0}
    )
    """Ray resources of one rank. ``use_gpu`` adds GPUs."""
    use_gpu: bool | Literal["auto"] = "auto"
    """One GPU per rank. ``auto`` uses GPUs if the cluster has them. The backend is NCCL on GPU,
    gloo on CPU."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "SPREAD"
    """Ray's strategy for placing ranks on nodes."""
    accelerator_type: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Ray accelerator type, for example ``A100``; needs ``use_gpu``."""
    shares: Literal["equal", "by_speed"] = "equal"
    """How ranks divide the micro-batches of a global batch. ``by_speed``: in proportion to the
    speed at which each rank is measured to work, for unequal or shared machines. It needs
    ``train.exactness: elastic``, with which no division changes a bit, and finer micro-batches than
    one for each rank."""
    grow_every_s: NonNegativeFiniteFloat | Literal["auto"] = "auto"
    """Shortest time in seconds between two growths onto nodes that have become free. ``auto`` grows
    once the ranks that join will add more work until the next failure than the others' pause
    takes: at once in small groups, and for many nodes together in very large ones."""

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
    """Optimizer steps between checkpoints. Null saves by time only, and always at the end. ``auto``
    saves so often that one is written for at most a twentieth of the time: every 5 s to 30 min."""
    every_s: Seconds | None = None
    """Seconds between checkpoints; null saves by steps only."""
    keep_latest: PositiveInt = 3
    """Newest checkpoints to keep. The best one is kept in addition."""
    best_metric: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Validation metric that selects the best checkpoint, for example ``accuracy``. Null takes the
    validation loss of a task that has one; of another loop only the latest are kept, as with
    ``none``."""
    best_mode: Literal["min", "max"] = Field(
        default=None, validate_default=True, json_schema_extra=_default_is_inferred
    )
    """Whether the smallest or the largest value is best. If left out, it follows from the metric's
    name: ``min`` if that ends in loss, error, perplexity or the like (mse, mae, nll, wer, cer),
    else ``max``."""
    parameters: Literal["all", "trainable"] = "all"
    """Which of the model's parameters checkpoints and snapshots hold. ``trainable`` leaves out
    those with ``requires_grad=False``, such as the base of a LoRA: the task builds them anew in
    every attempt, and their digest is compared. Buffers are always saved."""
    safetensors: bool = False
    """Also write the weights as ``model.safetensors``, beside ``model.pt``."""
    max_failed_saves: PositiveInt = 5
    """Consecutive failed saves before the run reports ``storage_unavailable``. Training continues,
    and saving is retried with a backoff of up to a minute."""
    on_failed_saves: Literal["continue", "pause"] = "continue"
    """What a run does once it is ``storage_unavailable``: continue training without new
    checkpoints, or pause. A paused run holds no resources. When resumed, it starts from the state
    in its nodes' memory, or from its newest checkpoint if no such node takes part."""

    @field_validator("best_mode", mode="before")
    @classmethod
    def _by_the_metrics_name(cls, value: Any, info: ValidationInfo) -> Any:
        """Infer the mode from the metric's name if it is not given."""
        return mode_of(info.data.get("best_metric")) if value is None else value

    def best_by(self, *, is_own_loop: bool) -> tuple[str, Literal["min", "max"]] | None:
        """Return the metric that selects the best checkpoint, and which of its values is best: of a
        task that names none the validation loss, where it is measured. None without a metric."""
        if self.named_metric is not None:
            return self.named_metric, self.best_mode
        return None if is_own_loop or self.best_metric is not None else ("val_loss", "min")

    @property
    def named_metric(self) -> str | None:
        """Return ``best_metric``; None also for ``none``."""
        return None if self.best_metric == "none" else self.best_metric


class RecoverySpec(Frozen):
    max_user_errors: NonNegativeInt = 1
    """Restarts after an exception in user code. The same error at the same step twice ends the run
    at once."""
    max_system_failures: NonNegativeInt = 20
    """Restarts after lost workers, nodes and the like. Progress restores the budget."""
    hang_timeout_s: Seconds | None = None
    """Seconds without a step after which a rank counts as hung; null learns it: max(60 s, 10 x p99
    of the rank's step time)."""
    in_process: bool = True
    """Accepted in specs of earlier versions, and without effect: every attempt's ranks are forked
    from a process that has built the task and never trained."""
    stragglers: Literal["report", "move"] = "report"
    """What is done about a rank that takes 1.5 times as long as its peers for a minute. ``move``
    hands its node's ranks over to other nodes, if all fit there, and if ``scaling.shares:
    by_speed`` cannot make up for it."""
    deadline_s: Seconds | None = None
    """Seconds from creation until the run fails with ``deadline_exceeded``; null sets no
    deadline."""


class ResumeFrom(Frozen):
    run_id: Annotated[str, Field(min_length=1, max_length=64)]
    """Run of the same project whose checkpoint to start from."""
    step: NonNegativeInt | Literal["latest", "best"] = "latest"
    """Step of that checkpoint. ``latest`` and ``best`` (by that run's ``checkpoint.best_metric``)
    are resolved to a number when the run is submitted."""


class ReplaySpec(Frozen):
    """Train steps of another run again, and compare them. The request for a replay writes this."""

    run_id: Annotated[str, Field(min_length=1, max_length=64)]
    """Run of the same project whose steps to train again. Nothing of it is changed."""
    from_step: NonNegativeInt
    """Steps done in the state to begin with: 0, or a checkpoint of that run."""
    to_step: PositiveInt
    """Last step to train again."""
    max_workers: PositiveInt | None = None
    """``scaling.max_workers`` of that run, which decides the order of sums with
    ``train.exactness: elastic``; null is this run's own."""

    @field_validator("to_step")
    @classmethod
    def _has_steps(cls, value: int, info: ValidationInfo) -> int:
        if value <= info.data.get("from_step", 0):
            raise PydanticCustomError(
                "no_steps", "must be greater than from_step: a replay trains at least one step"
            )
        return value


class NotifySpec(Frozen):
    """Webhook: the service sends a signed POST when the run's status changes."""

    url: Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\[\]:-]+(/[!-~]*)?$", max_length=2048)]
    """URL to POST to. The operator must allow its origin."""
    on: list[Literal["RUNNING", "RECOVERING", "PAUSED", "SUCCEEDED", "FAILED", "CANCELLED"]] = (
        Field(default=["SUCCEEDED", "FAILED", "CANCELLED"], min_length=1, max_length=6)
    )
    """Statuses that trigger a POST when the run enters them."""


class WandbSpec(Frozen):
    """A run at Weights & Biases, over all attempts of this one."""

    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] | None = None
    """Project there; null is the project of this run."""
    entity: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] | None = None
    """User or team there; null is the default of the key."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """``offline`` keeps files in the run's directory, for ``wandb sync``. ``auto`` is online with
    ``WANDB_API_KEY`` in ``secrets`` and a server that answers, else offline."""


# ---------------------------------------------------------------- optimization

# Optimizers and learning-rate schedules in a spec.


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
