"""A loader process that is killed is a lost process, and no error of the data set, whatever torch
happens to see of it first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from everstep.wire import ErrorKind
from tests.support.service_process import wait_for
from train_fn.recovery.evidence import describe_error


class Tensors(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 500:
            raise FileNotFoundError("sample 500 is not there")
        return torch.full((1000,), float(index))


def first_error(loader: Any) -> BaseException:
    try:
        for _ in loader:
            pass
    except Exception as exc:
        return exc
    raise AssertionError("nothing was raised")


def kill_while_it_hands_over(monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """The kernel has ended the process, and has not told its parent yet."""
    loader: Any = iter(DataLoader(Tensors(), batch_size=None, num_workers=1))
    next(loader)
    [process] = loader._workers
    wait_for(loader._data_queue._reader.poll, 60, "a batch made ahead")
    process.kill()
    process.join()
    with monkeypatch.context() as patched:
        patched.setattr(type(process), "is_alive", lambda _: True)
        return first_error(loader)


def in_a_thread(function: Any, *arguments: Any) -> Any:
    """As ranks train: torch hears of dead loader processes by a signal in the main thread only."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def test_a_loader_process_that_dies_while_it_hands_over_a_batch_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = in_a_thread(kill_while_it_hands_over, monkeypatch)
    assert isinstance(error, OSError | EOFError), repr(error)
    assert describe_error(error, 0).kind is ErrorKind.LOADER_LOST


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_the_data_set_does_not_find_is_its_users(num_workers: int) -> None:
    loader = DataLoader(Tensors(), batch_size=None, num_workers=num_workers)
    error = in_a_thread(first_error, loader)
    assert isinstance(error, FileNotFoundError)
    assert describe_error(error, 0).kind is ErrorKind.USER
