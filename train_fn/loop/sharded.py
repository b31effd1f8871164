"""A task's model that is sharded over the ranks (``train.sharding``): which of its modules are
gathered one at a time, and what is refused.

FSDP2 gathers a module's weights before its passes, and sums its gradients over ranks after the
backward pass, so that each rank gets its own rows. What the ranks say of a step follows in one
exchange of rows, with each rank's part of the gradients' norm. It is the gate: no collective lies
between it and the end of the optimizer step.

With ``hybrid`` the ranks of each node hold all pieces. FSDP2 sums gradients over the nodes as well,
and gates compare the pieces of all nodes. With ``optimizer`` DDP sums the gradients, and only the
optimizer's values are in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from everstep.spec.run_spec import RunSpec
from train_fn.checks.check import Moment, checked
from train_fn.checks.fits import hooked_parameters
from train_fn.checks.order import CallOrder, met_by_all
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, few
from train_fn.node.device import kernels
from train_fn.state.optim import Optimizers
from train_fn.state.pieces import Piece, group_size
from train_fn.step.fingerprints import local
from train_fn.step.peers import Peers
from train_fn.tasks.protocol import Task, is_iterable, where

if TYPE_CHECKING:
    from train_fn.state.sharded import OptimizerShards, Shards

OWN_CHOICE = "shard_modules"
"""The optional method of a task that returns the modules to gather one at a time."""
_OR = "or set train.sharding to none"

# ---------------------------------------------------------------- modules

_LARGEST, _SMALLEST = 4, 64
"""A module of more than a fourth of all weights is taken apart, and one of less than a 64th stays
with the module around it."""


def modules_by_size(model: nn.Module) -> list[nn.Module]:
    """Return modules to gather one at a time, so that a rank holds a part of the model only. What
    is in none of them is gathered with the model as a whole.

    Weights that are used in several places stay out, as do modules whose weights torch uses
    without calling them.
    """
    total, places = _num_weights(model), _places_in(model)

    def is_apart(module: nn.Module) -> bool:
        return all(places[key] == count for key, count in _places_in(module).items())

    def chosen(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            size = _num_weights(child)
            if size * _SMALLEST < total or isinstance(child, nn.ParameterList | nn.ParameterDict):
                continue
            is_atom = isinstance(child, nn.MultiheadAttention) or not any(child.children())
            is_large = size * _LARGEST > total and not is_atom
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or is_large:
                yield from chosen(child)
            elif is_apart(child):
                yield child

    return list(dict.fromkeys(chosen(model)))


def _places_in(module: nn.Module) -> Counter[int]:
    """Return in how many places of a module each parameter is, by id."""
    return Counter(
        id(value)
        for each in module.modules()
        for value in each._parameters.values()
        if value is not None
    )


def _num_weights(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def modules_to_shard(task: Task, model: nn.Module) -> list[nn.Module]:
    """Return the modules that the task wants to be gathered one at a time, or those of a fitting
    size. Inner ones come first. Raises BadTask for what is none of the model's."""
    choose = getattr(task, OWN_CHOICE, None)
    inside = list(model.modules())
    if choose is None:
        found = modules_by_size(model)
    else:
        found = list(choose(model))
        known = {id(each) for each in inside}
        if not all(id(each) in known for each in found):
            raise BadTask(
                f"{where(task, OWN_CHOICE)} returned something else than modules of the model; "
                "return some of model.modules()"
            )
        if lists := [each for each in found if isinstance(each, nn.ModuleList | nn.ModuleDict)]:
            raise BadTask(
                f"{where(task, OWN_CHOICE)} returned a {type(lists[0]).__name__}, which is never "
                "called itself; return the modules in it"
            )
    wanted = {id(each) for each in found} - {id(model)}
    return [each for each in reversed(inside) if id(each) in wanted]


def torn_ties(model: nn.Module, chosen: Sequence[nn.Module]) -> list[str]:
    """Return the names of weights that two of the chosen modules share, or one with the rest."""
    names = {id(each) for each in chosen}
    owners: dict[int, set[int]] = {}
    found = []

    def visit(module: nn.Module, owner: int, prefix: str) -> None:
        owner = id(module) if id(module) in names else owner
        for key, value in module._parameters.items():
            if value is not None:
                owners.setdefault(id(value), set()).add(owner)
                if len(owners[id(value)]) > 1:
                    found.append(f"{prefix}{key}")
        for key, child in module.named_children():
            visit(child, owner, f"{prefix}{key}.")

    visit(model, id(model), "")
    return found


