"""Reads of a few samples in the rank's own process, before loader processes are forked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset


@contextmanager
def left_as_built(datasets: Iterable[Any]) -> Iterator[None]:
    """Put the attributes of data sets, and of those inside them, back after the reads inside.

    A file that it opens at its first read would be inherited by all loader processes, which share
    its position: they would read each other's samples.
    """
    seen = set[int]()
    owners = [owner for dataset in datasets for owner in _data_sets_in(dataset, seen)]
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            now = vars(owner)
            for key in [key for key in now if key not in attributes]:
                del now[key]
            now.update(attributes)


def _data_sets_in(dataset: Any, seen: set[int]) -> Iterator[Any]:
    """``dataset``, and the data sets that it or its lists hold: a ``Subset`` holds one."""
    if id(dataset) in seen or not hasattr(dataset, "__dict__"):
        return
    seen.add(id(dataset))
    yield dataset
    for value in list(vars(dataset).values()):
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Dataset):
                yield from _data_sets_in(each, seen)
