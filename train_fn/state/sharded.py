"""The state of a model whose parameters, or their moments, are sharded over ranks: one dict of what
all ranks have in common, and in it ``shards``, this rank's rows of every sharded tensor, by name.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from train_fn.errors import BadTask
from train_fn.state.optim import Optimizers, load_optimizer, match_layout, unpacked
from train_fn.state.pieces import AVERAGE, MOMENT, WEIGHT, Piece, rows_of
from train_fn.state.tensor_tree import copy_to_cpu
from train_fn.step.fingerprints import local, word_sum
from train_fn.step.peers import Peers

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
            if not isinstance(values, dict):
                raise BadTask(_unlike(number, "belongs to no weight"))
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


def load_weights(
    model: nn.Module, prefix: str, plain: Mapping[str, Any], shards: Mapping[str, torch.Tensor]
) -> None:
    """Load what ``apart`` took of a model. Raises BadTask for one of another shape."""
    values = model.state_dict().items()
    mine = {name: local(value) for name, value in values if isinstance(value, DTensor)}
    load_rows(model, prefix, mine, plain, shards)


@torch.no_grad()
def load_rows(
    model: nn.Module,
    prefix: str,
    mine: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any],
    shards: Mapping[str, torch.Tensor],
) -> None:
    """Load the rows of this rank, which are ``mine`` by name, and what is in no shard. Raises
    BadTask if the model has another shape."""
    own = model.state_dict()
    saved = {
        name.removeprefix(f"{WEIGHT}{prefix}"): value
        for name, value in shards.items()
        if name.startswith(f"{WEIGHT}{prefix}")
    }
    differing = sorted((saved.keys() ^ mine.keys()) | (plain.keys() ^ (own.keys() - mine.keys())))
    differing += [
        name for name in mine.keys() & saved.keys() if mine[name].shape != saved[name].shape
    ]
    if differing:
        raise BadTask(
            f"the model of the state to resume differs in {', '.join(differing[:5])}; build the "
            "same model, or start a new run"
        )
    model.load_state_dict(dict(plain), strict=False)
    for name, value in mine.items():
        value.copy_(saved[name])


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
        sharded = isinstance(weight, DTensor)
        state.setdefault(int(number), {})[key] = as_in(weight, value) if sharded else value.clone()
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
        for group in groups_of(unit)
    )


def _waits(weight: Any) -> bool:
    gathered = getattr(weight, "_unsharded_param", None)
    has_own = gathered is not None and gathered.grad is not None
    return has_own or weight.unsharded_accumulated_grad is not None


def _has_memory(value: torch.Tensor) -> bool:
    """Return whether a tensor has memory itself, and not only that of its rows."""
    try:
        return bool(value.untyped_storage().data_ptr())
    except RuntimeError:
        return False


def groups_of(unit: Any) -> list[Any]:
    """Return what FSDP2 knows of the weights that are gathered with a module."""
    groups: list[Any] = unit._get_fsdp_state()._fsdp_param_groups
    return groups


def copied_weights(model: nn.Module) -> list[str]:
    """Return the names of sharded weights that ``state_dict`` returns as copies."""
    owned = {local(value).untyped_storage().data_ptr() for value in model.parameters()}
    return [
        name
        for name, value in model.state_dict().items()
        if isinstance(value, DTensor)
        and local(value).numel()
        and local(value).untyped_storage().data_ptr() not in owned
    ]


class Shards:
    """What a rank has of the one model of a task, and of its one optimizer."""

    gathers = True
    """Whether weights are cut as well, and gathered for each pass."""

    def __init__(
        self, model: nn.Module, piece: Piece, whole: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """``whole``: the weights before they were sharded, by name."""
        self._model, self.piece = model, piece
        self.rows = rows_in({"": model}, {})
        self.trained = [each for each in model.parameters() if each.requires_grad]
        self.units: list[Any] = [*units_in([model])]
        """The modules that are gathered by themselves, and the model."""
        self._names = {module: name for name, module in model.named_modules()}
        self._whole = {
            name: (weakref.ref(value), StorageWeakRef(value.untyped_storage()))  # type: ignore[no-untyped-call]
            for name, value in (whole or {}).items()
        }

    def apart(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer | Optimizers
    ) -> dict[str, Any]:
        """Return a ``TrainState.state_dict`` as the function ``apart`` does."""
        in_parts = {"optimizer": {"": state["optimizer"]}, "task": {"parts": {}}}
        found = apart({**state, **in_parts}, self.piece)
        found = {**found, "optimizer": found["optimizer"][""], "task": state["task"]}
        return self._with_averages(found)

    def _with_averages(self, state: dict[str, Any]) -> dict[str, Any]:
        """Let averaged weights be shards as well. Those that the model's ``state_dict`` leaves out
        never change, and neither do their averages."""
        for name, value in (state["ema"] or {}).items():
            if (count := self.rows.get(f"{WEIGHT}{name}")) is not None:
                state["shards"][f"{AVERAGE}{name}"] = self._own(value)
                state["rows"][f"{AVERAGE}{name}"] = count
        return {**state, "ema": None}

    def averages(self, shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the averaged weights of a state by name; the weights, if another run began it that
        has none."""
        names = [name.removeprefix(WEIGHT) for name in self.rows]
        return {each: shards.get(AVERAGE + each, shards[WEIGHT + each]) for each in names}

    def _own(self, value: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return the rows of an averaged weight that this rank has."""
        return value

    def load(self, optimizer: torch.optim.Optimizer | Optimizers, state: dict[str, Any]) -> None:
        """Load the weights and the optimizer's values. Raises BadTask if they are of another
        model, or of one that is not sharded."""
        if (shards := state.get("shards")) is None:
            raise BadTask(
                "the model of the state to resume was not sharded; set train.sharding to none, or "
                "start a new run"
            )
        assert isinstance(optimizer, torch.optim.Optimizer)
        self._load_weights(state["model"], shards)
        saved = unpacked(copy_to_cpu(state["optimizer"]))
        self._load_optimizer(optimizer, whole_optimizer("", optimizer, saved, shards))

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        load_optimizer(optimizer, state)

    def _load_weights(self, plain: Mapping[str, Any], shards: Mapping[str, torch.Tensor]) -> None:
        load_weights(self._model, "", plain, shards)

    def updating(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return the context of the optimizer's step."""
        return nullcontext()

    def reshard(self) -> None:
        """Give up what an evaluation has gathered of other ranks' rows."""
        put_back([self._model])

    def kept_elsewhere(self) -> list[str]:
        """Return the names of weights whose values before they were sharded are still in use."""

        def found() -> list[str]:
            refs: Iterable[tuple[str, tuple[Any, Any]]] = self._whole.items()
            return [name for name, (it, data) in refs if it() is not None or not data.expired()]

        if found():
            gc.collect()
        return found()

    def sums_of_rows(self) -> dict[str, int]:
        """Return the sum of the words of this rank's rows of each weight, by name."""
        return {
            name: word_sum(each.sharded_param)
            for unit in self.units
            for name, each in self._held(unit)
        }

    def sums_of_gathered(self, unit: nn.Module) -> dict[str, int]:
        """Return the same of the weights of a module, while they are gathered."""
        if not all(group.is_unsharded for group in groups_of(unit)):
            return {}
        return {name: word_sum(each.unsharded_param) for name, each in self._held(unit)}

    def replaced(self) -> list[str]:
        """Return the names of weights in whose place code has put other values by ``.data``."""
        return [
            name
            for unit in self.units
            for name, each in self._held(unit)
            if _has_memory(each.sharded_param)
        ]

    def _held(self, unit: Any) -> Iterator[tuple[str, Any]]:
        """Yield what FSDP2 has of each weight of a module, by name."""
        for group in groups_of(unit):
            for each in group.fsdp_params:
                module, key = each._module_info.module, each._module_info.param_name
                yield f"{self._names[module]}.{key}".strip("."), each

    def sum_unused(self) -> None:
        """From now on, sum a zero for weights of a called module that a rank did not use."""
        for unit in self.units:
            unit.set_reduce_scatter_unused_params(True, recurse=False)

    def finish_backward(self) -> None:
        """Sum the gradients that FSDP2 did not, since it saw no tensor of the root's output in the
        backward pass."""
        for unit in self.units:
            state: Any = unit._get_fsdp_state()
            if state._is_root and any(
                group.is_unsharded
                for each in state._state_ctx.all_states
                for group in each._fsdp_param_groups
            ):
                state._root_post_backward_final_callback()

    @contextmanager
    def under_own_classes(self) -> Iterator[None]:
        """Let gathered modules be of the classes that the task gave them, which FSDP2 derives
        from."""
        derived = [(unit, unit.__class__) for unit in self.units]
        for unit, each in derived:
            unit.__class__ = each.__mro__[2]
        try:
            yield
        finally:
            for unit, each in derived:
                unit.__class__ = each


# ---------------------------------------------------------------- optimizer alone

# With ``train.sharding: optimizer`` every rank has all weights, and their summed gradients. It
# updates its own rows, so it has the moments of these alone, and then gathers the rows of the
# others. Its piece is the same as if the weights were sharded, too.

_BLOCK_BYTES = 64 << 20
"""About as many bytes of weights are gathered at once."""


class OptimizerShards(Shards):
    """What a rank has of a model that every rank holds whole, and of its sharded optimizer."""

    gathers = False

    def __init__(self, model: nn.Module, peers: Peers) -> None:
        super().__init__(model, Piece(peers.rank, peers.world_size))
        self._peers = peers
        saved = model.state_dict().keys()
        self._weights = {
            name: value
            for name, value in model.named_parameters(remove_duplicate=False)
            if name in saved
        }
        self.rows = {f"{WEIGHT}{name}": len(value) for name, value in self._weights.items()}

    def apart(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer | Optimizers
    ) -> dict[str, Any]:
        model = {name: each for name, each in state["model"].items() if name not in self._weights}
        rows = dict(self.rows)
        shards = {f"{WEIGHT}{name}": self._own(value) for name, value in self._weights.items()}
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        kept: dict[Any, dict[str, Any]] = {}
        for number, values in state["optimizer"]["state"].items():
            if not isinstance(values, dict):
                raise BadTask(_unlike(number, "belongs to no weight"))
            weight, kept[number] = weights[number], {}
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == self._own(weight).shape:
                    name = f"{MOMENT}/{number}/{key}"
                    shards[name], rows[name] = value, len(weight)
                elif isinstance(value, torch.Tensor) and value.numel() > 1:
                    raise BadTask(_unlike(key, f"has the shape {tuple(value.shape)}"))
                else:
                    kept[number][key] = value
        own = {"piece": tuple(self.piece), "rows": rows, "shards": shards}
        optimizer_state = {**state["optimizer"], "state": kept}
        return self._with_averages({**state, "model": model, "optimizer": optimizer_state, **own})

    def averages(self, shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all rows of them. A collective."""
        found = super().averages(shards)
        whole = {name: torch.empty_like(self._weights[name]) for name in found}
        for name, rows in found.items():
            self._own(whole[name]).copy_(rows)
        self._gather(whole.values())
        return whole

    def load(self, optimizer: torch.optim.Optimizer | Optimizers, state: dict[str, Any]) -> None:
        """Load the weights and the optimizer's values. A collective."""
        super().load(optimizer, state)
        self._gather(self._model.parameters())

    def _load_weights(self, plain: Mapping[str, Any], shards: Mapping[str, torch.Tensor]) -> None:
        mine = {name: self._own(value) for name, value in self._weights.items()}
        load_rows(self._model, "", mine, plain, shards)

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        with self._rows_alone(optimizer):
            super()._load_optimizer(optimizer, state)
            match_layout(optimizer)

    @contextmanager
    def updating(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let a step of the optimizer update this rank's rows. Then gather those of the others. A
        collective."""
        with self._rows_alone(optimizer):
            yield
        self._gather(self.trained)

    @contextmanager
    def _rows_alone(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let the optimizer's parameters be this rank's rows of them, inside."""
        held = [each for group in optimizer.param_groups for each in group["params"]]
        whole = [(each, each.data, each.grad) for each in held]
        for each, data, gradient in whole:
            each.grad = None
            each.data = self._own(data)
            each.grad = None if gradient is None else self._own(gradient)
        try:
            yield
        finally:
            for each, data, gradient in whole:
                each.grad = None
                each.data = data
                each.grad = gradient

    def _own(self, value: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return the rows of a tensor that a rank has, of this one by default."""
        piece = self.piece if rank is None else Piece(rank, self.piece.of)
        first, end = rows_of(len(value), piece)
        return value.detach()[first:end]

    @torch.no_grad()
    def _gather(self, weights: Iterable[torch.Tensor]) -> None:
        """Overwrite all rows of these weights with those of the ranks that have them."""
        if self._peers.alone:
            return
        for block in _blocks(each.detach() for each in weights):
            size = sum(self._own(each, 0).numel() for each in block)  # no rank has more
            flat = torch.cat([self._own(each).reshape(-1) for each in block])
            own = flat.new_zeros(size)
            own[: len(flat)] = flat
            rows = own.new_empty(self.piece.of * size)
            self._peers.start_all_gather(rows, own).wait()
            for rank, at in enumerate(range(0, len(rows), size)):
                for part in (self._own(each, rank) for each in block):
                    part.copy_(rows[at : at + part.numel()].view(part.shape))
                    at += part.numel()


def _blocks(weights: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield weights that are gathered together: of one dtype in a row, and not too many."""
    for _, alike in groupby(weights, lambda each: each.dtype):
        block: list[torch.Tensor] = []
        num_bytes = 0
        for each in alike:
            block.append(each)
            num_bytes += each.nbytes
            if num_bytes >= _BLOCK_BYTES:
                yield block
                block, num_bytes = [], 0
        if block:
            yield block
