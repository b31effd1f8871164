"""Everything here needs a CUDA device; without one each test says so and is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from train_fn.recovery.settings import NCCL_ENV
from train_fn.step.peers import end_process_group

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this directory, and skip it where there is no GPU."""
    missing = (
        None
        if torch.cuda.is_available()
        else pytest.mark.skip(reason="needs a CUDA device; this machine has none")
    )
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if missing is not None:
                item.add_marker(missing)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A process group of one rank over NCCL."""
    for name, value in NCCL_ENV.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield device
    end_process_group()
    torch.use_deterministic_algorithms(False)
