"""What ``es.protect`` is given: named, unwrapped, and refused where it cannot be protected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from train_fn.errors import BadTask
from train_fn.state.pieces import Piece, rows_of
from train_fn.state.sharded import UNSHARDED, is_cut, put_back, shards_in
from train_fn.state.tensor_tree import leaves
from train_fn.step.untrained import require_saved

USE_FSDP2 = (
    "Use FSDP2: torch.distributed.fsdp.fully_shard, fsdp_version=2 of Accelerate, version 2 in the "
    "fsdp_config of Hugging Face, or ModelParallelStrategy of Lightning"
)
WAY_OUT = (
    "Or leave es.protect out and report checkpoints by ray.train.report, as "
    "examples/own_train_fn_fsdp does"
)

Torn = Literal["refuse", "shadow"]


@dataclass(frozen=True)
class LoopParts:
    """The objects that make up the state of a user's loop."""

    models: dict[str, nn.Module]
    """Without wrappers, by the prefix of their weights' names."""
    optimizers: dict[str, torch.optim.Optimizer]
    others: dict[str, Any] = field(default_factory=dict)
    """Schedulers and ``extra``, each with ``state_dict`` and ``load_state_dict``."""
    settled: frozenset[str] = frozenset()
    """Names of others that may change only between an optimizer step and the commit: schedulers,
    gradient scalers, and modules such as averages of weights."""
    loaders: frozenset[str] = frozenset()
    """Names of others that are loaders: their position may depend on the rank."""
    wrapped: tuple[nn.Module, ...] = ()
    """The models as they were given."""
    has_scaler: bool = False
    piece: Piece | None = None
    """This rank's piece of models that are sharded; None if every rank has all of them."""
    heirs: int = 1
    """Steps after which a rank of another node gets a copy of the piece; 0 for never."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all models."""
        for model in self.models.values():
            yield from model.parameters()

    def called(self) -> dict[nn.Module, bool]:
        """Return the modules that a loop may call, and whether each is trained: averages of weights
        are not."""
        inner = [each.module for each in self.wrapped if isinstance(each, DistributedDataParallel)]
        others = [each for each in self.others.values() if isinstance(each, nn.Module)]
        return {**dict.fromkeys(others, False), **dict.fromkeys([*self.wrapped, *inner], True)}

    def modules(self) -> list[nn.Module]:
        """Return the models, and the modules among the others, as averages of weights."""
        others = [each for each in self.others.values() if isinstance(each, nn.Module)]
        return [*self.models.values(), *others]

    def optimized(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that an optimizer holds."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]


def parts_of(
    model: Any, optimizer: Any, scheduler: Any, extra: Any, heirs: Any = True
) -> LoopParts:
    """Return the parts of a loop's state. Raises BadTask that names the argument and a way out."""
    models = named("model", model)
    given = [*models.values(), *named("extra", extra).values()]
    put_back(each for each in given if isinstance(each, nn.Module))  # as an evaluation left them
    if not models:
        raise BadTask("es.protect(model=…) is missing; pass the module that is trained, or a list")
    for name, each in models.items():
        _check_model(name, each)
    optimizers = {name: _bare(each) for name, each in named("optimizer", optimizer).items()}
    if not optimizers:
        raise BadTask("es.protect(optimizer=…) is missing; pass the optimizer, or a list of them")
    for name, each in optimizers.items():
        _check_optimizer(name, each)
    schedulers = {
        f"scheduler{_dotted(name)}": _inner(each, "scheduler")
        for name, each in named("scheduler", scheduler).items()
    }
    extras = {f"extra{_dotted(name)}": each for name, each in named("extra", extra).items()}
    for name, each in {**schedulers, **extras}.items():
        if isinstance(each, DataLoader):
            raise BadTask(
                f"es.protect: {name} is a {type(each).__name__}, which has read the next step's "
                "batch when a step is whole, so a restart would leave that batch out. Pass "
                "data = es.loader(loader), and iterate data.batches(state, epochs=…)"
            )
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(each, method, None)):
                raise BadTask(
                    f"es.protect: {name} is a {type(each).__name__} without {method}(); give it "
                    "both state_dict() and load_state_dict(), or leave it out if it follows from "
                    "the step"
                )
    _check_schedulers(optimizers, schedulers)
    _check_weights(optimizers, [*models.values(), *extras.values()])
    scalers = {name for name, each in extras.items() if isinstance(each, torch.amp.GradScaler)}
    modules = {name for name, each in extras.items() if isinstance(each, nn.Module)}
    bare = {name and f"{name}.": unwrapped(each) for name, each in models.items()}
    if not isinstance(heirs, int) or heirs < 0 or (heirs != 1 and not is_sharded(bare)):
        raise BadTask(
            f"es.protect(heirs={heirs!r}) must be True, False, or a number of steps, and is for "
            "sharded models alone. Leave it out"
        )
    return LoopParts(
        models=bare,
        optimizers=optimizers,
        others={**schedulers, **extras},
        settled=frozenset({*schedulers, *scalers, *modules}),
        loaders=frozenset(
            name
            for name, each in extras.items()
            if hasattr(each, "__iter__") and name not in modules
        ),
        wrapped=tuple(models.values()),
        has_scaler=bool(scalers),
        piece=piece_of(bare, optimizers, {**schedulers, **extras}) if is_sharded(bare) else None,
        heirs=int(heirs),
    )


