"""Let a model take over the memory of a restored state, in place of a copy.

To copy a large state into memory that a new process has not used yet takes longer than to read it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

_WORTH_IT = 1 << 20
"""Bytes from which a parameter takes over memory."""


def adopt(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Let frozen parameters of ``model`` take over the memory of the tensors of their names.
    Loading ``saved`` then copies nothing into them.

    Only those that nothing else shares memory with: a view, or an array, would go on to show what
    was there before. One that is trained is written at each step, and would have its pages copied
    then, one by one.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    names = Counter(map(id, own.values()))
    for name, value in model.state_dict(keep_vars=True).items():
        parameter = own.get(name)
        if (
            parameter is value
            and name in saved
            and names[id(parameter)] == 1
            and _may_take_over(parameter, saved[name])
        ):
            parameter.data = saved[name]


def _may_take_over(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    return (
        type(parameter) is nn.Parameter
        and type(value) is torch.Tensor
        and not parameter.requires_grad
        and parameter.nbytes >= _WORTH_IT
        and (parameter.shape, parameter.dtype, parameter.device, parameter.stride())
        == (value.shape, value.dtype, value.device, value.stride())
        and value.is_cpu
        and _has_memory_alone(parameter)
        and value.untyped_storage().nbytes() == value.nbytes
    )


def _has_memory_alone(parameter: nn.Parameter) -> bool:
    """Whether as many use its memory as that of a new parameter."""
    new = nn.Parameter(torch.empty(1), requires_grad=False)
    return parameter.untyped_storage().nbytes() == parameter.nbytes and (
        _users(parameter) == _users(new) != (0, 0)
    )


def _users(parameter: nn.Parameter) -> tuple[int, int]:
    """Return how many tensors and how many Python objects hold its memory; zeros where this torch
    does not tell."""
    storage = parameter.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    return (count(storage._cdata), sys.getrefcount(storage)) if count else (0, 0)
