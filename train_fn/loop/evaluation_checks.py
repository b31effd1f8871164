"""Refuse evaluations that change the weights, or the samples that they measure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from train_fn.errors import BadTask
from train_fn.loop.replica import Replica
from train_fn.state.contents import Sketch, alike, sketch
from train_fn.tasks.checks import where


def require_weights_unchanged(replica: Replica, before: list[int]) -> None:
    """Raise BadTask if evaluation changed what is trained. Each rank measures other micro-batches,
    so ranks would train different models from then on."""
    replica.trained.check_values(
        before,
        _measuring(replica.task),
        "Each rank evaluates a part of the data, so ranks would train different models from then "
        "on. Work on a copy of the model, or change weights in on_epoch_end",
    )


def with_samples_unchanged(
    task: Any, read: Callable[[], Generator[tuple[int, Any]]]
) -> Generator[tuple[int, Any]]:
    """Yield what ``read`` yields. Raise BadTask if the caller changes a batch in place, and with it
    the samples of the data set: every evaluation would measure other data."""
    with closing(read()) as batches:
        for number, batch in batches:
            loaded = sketch(batch)
            yield number, batch
            if not alike(loaded, sketch(batch)) and _reads_changed(read, loaded):
                raise BadTask(
                    f"{_measuring(task)} changes its batch in place, "
                    "and with it the samples: the batch shares memory with the data set. "
                    "Work on a copy, x = x.clone(), or copy samples in collate"
                )


def _reads_changed(read: Callable[[], Generator[tuple[int, Any]]], loaded: Sketch) -> bool:
    """Whether the same samples, read again, are others than ``loaded``. A data set that draws from
    a generator of its own is never the same, so they are read twice."""
    again, once_more = (_sketch_of_first(read) for _ in range(2))
    return alike(again, once_more) and not alike(again, loaded)


def _sketch_of_first(read: Callable[[], Generator[tuple[int, Any]]]) -> Sketch:
    with closing(read()) as batches:
        return sketch(next(batches)[1])


def _measuring(task: Any) -> str:
    name = "metrics" if hasattr(task, "metrics") else "loss"
    return f"{where(task, name)}, called to evaluate the model,"
