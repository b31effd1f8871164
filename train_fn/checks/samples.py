"""Samples and data sets that code of the task changes, so that each rank, and each loader process,
would train on changes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from train_fn.checks.check import Check, Moment, checked
from train_fn.errors import BadTask
from train_fn.samples.loader import data_sets_in
from train_fn.state.contents import Sketch, alike, few, sketch
from train_fn.step.plain_attributes import PlainAttributes

Batches = Callable[[], Generator[tuple[int, Any]]]


@checked(Moment.FIRST_PASS, Moment.TRIED, cost="a sketch of one batch")
def require_samples_kept(
    source: str, loaded: Sketch, batch: Any, read: Callable[[], Sketch]
) -> None:
    """Raise BadTask if code has changed ``batch`` in place, and the data set along with it.

    Args:
        source: name of the code.
        loaded: sketch of the batch as it was loaded.
        read: reads the same samples again.
    """
    if alike(loaded, sketch(batch)):
        return
    # Read twice: a data set that draws from a generator of its own is never the same.
    again, once_more = read(), read()
    if alike(again, once_more) and not alike(again, loaded):
        raise BadTask(
            f"{source} changes its batch in place, and with it the samples: "
            "the batch shares memory with the data set. Work on a copy, x = x.clone(), or copy "
            "samples in collate"
        )


def with_samples_kept(source: str, read: Batches) -> Generator[tuple[int, Any]]:
    """Yield what ``read`` yields, and require of each batch that its samples are kept."""
    with closing(read()) as batches:
        for number, batch in batches:
            loaded = sketch(batch)
            yield number, batch
            require_samples_kept(source, loaded, batch, lambda: _sketch_of_first(read))


def _sketch_of_first(read: Batches) -> Sketch:
    with closing(read()) as batches:
        return sketch(next(batches)[1])


class DataKept(Check):
    """Refuse an ``on_epoch_end`` that changes the training data."""

    costs = dict.fromkeys((Moment.EPOCH_HOOK,), "a copy of the data sets' plain attributes")

    def __init__(self, train_set: Any) -> None:
        self._root = getattr(train_set, "dataset", train_set)
        self._before = PlainAttributes({})

    def before(self, moment: Moment) -> None:
        found = [e for e in data_sets_in(self._root, set()) if not hasattr(e, "set_epoch")]
        self._before = PlainAttributes({type(each).__name__: each for each in found})

    def after(self, moment: Moment, source: str) -> None:
        if changed := self._before.changed():
            raise BadTask(
                f"{source} changes {few(changed)} of the training data: "
                "loader processes have copies of their own, and a restart begins with the first "
                "values. Give the data set a method set_epoch(epoch) that makes what the epoch "
                "needs; it is called in every process that reads"
            )
