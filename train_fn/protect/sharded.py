"""What ``es.protect`` takes of a model that FSDP2's ``fully_shard`` has sharded: which part of it
this rank has, and what is refused.

The state of such a model is one dict of what all ranks have in common, and in it ``shards``: this
rank's rows of every sharded tensor, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from train_fn.errors import BadTask
from train_fn.state.pieces import Piece, rows_of
from train_fn.state.tensor_tree import leaves

_UNKNOWN = ("Adafactor", "LBFGS", "Muon", "ZeroRedundancyOptimizer")
"""Optimizers whose state has other shapes than the weights, or that meet other ranks in a step."""
WAY_OUT = (
    "Or leave es.protect out and report checkpoints by ray.train.report, as "
    "examples/own_train_fn_fsdp does"
)


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
    for name in sorted({type(each).__name__ for each in optimizers.values()} & {*_UNKNOWN}):
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
            if problem is None and path not in _shards_in(state):
                problem = "is in a list: let state_dict() give dicts of tensors"
            if problem is not None:
                raise BadTask(f"es.protect: {name}{path} {problem}. {WAY_OUT}")
    return piece


def _shards_in(tree: Any, path: str = "") -> dict[str, DTensor]:
    """Return the sharded tensors in nested dicts, by their path."""
    if isinstance(tree, DTensor):
        return {path: tree}
    found: dict[str, DTensor] = {}
    for name, value in tree.items() if isinstance(tree, dict) else ():
        found |= _shards_in(value, f"{path}/{name}")
    return found


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
    if not _is_cut(value):
        return f"has the placements {value.placements}: shard it along its first dimension"
    first, end = rows_of(value.shape[0], piece)
    if value.to_local().shape[0] != end - first:
        return f"has {value.to_local().shape[0]} rows on rank {piece.number}, not {end - first}"
    return None


def _num_pieces(models: Mapping[str, nn.Module]) -> int:
    """Return over how many ranks the models are sharded."""
    values = (value for model in models.values() for value in model.parameters())
    return next(value.device_mesh.size(-1) for value in values if isinstance(value, DTensor))


def _is_cut(value: DTensor) -> bool:
    """Return whether a tensor is cut along its first dimension by the last one of its mesh."""
    *others, last = value.placements
    return last == Shard(0) and all(each == Replicate() for each in others)


# ---------------------------------------------------------------- state

WEIGHT, MOMENT, EXTRA = "model/", "optimizer/", "extra/"
"""Begin the names of shards."""


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: all of one that is not sharded."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def localized(tree: Any) -> Any:
    """Return nested dicts with this rank's part in place of each sharded tensor."""
    shards = _shards_in(tree)
    return filled(tree, tree, lambda path: local(shards[path])) if shards else tree


def filled(tree: Any, like: Any, values: Callable[[str], Any], path: str = "") -> Any:
    """Return nested dicts with another value in place of each tensor that is sharded in ``like``.

    Args:
        values: gives it by the tensor's path.
    """
    if isinstance(like, DTensor):
        return values(path)
    if isinstance(tree, dict) and isinstance(like, dict):
        return {
            name: filled(value, like.get(name), values, f"{path}/{name}")
            for name, value in tree.items()
        }
    return tree


def as_in(like: DTensor, rows: torch.Tensor) -> DTensor:
    """Return a sharded tensor of this rank's rows, which are copied, with the layout of another."""
    return DTensor.from_local(
        rows.to(like.device, copy=True),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size((like.shape[0], *rows.shape[1:])),
        stride=like.stride(),
    )


def rows_in(models: Mapping[str, nn.Module], extras: Mapping[str, Any]) -> dict[str, int]:
    """Return how many rows each sharded weight, and each sharded tensor of an extra, has over all
    ranks, by the name of its shard."""
    of_extras = {
        f"{EXTRA}{name}{path}": value.shape[0]
        for name, part in extras.items()
        for path, value in _shards_in(part.state_dict()).items()
    }
    return of_extras | {
        f"{WEIGHT}{prefix}{name}": value.shape[0]
        for prefix, model in models.items()
        for name, value in model.state_dict().items()
        if isinstance(value, DTensor)
    }


