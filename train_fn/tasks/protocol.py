"""What a task is: a plain class that says what is trained on what. Everstep calls it on every
rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from train_fn.errors import BadTask

Sum = torch.Tensor | float | int
"""A sum over a micro-batch; a tensor has no dimensions."""


class Task(Protocol):
    """The part that every task has, but for ``loss``, which one with ``training_step`` may leave
    out. Optional methods: ``metrics``, ``build_metrics``, ``training_step``, ``build_optimizer``,
    ``build_scheduler``, ``after_step``, ``collate``, ``on_epoch_end``, ``state_dict`` and
    ``load_state_dict``. Optional attributes: ``validation_loss``, ``count_flops``,
    ``flops_per_sample`` and ``tokens_per_sample``."""

    def build_model(self) -> nn.Module:
        """The model on CPU; its weights may be drawn from torch's global generator, which is
        seeded."""

    def build_datasets(self) -> dict[str, Any]:
        """``{"train": dataset, "val": dataset or None}``, map-style or iterable; a ``fingerprint``
        attribute guards resumes."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Sum]:
        """(loss summed over the micro-batch, weight: how many samples or tokens it is a sum
        over). It gets ``step`` and ``epoch`` by name if it has such parameters."""


# ---------------------------------------------------------------- batch objects

# Refuse data sets whose items are whole batches: a DataLoader, a sampler, or an iterable around
# one.

_LOADERS = frozenset(
    {
        "DataLoader",
        "DataLoader2",
        "StatefulDataLoader",
        "_BaseDataLoaderIter",
        "WebLoader",
        "_DaliBaseIterator",
        "DALIGenericIterator",
    }
)
"""Classes that yield batches, by name: most are of packages that need not be installed."""

_WAY_OUT = (
    "Everstep batches, shuffles and divides samples itself (train.global_batch_size, "
    "train.micro_batch_size) and reads them by "
    "processes of its own (train.loader). A collate_fn becomes the task's method collate"
)


def refuse_batches(source: str, dataset: Any, *, iterable: bool) -> None:
    """Raise BadTask where ``dataset`` yields batches or indices instead of samples.

    Args:
        source: What made it, in words.
        dataset: What was returned as a data set.
        iterable: Whether it is read from one end to the other. What one that is read by index holds
            inside is its own business.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, list | tuple) and dataset and _is_loader(dataset[0]):
        first = type(dataset[0]).__name__
        raise BadTask(
            f"{source} is a {kind} of {first}: return torch.utils.data.ConcatDataset of their "
            f"data sets. {_WAY_OUT}"
        )
    if _is_loader(dataset):
        raise BadTask(
            f"{source} is a {kind}, which yields batches: return loader.dataset. {_WAY_OUT}"
        )
    if isinstance(dataset, Sampler) or hasattr(dataset, "batch_sampler"):
        raise BadTask(
            f"{source} is a {kind}, which gives indices and no samples: return the data set that "
            f"it draws from. {_WAY_OUT}"
        )
    held = vars(dataset).values() if iterable and hasattr(dataset, "__dict__") else ()
    loader = next((value for value in held if isinstance(value, DataLoader)), None)
    if loader is not None and _is_batch(_first_of(dataset), loader.batch_size):
        raise BadTask(
            f"{source} is a {kind} around a DataLoader, and its first item is a batch of "
            f"{loader.batch_size}: return the loader's "
            f"data set. {_WAY_OUT}"
        )


def _is_loader(value: Any) -> bool:
    return any(cls.__name__ in _LOADERS for cls in type(value).__mro__)


def _first_of(dataset: Any) -> Any:
    """Return the first item; None if reading it would consume it."""
    try:
        return next(iter(copy.deepcopy(dataset)), None)
    except Exception:
        return None if isinstance(dataset, Iterator) else next(iter(dataset), None)


def _is_batch(item: Any, size: int | None) -> bool:
    """Return whether all tensors of ``item`` have a first dimension of a loader's batch size."""
    lengths = {len(tensor) if tensor.ndim else 0 for tensor in _tensors_in(item)}
    return size is not None and lengths == {size}


def _tensors_in(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict | list | tuple):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _tensors_in(value)