def check_torn(torn: Any, parts: LoopParts) -> Torn:
    """Return how a step that is torn is treated. Raises BadTask."""
    if torn not in ("refuse", "shadow"):
        raise BadTask(f"es.protect(torn={torn!r}) must be 'refuse' or 'shadow'")
    if torn == "shadow" and parts.piece is not None:
        raise BadTask(
            "es.protect(torn='shadow') is not for sharded models: pieces of every step are kept in "
            "any case. Leave torn out"
        )
    if torn == "refuse" and len(parts.optimizers) > 1:
        raise BadTask(
            f"es.protect(torn='refuse') cannot keep a loop with {len(parts.optimizers)} "
            "optimizers: a rank may die when one has stepped and the other has not. Pass "
            "torn='shadow', which copies the state after every step, or use one optimizer with "
            "several parameter groups"
        )
    return "shadow" if torn == "shadow" else "refuse"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP and ``torch.compile``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def named(argument: str, given: Any) -> dict[str, Any]:
    """Return what was given by name: one has none, those of a list are numbered."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        if bad := [name for name in given if not isinstance(name, str) or not name or "." in name]:
            raise BadTask(
                f"es.protect({argument}=…) has the name {bad[0]!r}; use text without dots"
            )
        return dict(given)
    if isinstance(given, list | tuple):
        return {str(number): each for number, each in enumerate(given)}
    return {"": given}


def _dotted(name: str) -> str:
    return name and f".{name}"


def _inner(wrapper: Any, attribute: str) -> Any:
    """Return what a wrapper of Accelerate holds, else the object itself."""
    if type(wrapper).__module__.partition(".")[0] != "accelerate":
        return wrapper
    return getattr(wrapper, attribute, wrapper)


def _bare(optimizer: Any) -> Any:
    return _inner(optimizer, "optimizer")


def _check_model(name: str, model: Any) -> None:
    where = f"es.protect(model=…){f' {name!r}' if name else ''}"
    if not isinstance(model, nn.Module):
        raise BadTask(f"{where} is a {type(model).__name__}; pass a torch.nn.Module")
    for module in model.modules():
        if "FullyShardedDataParallel" in type(module).__name__:
            raise BadTask(
                f"{where} is sharded by FullyShardedDataParallel (FSDP1), which nothing can take "
                f"apart. {USE_FSDP2}. {WAY_OUT}"
            )
    require_saved(model, where)


def _check_optimizer(name: str, optimizer: Any) -> None:
    where = f"es.protect(optimizer=…){f' {name!r}' if name else ''}"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadTask(f"{where} is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # its base class was not initialised
        raise BadTask(
            f"{where} is a {type(optimizer).__name__}, which steps another optimizer. Pass that "
            "one to es.protect, and call its step() in the loop"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise BadTask(
            f"{where} is a ZeroRedundancyOptimizer, whose state nothing can take apart. "
            f"{USE_FSDP2}. {WAY_OUT}"
        )


def _check_weights(optimizers: Mapping[str, Any], owners: list[Any]) -> None:
    """Raise BadTask if an optimizer holds weights that are part of no model: no state would hold
    them."""
    modules = [each for each in owners if isinstance(each, nn.Module)]
    known = {id(weight) for module in modules for weight in module.parameters()}
    for name, optimizer in optimizers.items():
        unknown = [
            weight
            for group in optimizer.param_groups
            for weight in group["params"]
            if id(weight) not in known
        ]
        if unknown:
            raise BadTask(
                f"es.protect(optimizer=…){f' {name!r}' if name else ''} holds {len(unknown)} "
                f"weights of no model that was given, the first of shape "
                f"{tuple(unknown[0].shape)}: no state would hold them. Pass what owns them, too, "
                "for example model={'net': net, 'loss': loss}"
            )


def _check_schedulers(optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> None:
    """Raise BadTask if an optimizer has a scheduler that was not given: it would begin anew at
    every restart."""
    driven = [getattr(each, "optimizer", None) for each in schedulers.values()]
    if schedulers and any(each is None for each in driven):
        return  # one of another kind may drive all of them
    for name, optimizer in optimizers.items():
        has_scheduler = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if has_scheduler and not any(_bare(each) is optimizer for each in driven):
            raise BadTask(
                "es.protect(scheduler=…) is missing: a learning-rate scheduler drives the "
                f"optimizer{name and f' {name!r}'}, and would begin anew at a restart. Pass it"
            )


# ---------------------------------------------------------------- sharded

# What is taken of a model that FSDP2's ``fully_shard`` has sharded: which part of it this rank has,
# and what is refused. Its state is in ``train_fn/state/sharded.py``.


def is_sharded(models: Mapping[str, nn.Module]) -> bool:
    """Return whether some parameter of these models is sharded."""
    return any(
        isinstance(each, DTensor) for model in models.values() for each in model.parameters()
    )


def piece_of(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    others: Mapping[str, Any],
) -> Piece:
    """Return which piece of the models this rank holds. Raises BadTask for what cannot be kept in
    pieces."""
    held = {
        id(each) for one in optimizers.values() for g in one.param_groups for each in g["params"]
    }
    of = _num_pieces(models)
    piece = Piece(dist.get_rank() % of, of)
    for prefix, model in models.items():
        for name, value in model.named_parameters():
            problem = _problem_of(value, piece, is_trained=value.requires_grad or id(value) in held)
            if problem is not None:
                raise BadTask(f"es.protect(model=…): {prefix}{name} {problem}. {WAY_OUT}")
    if len(optimizers) != 1:
        raise BadTask(
            f"es.protect(optimizer=…) has {len(optimizers)} optimizers: a sharded model takes one, "
            "which may have several parameter groups"
        )
    for name in sorted({type(each).__name__ for each in optimizers.values()} & {*UNSHARDED}):
        raise BadTask(
            f"es.protect(optimizer=…) is a {name}: its state cannot be cut as the weights are. Use "
            f"AdamW, Adam or SGD. {WAY_OUT}"
        )
    for name, part in others.items():
        if isinstance(part, torch.amp.GradScaler):
            raise BadTask(
                f"es.protect: {name} is a GradScaler, and a sharded model takes none; use bf16 by "
                "fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
            )
        state = part.state_dict()
        found = [(path, leaf) for path, leaf in leaves(state) if isinstance(leaf, DTensor)]
        for path, leaf in found:
            problem = _problem_of(leaf, piece, is_trained=False)
            if problem is None and path not in shards_in(state):
                problem = "is in a list: let state_dict() give dicts of tensors"
            if problem is not None:
                raise BadTask(f"es.protect: {name}{path} {problem}. {WAY_OUT}")
    return piece


def _problem_of(value: torch.Tensor, piece: Piece, *, is_trained: bool) -> str | None:
    """Return why a weight cannot be kept in pieces; None if it can."""
    if not isinstance(value, DTensor):
        if is_trained:
            return "is trained and not sharded: apply fully_shard to the whole model, too"
        return None
    mesh, size = value.device_mesh.mesh, dist.get_world_size()
    if mesh.flatten().tolist() != list(range(size)) or mesh.shape[-1] != piece.of:
        return (
            f"is on ranks {mesh.tolist()}: use one mesh of all {size} ranks in order for the whole "
            "model, of one dimension, or of two to replicate and shard"
        )
    if piece.of == 1 < size:
        return "is sharded over one rank: use DistributedDataParallel, or more of them"
    if not is_cut(value):
        return f"has the placements {value.placements}: shard it along its first dimension"
    first, end = rows_of(value.shape[0], piece)
    if value.to_local().shape[0] != end - first:
        return f"has {value.to_local().shape[0]} rows on rank {piece.number}, not {end - first}"
    return None


def _num_pieces(models: Mapping[str, nn.Module]) -> int:
    """Return over how many ranks the models are sharded."""
    values = (value for model in models.values() for value in model.parameters())
    return next(value.device_mesh.size(-1) for value in values if isinstance(value, DTensor))