def apart(state: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """Return a state whose sharded tensors are taken out and become ``shards``, and ``rows`` says
    how many each has over all ranks. Raises BadTask for values that cannot be kept in pieces."""
    shards: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    model, parts = {}, {}
    for part, values in state["task"]["parts"].items():
        for path, value in _shards_in(values).items():
            name = f"{EXTRA}{part}{path}"
            shards[name], rows[name] = local(value), value.shape[0]
        parts[part] = filled(values, values, lambda path: None)
    for name, value in state["model"].items():
        if isinstance(value, DTensor):
            shards[f"{WEIGHT}{name}"], rows[f"{WEIGHT}{name}"] = local(value), value.shape[0]
        else:
            model[name] = value
    optimizers = {}
    for at, optimizer in state["optimizer"].items():
        kept: dict[Any, dict[str, Any]] = {}
        for number, values in optimizer["state"].items():
            kept[number] = {}
            for key, value in values.items():
                if isinstance(value, DTensor):
                    name = f"{MOMENT}{at}/{number}/{key}"
                    if not _is_cut(value):
                        raise BadTask(_unlike(key, f"has the placements {value.placements}"))
                    shards[name], rows[name] = local(value), value.shape[0]
                elif isinstance(value, torch.Tensor) and value.numel() > 1:
                    raise BadTask(_unlike(key, f"has {value.numel()} elements on each rank"))
                else:
                    kept[number][key] = value
        optimizers[at] = {**optimizer, "state": kept}
    return {
        **state,
        "model": model,
        "task": {**state["task"], "parts": parts},
        "optimizer": optimizers,
        "piece": tuple(piece),
        "rows": rows,
        "shards": shards,
    }


def _unlike(key: str, problem: str) -> str:
    return (
        f"es.protect(optimizer=…) keeps {key!r}, which {problem} and is not sharded as its weight "
        "is. Use AdamW, Adam or SGD"
    )


@torch.no_grad()
def load_weights(
    model: nn.Module, prefix: str, plain: Mapping[str, Any], shards: Mapping[str, torch.Tensor]
) -> None:
    """Load what ``apart`` took of a model. Raises BadTask for one of another shape."""
    own = model.state_dict()
    mine = {name: value for name, value in own.items() if isinstance(value, DTensor)}
    saved = {
        name.removeprefix(f"{WEIGHT}{prefix}"): value
        for name, value in shards.items()
        if name.startswith(f"{WEIGHT}{prefix}")
    }
    differing = sorted((saved.keys() ^ mine.keys()) | (plain.keys() ^ (own.keys() - mine.keys())))
    differing += [
        name for name in mine.keys() & saved.keys() if local(mine[name]).shape != saved[name].shape
    ]
    if differing:
        raise BadTask(
            f"the model of the state to resume differs in {', '.join(differing[:5])}; build the "
            "same model, or start a new run"
        )
    model.load_state_dict(dict(plain), strict=False)
    for name, value in mine.items():
        local(value).copy_(saved[name])


def whole_optimizer(
    at: str,
    optimizer: torch.optim.Optimizer,
    plain: Mapping[str, Any],
    shards: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` from what ``apart`` took of it."""
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    state: dict[Any, dict[str, Any]] = {
        number: dict(values) for number, values in plain["state"].items()
    }
    for name, value in shards.items():
        if not name.startswith(f"{MOMENT}{at}/"):
            continue
        number, _, key = name.removeprefix(f"{MOMENT}{at}/").partition("/")
        weight = weights[int(number)]
        state.setdefault(int(number), {})[key] = as_in(weight, value)
    return {**plain, "state": state}


def whole_extra(name: str, part: Any, plain: Any, shards: Mapping[str, torch.Tensor]) -> Any:
    """Return an extra's ``state_dict`` from what ``apart`` took of it. Raises BadTask if it has
    other sharded tensors now."""
    like, start = part.state_dict(), f"{EXTRA}{name}/"
    own = _shards_in(like)
    saved = {each.removeprefix(start[:-1]) for each in shards if each.startswith(start)}
    if differing := sorted(own.keys() ^ saved):
        raise BadTask(
            f"{name} of the state to resume differs in {', '.join(differing[:5])}; build the same, "
            "or start a new run"
        )
    return filled(plain, like, lambda path: as_in(own[path], shards[f"{EXTRA}{name}{path}"]))
