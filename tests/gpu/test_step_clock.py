"""A rank's own time on a GPU: the stream's, not that of the host which runs ahead of it."""

from __future__ import annotations

import time

import pytest
import torch

from train_fn.step.timing import StepClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_own_time_is_that_of_the_stream_without_the_wait() -> None:
    device = torch.device("cuda")
    layer = torch.nn.Linear(4096, 4096, device=device)
    clock = StepClock(list(layer.parameters()), device)
    x = torch.ones(4096, 4096, device=device)

    def step() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            x.mm(x)
        layer(x).sum().backward()
        torch.cuda.synchronize()  # as reading the totals does
        worked_s = time.perf_counter() - began
        time.sleep(0.05)  # the gate opens late: others are slower
        own_s = clock.gate()
        assert own_s == 0 or own_s < worked_s + 0.01
        return own_s

    step()
    assert step() > 0.001
    clock.restart()
    assert step() == 0
