"""Which device a rank uses."""

from __future__ import annotations

import pytest
import ray.train.torch
import torch

from train_fn.ray_train import rank_training


@pytest.mark.parametrize(("num_visible", "expected"), [(2, "cuda:1"), (1, "cuda:0")])
def test_a_rank_that_used_cuda_before_its_neighbours_were_shared_finds_its_own_gpu(
    num_visible: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    assert (
        str(rank_training._device(use_gpu=True)) == expected
        and str(rank_training._device(use_gpu=False)) == "cpu"
    )
