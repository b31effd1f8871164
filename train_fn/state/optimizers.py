"""Several optimizers in the form of one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from train_fn.errors import BadTask

_NAME = "everstep_optimizer"
"""In a saved group: the name of its optimizer."""


class Optimizers:
    """Look like one optimizer whose groups are those of all, in order. So checkpoints, learning
    rates and checks need not know how many there are.

    Its ``state_dict`` has the form of torch's. Parameters are numbered over all optimizers.
    """

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        self.by_name = dict(by_name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the live groups of all optimizers."""
        return [group for each in self.by_name.values() for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers as that of one. Tensors are live."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for name, optimizer in self.by_name.items():
            own = optimizer.state_dict()
            state |= {first + number: values for number, values in own["state"].items()}
            for group in own["param_groups"]:
                numbers = [first + number for number in group["params"]]
                groups.append({**group, "params": numbers, _NAME: name})
            first += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises BadTask if it is of other optimizers."""
        saved = [group.get(_NAME) for group in state["param_groups"]]
        own = [name for name, each in self.by_name.items() for _ in each.param_groups]
        if saved != own:
            raise BadTask(
                f"build_optimizer returned the optimizers {sorted(self.by_name)}, with "
                f"{len(own)} parameter groups in all, but the state holds those of "
                f"{sorted({str(name) for name in saved})}, with {len(saved)} groups. Return the "
                "same, in the same order, or start a new run"
            )
        groups, first = iter(state["param_groups"]), 0
        for optimizer in self.by_name.values():
            its = [dict(each) for each in itertools.islice(groups, len(optimizer.param_groups))]
            size = sum(len(group["params"]) for group in its)
            for group in its:
                del group[_NAME]
                group["params"] = [number - first for number in group["params"]]
            values = {
                number - first: each
                for number, each in state["state"].items()
                if first <= number < first + size
            }
            optimizer.load_state_dict({"state": values, "param_groups": its})
            first += size


def each_of(optimizer: torch.optim.Optimizer | Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name; the name of a single one is empty."""
    return optimizer.by_name if isinstance(optimizer, Optimizers) else {"": optimizer}
