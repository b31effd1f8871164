"""What a real GPU tells of itself while it works."""

from __future__ import annotations

import time

import torch

from train_fn.node.usage import sample_gpu


def test_a_gpu_that_works_is_busy_and_its_memory_is_counted() -> None:
    device = torch.device("cuda", 0)
    x = torch.ones(8192, 8192, device=device)
    ends_at, busy = time.monotonic() + 3, []
    while time.monotonic() < ends_at:
        for _ in range(20):
            x.mm(x)
        torch.cuda.synchronize()
        busy.append(sample_gpu(device).busy)
    look = sample_gpu(device)
    assert look.allocated_bytes >= 2 * x.numel() * 4
    assert look.allocated_bytes <= look.used_bytes <= look.total_bytes
    known = [each for each in busy if each is not None]
    assert not known or max(known) > 0.5, "NVML may be silent, but must not call a busy GPU idle"
