"""What goes wrong on GPUs: memory that is too small says who held it, and an aborted communicator
lets nobody believe its sums."""

from __future__ import annotations

import pytest
import torch

from everstep.wire import ErrorKind
from train_fn.node.memory import memory_summary
from train_fn.recovery.evidence import kind_of


def test_out_of_memory_is_a_verdict_with_who_held_it(nccl: torch.device) -> None:
    held = torch.empty(64 << 20, dtype=torch.uint8, device=nccl)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=nccl)
    assert kind_of(caught.value) is ErrorKind.DEVICE_MEMORY
    summary = memory_summary(caught.value, nccl)
    assert summary is not None
    assert "cuda:0" in summary.splitlines()[0]
    assert "Allocated memory" in summary
    assert memory_summary(ValueError(), nccl) is None
    del held
