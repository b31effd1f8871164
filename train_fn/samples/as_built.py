"""Read a few samples in the rank's own process before loader processes are forked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset


@contextmanager
def left_as_built(datasets: Iterable[Any]) -> Iterator[None]:
    """Restore the attributes of data sets, and of data sets inside them, after the block.

    A data set may open a file at its first read. All loader processes would inherit that file and
    share its position, and so read each other's samples.
    """
    seen = set[int]()
    owners = [owner for dataset in datasets for owner in data_sets_in(dataset, seen)]
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            now = vars(owner)
            for key in [key for key in now if key not in attributes]:
                del now[key]
            now.update(attributes)


def data_sets_in(dataset: Any, seen: set[int]) -> Iterator[Any]:
    """Yield ``dataset`` and the data sets in its attributes and lists. A ``Subset`` holds one."""
    if id(dataset) in seen or not hasattr(dataset, "__dict__"):
        return
    seen.add(id(dataset))
    yield dataset
    for name, value in list(vars(dataset).items()):
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Dataset) or name in ("dataset", "datasets"):
                yield from data_sets_in(each, seen)