def require_rows(spec: RunSpec, task: Task, model: nn.Module, *methods: str) -> None:
    """Raise BadTask for a model whose weights cannot be cut into rows, and for a task with one of
    these methods."""
    built = where(task, "build_model")
    for method in ("training_step", *methods):
        if callable(getattr(task, method, None)):
            raise BadTask(
                f"{where(task, method)} does not go with train.sharding {spec.train.sharding}: it "
                f"would meet other ranks in the middle of a step. Leave it out, {_OR}"
            )
    for name, value in model.named_parameters():
        if hasattr(value, "device_mesh"):
            raise BadTask(
                f"{name} of {built} is a DTensor already; return the model as it is before "
                f"fully_shard, {_OR}"
            )
        if not value.ndim or not value.numel():
            problem = "dimension" if value.numel() else "element"
            raise BadTask(
                f"{name} of {built} has no {problem} to shard; make it a tensor of shape (1,), "
                f"{_OR}"
            )
    if any(getattr(module, "sparse", False) for module in model.modules()):
        raise BadTask(f"{built} returned sparse embeddings: make them with sparse=False, {_OR}")


def require_shardable(spec: RunSpec, task: Task, model: nn.Module, val_set: Any) -> None:
    """Raise BadTask for a task whose model cannot be sharded."""
    require_rows(spec, task, model, "after_step")
    built = where(task, "build_model")
    if val_set is not None and is_iterable(val_set):
        raise BadTask(
            f"the val set of {where(task, 'build_datasets')} is iterable, so ranks could not "
            f"evaluate a sharded model in step. Give it __len__ and __getitem__, {_OR}"
        )
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise BadTask(
            f"{built} returned a {type(model).__name__}, which is never called itself. Return a "
            f"module with forward, {_OR}"
        )
    if hooked := hooked_parameters(model):
        raise BadTask(
            f"{built} put gradient hooks on {few(hooked)}, which a sharded weight loses. Use "
            f"train.grad_clip_norm, or a hook of the optimizer's, {_OR}"
        )


def shard_model(ctx: WorkerContext, task: Task, model: nn.Module, val_set: Any) -> Shards:
    """Shard a model over all ranks, in place. A collective. Raises BadTask."""
    from torch.distributed.device_mesh import init_device_mesh  # both take half a second
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from train_fn.state.sharded import Shards, copied_weights, units_in

    require_shardable(ctx.spec, task, model, val_set)
    chosen = modules_to_shard(task, model)
    if torn := torn_ties(model, chosen):
        raise BadTask(
            f"{few(torn)} of {where(task, 'build_model')} is tied to a weight of another module "
            f"that is gathered by itself. Let {OWN_CHOICE} return neither of the two, {_OR}"
        )
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):  # it keeps a view until the first pass
                setattr(module, hook.name, getattr(module, hook.name).clone())
    whole = dict(model.named_parameters())
    for value in whole.values():
        value.data = value.data.contiguous()  # as FSDP2 wants it; the values are the same
    of = _num_pieces(ctx)
    shape = (ctx.world_size,) if of == ctx.world_size else (ctx.world_size // of, of)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    if ctx.spec.train.precision == "bf16":
        for module in model.modules():
            if isinstance(module, _NormBase) and module.affine:
                fully_shard(module, mesh=mesh)  # beside statistics in float32 no weight is bf16
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*chosen, model]:
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    _require_one_dtype(task, model)
    if copied := copied_weights(model):
        raise BadTask(
            f"state_dict() of {where(task, 'build_model')} returns copies of {few(copied)}, and a "
            "sharded model is restored into what it returns. Let it return the weights "
            f"themselves, {_OR}"
        )
    for module in chosen if ctx.spec.train.compile else ():
        # The forward pass alone: what gathers, and what looks at it, stay around it.
        if len(units_in([module])) == 1:
            module.forward = torch.compile(module.forward)
    return Shards(model, Piece(ctx.world_rank % of, of), whole)


def _require_one_dtype(task: Task, model: nn.Module) -> None:
    """Raise BadTask if weights that are gathered together are trained in several dtypes."""
    from torch.distributed.fsdp import FSDPModule

    from train_fn.state.sharded import groups_of

    for name, module in model.named_modules():
        for group in groups_of(module) if isinstance(module, FSDPModule) else ():
            dtypes = {
                str(each.sharded_param.dtype): each._module_info.param_name
                for each in group.fsdp_params
                if each.sharded_param.requires_grad
            }
            if len(dtypes) > 1:
                raise BadTask(
                    f"{name or 'the model'} of {where(task, 'build_model')} trains weights of "
                    f"{' and '.join(sorted(dtypes))}, which are gathered together. Let "
                    f"{OWN_CHOICE} return the modules of each dtype, {_OR}"
                )


