"""A DataLoader, a sampler and what is built around them are no data sets; what only looks like one
of them is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from train_fn.checks.returns import checked_datasets
from train_fn.errors import BadTask

POINTS = TensorDataset(torch.arange(320.0), torch.arange(320))
LOADER = DataLoader(POINTS, batch_size=16, shuffle=True)


class DataLoader2:
    """Has the name of torchdata's, which is no DataLoader of torch's."""

    def __iter__(self) -> Iterator[Any]:
        return iter(LOADER)


class Shard(DataLoader[Any]):
    """As accelerate's is."""


class Around(IterableDataset[Any]):
    """Whole batches of a loader that it keeps."""

    def __init__(self, loader: DataLoader[Any] = LOADER) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return 20


class Unbatched(Around):
    """The samples of a loader that it keeps, one by one."""

    def __iter__(self) -> Iterator[Any]:
        for points, labels in self.loader:
            yield from zip(points, labels, strict=True)


class Chunked(IterableDataset[Any]):
    """Samples that are as long as a number of its own called batch_size."""

    batch_size = 16

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.arange(16) for _ in range(20))


class Cached:
    """By index, from a loader that it keeps."""

    def __init__(self) -> None:
        self.loader = LOADER

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(16), index


class Task:
    def __init__(self, train: Any, val: Any = None) -> None:
        self._datasets = {"train": train, "val": val}

    def build_datasets(self) -> dict[str, Any]:
        return self._datasets


def taken(task: Task) -> dict[str, Any]:
    return checked_datasets(task, task.build_datasets())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (
            LOADER,
            (
                r"train is a DataLoader, which yields batches: return loader\.dataset\. Everstep "
                r"batches, shuffles"
            ),
        ),
        (Shard(POINTS), "train is a Shard, which yields batches"),
        (DataLoader2(), "train is a DataLoader2, which yields batches"),
        (
            iter(LOADER),
            "train is a _SingleProcessDataLoaderIter, which yields batches: return loader",
        ),
        (
            [LOADER, LOADER],
            r"train is a list of DataLoader: return torch\.utils\.data\.ConcatDataset",
        ),
        (RandomSampler(POINTS), "train is a RandomSampler, which gives indices and no samples"),
        (
            BatchSampler(RandomSampler(POINTS), 4, False),
            "train is a BatchSampler, which gives indices and no samples",
        ),
        (
            Around(),
            (
                "train is a Around around a DataLoader, and its first item is a batch of 16: "
                "return "
                "the loader's data set"
            ),
        ),
    ],
)
def test_what_yields_batches_is_refused_with_the_way_out(dataset: Any, words: str) -> None:
    with pytest.raises(
        BadTask, match=rf"Task\.build_datasets \(.*test_batch_objects\.py, line \d+\): {words}"
    ):
        taken(Task(dataset))
    with pytest.raises(BadTask, match=r"build_datasets .*: val is a"):
        taken(Task(POINTS, dataset))


@pytest.mark.parametrize(
    "dataset",
    [
        POINTS,
        ConcatDataset([POINTS, POINTS]),
        Unbatched(),
        Chunked(),
        Cached(),
        [(1, 2), (3, 4)],
        Around(DataLoader(POINTS, batch_size=None)),
    ],
)
def test_what_yields_samples_is_taken(dataset: Any) -> None:
    assert taken(Task(dataset))["train"] is dataset
