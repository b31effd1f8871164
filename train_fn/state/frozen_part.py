"""The frozen parameters of a model, which a run's states may leave out: the task builds them anew
in every attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from train_fn.errors import BadTask
from train_fn.state.contents import few
from train_fn.step.word_sums import word_sum

_WAY_OUT = "Set checkpoint.parameters to all, or keep what changes in a buffer"


class FrozenPart:
    """Know the names and the contents of the parameters that are not trained, by their names in the
    model's ``state_dict``."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {
            name: value
            for name, value in model.named_parameters(remove_duplicate=False)
            if not value.requires_grad and not is_lazy(value)
        }
        trained = {
            value.untyped_storage().data_ptr()
            for value in model.parameters()
            if value.requires_grad and not is_lazy(value)
        }
        for name, value in list(self._parameters.items()):
            if value.untyped_storage().data_ptr() in trained:  # changes with them
                del self._parameters[name]
        self.sums = sums_of(self._parameters, self._parameters)
        """Sums of the words of each parameter, as the task built it."""
        self._marks = self._present_marks()

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def without(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``weights`` that are not frozen."""
        return {name: value for name, value in weights.items() if name not in self._parameters}

    def require_none(self, names: Iterable[str]) -> None:
        """Raise BadTask if a forward pass changes one of these parameters."""
        if changed := [name for name in names if name in self._parameters]:
            raise BadTask(
                f"forward changes frozen parameters: {few(changed)}. With checkpoint.parameters: "
                f"trainable no checkpoint holds them. {_WAY_OUT}"
            )

    def require_unchanged(self, *, thorough: bool) -> None:
        """Raise BadTask if a frozen parameter has other contents than as it was built.

        Args:
            thorough: whether to read all of them. Else only those are read that torch knows to be
                written to.
        """
        marks = self._present_marks()
        suspects = [name for name in marks if thorough or marks[name] != self._marks[name]]
        if not suspects:
            return
        now = sums_of(self._parameters, suspects)
        if changed := [name for name in suspects if now[name] != self.sums[name]]:
            raise BadTask(
                f"frozen parameters have changed since the model was built: {few(changed)}. With "
                f"checkpoint.parameters: trainable no checkpoint holds them. {_WAY_OUT}"
            )
        self._marks = marks

    def _present_marks(self) -> dict[str, tuple[int, int]]:
        return {
            name: (value._version, value.data_ptr()) for name, value in self._parameters.items()
        }


def sums_of(weights: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Return the sums of the words of the named tensors that are among ``weights``."""
    return {
        name: word_sum(weights[name])
        for name in names
        if isinstance(weights.get(name), torch.Tensor)
    }


def other_base(saved: Mapping[str, int], own: Mapping[str, Any]) -> list[str]:
    """Return the frozen parameters that a state leaves out and that ``own``, a model's
    ``state_dict``, has not or has with other contents.

    Args:
        saved: the sums that the state holds in their place.
    """
    now = sums_of(own, saved)
    return [name for name, value in saved.items() if now.get(name) != value]
