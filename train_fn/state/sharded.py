"""The state of a model whose parameters are sharded over ranks (DTensor): one dict of what all
ranks have in common, and in it ``shards``, this rank's rows of every sharded tensor, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from train_fn.errors import BadTask
from train_fn.state.optim import Optimizers, unpacked
from train_fn.state.pieces import MOMENT, WEIGHT, Piece
from train_fn.state.tensor_tree import copy_to_cpu
from train_fn.step.fingerprints import local

EXTRA = "extra/"
"""Begins the names of shards that are rows of an extra's values."""
UNSHARDED = ("Adafactor", "LBFGS", "Muon", "ZeroRedundancyOptimizer")
"""Optimizers whose state has other shapes than the weights, or that meet other ranks in a step."""


def shards_in(tree: Any, path: str = "") -> dict[str, DTensor]:
    """Return the sharded tensors in nested dicts, by their path."""
    if isinstance(tree, DTensor):
        return {path: tree}
    found: dict[str, DTensor] = {}
    for name, value in tree.items() if isinstance(tree, dict) else ():
        found |= shards_in(value, f"{path}/{name}")
    return found


def is_cut(value: DTensor) -> bool:
    """Return whether a tensor is cut along its first dimension by the last one of its mesh."""
    *others, last = value.placements
    return last == Shard(0) and all(each == Replicate() for each in others)


def localized(tree: Any) -> Any:
    """Return nested dicts with this rank's part in place of each sharded tensor."""
    shards = shards_in(tree)
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
        for path, value in shards_in(part.state_dict()).items()
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
        for path, value in shards_in(values).items():
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
                    if not is_cut(value):
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
        f"the optimizer keeps {key!r}, which {problem} and is not sharded as its weight is. Use "
        "AdamW, Adam or SGD"
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
    own = shards_in(like)
    saved = {each.removeprefix(start[:-1]) for each in shards if each.startswith(start)}
    if differing := sorted(own.keys() ^ saved):
        raise BadTask(
            f"{name} of the state to resume differs in {', '.join(differing[:5])}; build the same, "
            "or start a new run"
        )
    return filled(plain, like, lambda path: as_in(own[path], shards[f"{EXTRA}{name}{path}"]))


def units_in(models: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return the modules to which ``fully_shard`` was applied."""
    return [each for model in models for each in model.modules() if isinstance(each, FSDPModule)]


def put_back(models: Iterable[nn.Module]) -> None:
    """Give up what passes without gradients have gathered of other ranks' rows."""
    for unit in units_in(models):
        unit.reshard()


def holds_gradients(units: Iterable[FSDPModule]) -> bool:
    """Return whether gradients of this rank wait for a pass that sums them over ranks."""
    return any(
        group._partial_reduce_output is not None or any(map(_waits, group.fsdp_params))
        for unit in units
        for group in unit._get_fsdp_state()._fsdp_param_groups
    )


def _waits(weight: Any) -> bool:
    gathered = getattr(weight, "_unsharded_param", None)
    has_own = gathered is not None and gathered.grad is not None
    return has_own or weight.unsharded_accumulated_grad is not None


def forget_meshes() -> None:
    """Forget the groups of earlier attempts. DTensor takes two meshes of the same ranks for equal,
    and would give results on the new one the groups of the old one."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


class Shards:
    """What a rank has of the one model of a task, and of its one optimizer."""

    def __init__(self, model: nn.Module, piece: Piece) -> None:
        self._model, self.piece = model, piece
        self.rows = rows_in({"": model}, {})
        self.trained = [each for each in model.parameters() if each.requires_grad]

    def apart(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a ``TrainState.state_dict`` as the function ``apart`` does."""
        in_parts = {"optimizer": {"": state["optimizer"]}, "task": {"parts": {}}}
        found = apart({**state, **in_parts}, self.piece)
        return {**found, "optimizer": found["optimizer"][""], "task": state["task"]}

    def load(self, optimizer: torch.optim.Optimizer | Optimizers, state: dict[str, Any]) -> None:
        """Load the weights and the optimizer's values. Raises BadTask if they are of another
        model, or of one that is not sharded."""
        if (shards := state.get("shards")) is None:
            raise BadTask(
                "the model of the state to resume was not sharded; set train.sharding to none, or "
                "start a new run"
            )
        assert isinstance(optimizer, torch.optim.Optimizer)
        load_weights(self._model, "", state["model"], shards)
        saved = unpacked(copy_to_cpu(state["optimizer"]))
        optimizer.load_state_dict(whole_optimizer("", optimizer, saved, shards))

    def reshard(self) -> None:
        """Give up what an evaluation has gathered of other ranks' rows."""
        put_back([self._model])