def _num_pieces(ctx: WorkerContext) -> int:
    """Return over how many ranks the model is cut. A collective."""
    if ctx.spec.train.sharding == "full":
        return ctx.world_size
    peers = Peers(ctx.world_rank, ctx.world_size, ctx.device)
    nodes, kinds = zip(*peers.gather((ctx.node_id, kernels(ctx.device))), strict=True)
    # Other kernels round differently, so replicas would go apart.
    return group_size(nodes) if len({*kinds}) == 1 else ctx.world_size


def as_if_full(ctx: WorkerContext, shards: Shards) -> list[str]:
    """Return a warning if ``hybrid`` cuts the model over several nodes."""
    if ctx.spec.train.sharding != "hybrid" or shards.piece.of < ctx.world_size or ctx.num_nodes < 2:
        return []
    return [
        "train.sharding is hybrid, which needs equally many ranks on each node, two at least, and "
        f"equal processors and libraries: the model is cut over all {ctx.world_size} ranks, as "
        "with full"
    ]


def require_elementwise(optimizer: torch.optim.Optimizer | Optimizers, source: str) -> None:
    """Raise BadTask for an optimizer whose state cannot be cut as the weights are."""
    from train_fn.state.sharded import UNSHARDED

    kind = type(optimizer).__name__
    if kind in UNSHARDED or isinstance(optimizer, Optimizers):
        raise BadTask(
            f"{source} is of the class {kind}, whose state cannot be cut as the weights are. Use "
            f"AdamW, Adam or SGD, {_OR}"
        )


