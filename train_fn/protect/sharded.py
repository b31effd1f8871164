"""What ``es.protect`` takes of a model that FSDP2's ``fully_shard`` has sharded: which part of it
this rank has, and what is refused. Its state is in ``train_fn/state/sharded.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from train_fn.errors import BadTask
from train_fn.state.pieces import Piece, rows_of
from train_fn.state.sharded import UNSHARDED, is_cut, shards_in
from train_fn.state.tensor_tree import leaves

USE_FSDP2 = (
    "Use FSDP2: torch.distributed.fsdp.fully_shard, fsdp_version=2 of Accelerate, version 2 in the "
    "fsdp_config of Hugging Face, or ModelParallelStrategy of Lightning"
)
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
