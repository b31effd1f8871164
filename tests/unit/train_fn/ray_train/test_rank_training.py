"""Which device a rank uses, and what its error carries."""

from __future__ import annotations

import pytest
import ray.train.torch
import torch

from train_fn.node.secrets import Redactor
from train_fn.ranks import rank
from train_fn.ray_train import user_function
from train_fn.recovery.evidence import RankError


@pytest.mark.parametrize(("num_visible", "expected"), [(2, "cuda:1"), (1, "cuda:0")])
def test_a_rank_that_used_cuda_before_its_neighbours_were_shared_finds_its_own_gpu(
    num_visible: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    user_function._device.cache_clear()
    found = [str(user_function._device(use_gpu=use_gpu)) for use_gpu in (True, False)]
    assert found == [expected, "cpu"]


def failure_of(exc: Exception, monkeypatch: pytest.MonkeyPatch) -> RankError:
    monkeypatch.setattr(rank, "unheard_hosts", lambda: ("10.0.0.3",))
    redactor = Redactor()
    redactor.learn(["hunter2"])
    error: RankError = rank._failure(exc, 1, lambda: torch.device("cpu"), redactor).error
    return error


def test_an_error_of_the_device_takes_what_its_node_says_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = failure_of(torch.AcceleratorError("CUDA error: unspecified launch"), monkeypatch)
    assert found.device is not None and found.device["faults"] == []
    assert failure_of(ValueError("hunter2"), monkeypatch).device is None


def test_an_error_says_which_hosts_were_not_heard_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = failure_of(ValueError("the key is hunter2"), monkeypatch)
    assert found.unheard == ("10.0.0.3",)
    assert "hunter2" not in found.message + found.traceback
