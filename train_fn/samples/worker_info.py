"""Set what ``torch.utils.data.get_worker_info`` returns, by which iterable data sets choose their
part of the samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker as torch_worker


def is_in_loader_process() -> bool:
    """Return whether ``get_worker_info`` returns a loader process now."""
    return torch_worker._worker_info is not None


@contextmanager
def as_worker(number: int, num_workers: int, seed: int, dataset: Any) -> Iterator[None]:
    """Make ``get_worker_info`` return loader process ``number`` of ``num_workers`` inside the
    block."""
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=seed, dataset=dataset
    )
    try:
        yield
    finally:
        torch_worker._worker_info = before