_BY_ELEMENTS = ("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
"""Optimizers of torch that update each element by itself, and begin without a state."""


def shard_optimizer(
    ctx: WorkerContext,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Optimizers,
    source: str,
) -> OptimizerShards:
    """Shard an optimizer over all ranks. Raises BadTask for one that must see more of a weight than
    some rows: it would compute something else without an error."""
    from train_fn.state.sharded import OptimizerShards

    require_rows(ctx.spec, task, model)
    kind = type(optimizer)
    if kind not in [getattr(torch.optim, name) for name in _BY_ELEMENTS]:
        raise BadTask(
            f"{source} is of the class {kind.__name__}, and train.sharding optimizer lets it see "
            f"some rows of each weight only. Use one of torch's {', '.join(_BY_ELEMENTS)}, {_OR}"
        )
    assert isinstance(optimizer, torch.optim.Optimizer)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise BadTask(
            f"{source} has hooks of its step, and train.sharding optimizer lets them see some rows "
            f"of each weight only. Remove them, {_OR}"
        )
    if any(optimizer.state.values()):
        raise BadTask(
            f"{source} has a state already, of whole weights. Build it anew in build_optimizer, "
            f"{_OR}"
        )
    return OptimizerShards(model, Peers(ctx.world_rank, ctx.world_size, ctx.device))


# ---------------------------------------------------------------- first pass

# FSDP2 gathers a module's weights before its passes, and gives them up afterwards. Code that does
# not know that would fail in words of torch's, or change copies without an error.


@checked(Moment.FIRST_PASS, cost="none")
def read_past_a_call(error: Exception | str, task: Task) -> BadTask | None:
    """Return the error for passes that use weights that were not gathered; None for another one."""
    if "DTensor" in str(error):
        return BadTask(
            f"{where(task, 'loss')} uses weights of a sharded module without calling that module: "
            f"{error!s:.300}. Call the model itself, and let {OWN_CHOICE} return modules that are "
            f"called, {_OR}"
        )
    if "storage of size 0" in str(error):
        return BadTask(
            f"the backward pass of {where(task, 'loss')} needs weights of a sharded module that "
            "are not gathered: torch.autograd.grad took a gradient through it before, or its "
            "output was changed in place, or is in an object that torch does not look into. "
            f"Return tensors, tuples, dicts or dataclasses, write y = y + x for y += x, {_OR}"
        )
    return None


@contextmanager
def passes_named(task: Task) -> Iterator[None]:
    """Raise ``read_past_a_call`` in place of torch's errors."""
    try:
        yield
    except RuntimeError as exc:
        refused = read_past_a_call(exc, task)
        if refused is None:
            raise
        raise refused from exc


@checked(Moment.FIRST_PASS, cost="four reads of all weights")
class GatheredWeights:
    """Refuse a first pass that writes into weights, and find out whether it calls all modules.

    What is written into gathered weights is lost, and a rank writes into its own rows as often as
    it makes passes.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._before: dict[nn.Module, dict[str, int]] = {}
        self._written: set[str] = set()

    @property
    def were_all_called(self) -> bool:
        """Return whether each module that is gathered by itself was called."""
        return self._before.keys() == {*self._shards.units}

    @contextmanager
    def watched(self, source: str) -> Iterator[None]:
        """Run a forward pass inside the block. Raises BadTask if it writes into weights."""
        units, rows = self._shards.units, self._shards.sums_of_rows()
        handles = [each.register_forward_pre_hook(self._note) for each in units]
        handles += [each.register_forward_hook(self._compare, prepend=True) for each in units]
        try:
            yield
        finally:
            for each in handles:
                each.remove()
        for unit in self._before:
            self._compare(unit)  # that of the root are gathered until the backward pass
        now = self._shards.sums_of_rows()
        self._written |= {name for name, value in rows.items() if now[name] != value}
        if self._written:
            raise BadTask(
                f"{source} writes into weights of a sharded model: {few(sorted(self._written))}. "
                "They are copies there, or rows that a rank would change once for each of its "
                f"micro-batches. Change weights in on_epoch_end, {_OR}"
            )

    def _note(self, unit: nn.Module, *_: Any) -> None:
        self._before[unit] = self._shards.sums_of_gathered(unit)

    def _compare(self, unit: nn.Module, *_: Any) -> None:
        now = self._shards.sums_of_gathered(unit)
        self._written |= {name for name, value in now.items() if self._before[unit][name] != value}


@checked(Moment.FIRST_PASS, cost="none")
def require_forgotten(shards: Shards, task: Task) -> None:
    """Raise BadTask if the weights are still in use that were sharded. Nothing trains those."""
    if kept := shards.kept_elsewhere():
        raise BadTask(
            f"code of {where(task, 'build_model')} keeps {few(kept)} beside the model: in an "
            "attribute of the task, a list or a closure. A sharded model has others in their "
            f"place, and nothing trains those. Read weights from the model when they are used, "
            f"{_OR}"
        )


# ---------------------------------------------------------------- rows


@checked(Moment.STEP, Moment.EPOCH_HOOK, cost="a look at each operation on weights")
class RowsAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse code that takes this rank's rows of a sharded weight for all of it.

    It reads a number of the rows alone, or writes into a part of the weight, which is a copy.
    """

    def __init__(self, source: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source
        self._copies = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first: Any = args[0] if args else None
        if not hasattr(first, "device_mesh"):
            return func(*args, **kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default and not all(
            each.is_replicate() for each in first.placements
        ):
            raise BadTask(
                f"{self._source} reads a number of a sharded tensor, which is that of this rank's "
                f"rows. Call .full_tensor() on all ranks before, {_OR}"
            )
        if func._schema.is_mutable and first in self._copies:
            raise BadTask(
                f"{self._source} writes into a part of a sharded weight, which is a copy and would "
                f"be lost. Change the whole weight, as by w.mul_(mask), {_OR}"
            )
        found = func(*args, **kwargs or {})
        if func.is_view and hasattr(found, "device_mesh"):
            shares = local(found).untyped_storage().data_ptr()
            if first in self._copies or shares != local(first).untyped_storage().data_ptr():
                self._copies[found] = True
        return found


@checked(Moment.STEP, Moment.EPOCH_HOOK, cost="a look at each operation on weights")
@contextmanager
def rows_alone(
    shards: Shards | None, source: str, order: CallOrder | None = None
) -> Iterator[None]:
    """Refuse inside the block what ``RowsAlone`` refuses, and other values in place of weights.

    Args:
        order: of the model's calls, if the code may meet other ranks; then it is a collective.
    """
    if shards is None:
        yield
        return
    with RowsAlone(source), met_by_all(order, source):
        yield
    shards.reshard()  # after a pass of the model
    if replaced := shards.replaced():
        raise BadTask(
            f"{source} put other values in place of {few(replaced)} by .data, which a sharded "
            f"weight ignores. Change it in place, as by fill_() or mul_(), {_OR}"
        )
